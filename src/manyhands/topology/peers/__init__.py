"""Who is whose neighbour when there is no centre, and how two of them meet."""

from manyhands.topology.peers.exchanges import Exchange, Pairing, Pulling, Pushing
from manyhands.topology.peers.graphs import neighbours, sides
from manyhands.topology.peers.mixing import mixing
from manyhands.topology.peers.others import Others, shuffled
from manyhands.topology.peers.own import GRADIENT, Own

__all__ = [
    "GRADIENT",
    "Exchange",
    "Others",
    "Own",
    "Pairing",
    "Pulling",
    "Pushing",
    "mixing",
    "neighbours",
    "shuffled",
    "sides",
]

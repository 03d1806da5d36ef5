"""Training without a server: graphs of neighbours, mixing weights, and how two workers average their models."""

from manyhands.peers.exchanges import PairwiseAverage, PeerExchange, PeerLoop, PullAverage, PushAverage
from manyhands.peers.graphs import neighbours, sides
from manyhands.peers.mixing import mixing
from manyhands.peers.peer_model import PeerModel

__all__ = [
    "PairwiseAverage",
    "PeerExchange",
    "PeerLoop",
    "PeerModel",
    "PullAverage",
    "PushAverage",
    "mixing",
    "neighbours",
    "sides",
]

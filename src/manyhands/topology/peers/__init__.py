"""Who is whose neighbour, when there is no centre."""

from manyhands.topology.peers.graphs import neighbours, sides
from manyhands.topology.peers.mixing import mixing

__all__ = ["mixing", "neighbours", "sides"]

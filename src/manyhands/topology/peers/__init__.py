"""Who is whose neighbour, when there is no centre."""

from manyhands.topology.peers.graphs import neighbours, sides

__all__ = ["neighbours", "sides"]

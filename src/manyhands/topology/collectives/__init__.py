"""Sums over a group of ranks: `all_reducer` picks one of several algorithms by name, or by size."""

from manyhands.topology.collectives.choose import all_reducer

__all__ = ["all_reducer"]

"""Collective operations over any group of ranks: `collective` gives one of several algorithms by name, or by size."""

from manyhands.collectives.choose import ALGORITHMS, collective

__all__ = ["ALGORITHMS", "collective"]

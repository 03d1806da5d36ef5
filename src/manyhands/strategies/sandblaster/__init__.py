"""Sandblaster: L-BFGS on large batches, with a coordinator and sharded vectors."""

from manyhands.strategies.sandblaster.sandblaster import Sandblaster

__all__ = ["Sandblaster"]

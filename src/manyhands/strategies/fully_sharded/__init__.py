"""Fully sharded training: each worker keeps 1/P of the model."""

from manyhands.strategies.fully_sharded.fully_sharded import FullySharded

__all__ = ["FullySharded"]

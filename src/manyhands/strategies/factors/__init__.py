"""Sufficient factors: linear layers exchange two thin matrices instead of a gradient."""

from manyhands.strategies.factors.factors import Factors

__all__ = ["Factors"]

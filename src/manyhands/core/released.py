"""Released memory: a flat model whose weights or gradients are elsewhere keeps their sizes, as views of one number."""

from __future__ import annotations

import math

import torch

from manyhands.core.flat import Flat
from manyhands.core.vector_ops import UNCHARGED


def release(flat: Flat) -> None:
    """Free the memory of weights and gradients: all are views of one zero."""
    if UNCHARGED.computes(
        *(group.weights for group in flat.groups)
    ):  # one of sizes only may be that of other ranks too
        release_gradients(flat)
        release_weights(flat, 0.0)


def release_gradients(flat: Flat) -> None:
    """Free the memory of the gradients: they are views of one zero."""
    flat.collect_in([group.weights.new_zeros(1).expand(group.outgoing.numel()) for group in flat.groups])


@torch.no_grad()
def release_weights(flat: Flat, value: float = math.nan) -> None:
    """Free the memory of the weights: they are views of one number, NaN where to read them is a mistake."""
    flat.move_to([group.weights.new_full((1,), value).expand(group.weights.numel()) for group in flat.groups])

"""Shared weights: one memory for all workers of a host, which the first of them fills with its own weights."""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.core.worker import Worker


@torch.no_grad()
def shared_weights(w: Worker, name: str = "weights") -> list[Tensor]:
    """The shared memory, one tensor per group of the model."""
    t, groups = w.transport, w.flat.groups
    with t.lock(name):
        filled = t.shared(f"{name}.filled", 1, torch.uint8)
        memory = [w.shared(f"{name}{n}", group.weights) for n, group in enumerate(groups)]
        if not filled.item():
            for shared, group in zip(memory, groups, strict=True):
                shared.copy_(group.weights)
            filled.fill_(1)
    return memory


@torch.no_grad()
def read(w: Worker, weights: list[Tensor]) -> None:
    """Copy weights, which other workers may be writing at this moment, into the model's own."""
    for group, x in zip(w.flat.groups, weights, strict=True):
        w.ops.copy(x, group.weights)

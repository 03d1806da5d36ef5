"""Common weights: one memory for all workers of a host, which whoever comes first fills with its own."""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.core.worker import Worker


@torch.no_grad()
def common_weights(w: Worker, name: str = "weights") -> list[Tensor]:
    """The common memory, one tensor per part of the model. Of a model of sizes only it is the model's own."""
    t, parts = w.transport, w.flat.parts
    if w.flat.is_meta:
        return [part.weights for part in parts]
    with t.lock(name):
        filled = t.shared(f"{name}.filled", 1, torch.uint8)
        memory = [t.shared(f"{name}{n}", p.weights.numel(), p.weights.dtype) for n, p in enumerate(parts)]
        if not filled.item():
            for common, part in zip(memory, parts, strict=True):
                common.copy_(part.weights)
            filled.fill_(1)
    return memory


@torch.no_grad()
def read(w: Worker, weights: list[Tensor]) -> None:
    """Copy weights, which others may be writing, into the model's own."""
    for part, x in zip(w.flat.parts, weights, strict=True):
        w.move(part.weights.nbytes)
        if not x.is_meta:
            part.weights.copy_(x)

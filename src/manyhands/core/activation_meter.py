"""Activation meter: the most bytes that the passes of a rank keep for their backward passes at one time.

Counted are the tensors that autograd saves, the input and the output of each pass, and what a pass that is divided into
two halves keeps between them. Weights are not, because every rank has them once anyway. A step is measured by torch's
hooks on saved tensors, which take time: so the first one is, or as many as fill the pipeline, and the others are alike.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Place = tuple[int, int]
"""A storage, and the first element of it."""


class ActivationMeter:
    """Counts while it is `on`; `most` is the result, None before anything was counted."""

    def __init__(self) -> None:
        self.on = False
        self.most: int | None = None
        self._kept: dict[Hashable, dict[tuple[Place, int], int]] = {}

    @contextmanager
    def saving(self, key: Hashable, weights: Iterable[Tensor]) -> Iterator[None]:
        """Count for `key` what autograd saves within."""
        if not self.on:
            yield
            return
        outside = {_place(weight) for weight in weights}

        def pack(x: Tensor) -> Tensor:
            self._count(key, x, outside)
            return x.detach()

        def unpack(x: Tensor) -> Tensor:
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def keep(self, key: Hashable, *tensors: Tensor) -> None:
        """Count tensors that are kept for `key`."""
        if self.on:
            for x in tensors:
                self._count(key, x)

    def free(self, key: Hashable) -> None:
        """What was kept for `key` is not any more."""
        self._kept.pop(key, None)

    def _count(self, key: Hashable, x: Tensor, outside: Collection[Place] = ()) -> None:
        if _place(x) not in outside:
            self._kept.setdefault(key, {})[_place(x), x.nbytes] = x.nbytes
            self.most = max(self.most or 0, self.now)

    @property
    def now(self) -> int:
        """The bytes that are kept now."""
        return sum(sum(kept.values()) for kept in self._kept.values())


def _place(x: Tensor) -> Place:
    """Where a tensor begins; a tensor of sizes only has a storage too, but no address."""
    return x.untyped_storage()._cdata, int(x.storage_offset())

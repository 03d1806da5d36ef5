"""Pushed gradients between their push and the update that applies them, each in a slot.

decode        a gradient is kept
"never"       in its message, whose tensors are the gradient (plain codecs)
"on_apply"    in its message; it is decoded, and summed with others, when it is applied
"on_push"     decoded, in memory of its slot; the message is released at once

A shard decodes on push where an update reads each of several gradients, where a worker continues before its gradient is
applied, and in shared memory, where another process may apply it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from manyhands.core.codec import Codec
from manyhands.core.consistency import Consistency, Picks
from manyhands.core.vector_ops import VectorOps

Payload = Sequence[Sequence[Tensor]]
"""An encoded gradient: for every span of a shard the tensors that its codec made."""

Decode = Literal["never", "on_apply", "on_push"]

Memory = Callable[[str, Tensor], Tensor]
"""Allocates a tensor: its name, and a tensor of the same size and dtype."""

NO_PARAMETERS: frozenset[int] = frozenset()


class LentGradient(NamedTuple):
    """A gradient in its message."""

    payload: Payload
    untouched: frozenset[int]
    release: Callable[[], None]


class DecodedGradient(NamedTuple):
    """Memory of a slot: a tensor per slice, and a flag per parameter of the model, 1 if it was untouched."""

    tensors: list[Tensor]
    untouched: MutableSequence[int]


def _private_memory(_: str, like: Tensor) -> Tensor:
    return torch.empty_like(like)


class PendingGradients:
    """The gradients that a shard has received and not applied yet.

    Args:
        ops: the vector operations of the rank that holds them.
        codecs: of every slice, what pushes are encoded with.
        weights: of every slice, for sizes and dtypes.
        decode: when a gradient is decoded.
        parameters: how many parameters the model has ("on_push").
        slots: how many slots to allocate now; more are allocated when they are needed ("on_push").
        memory: allocates the slots, by default in the memory of this process.
    """

    def __init__(
        self,
        ops: VectorOps,
        codecs: Sequence[Codec],
        weights: Sequence[Tensor],
        decode: Decode,
        parameters: int = 0,
        slots: int = 0,
        memory: Memory = _private_memory,
    ) -> None:
        self._ops = ops
        self.codecs = codecs
        self._weights = weights
        self._decode = decode
        self._parameters = parameters
        self._memory = memory
        self._lent: dict[int, LentGradient] = {}
        self._slots = [self._allocate(slot) for slot in range(slots)]
        self._sums: list[tuple[Tensor, Tensor]] = []

    def _allocate(self, slot: int) -> DecodedGradient:
        tensors = [self._memory(f"grad{slot}.{n}", x) for n, x in enumerate(self._weights)]
        flags = self._memory(f"skip{slot}", torch.zeros(self._parameters, dtype=torch.uint8)).numpy()
        return DecodedGradient(tensors, cast(MutableSequence[int], memoryview(flags)))  # type: ignore[arg-type]

    def put(self, slot: int, payload: Payload, untouched: Sequence[int], release: Callable[[], None]) -> None:
        """Store a gradient; `release` returns its message to the sender."""
        if self._decode != "on_push":
            self._lent[slot] = LentGradient(payload, frozenset(untouched) if untouched else NO_PARAMETERS, release)
            return
        while slot >= len(self._slots):
            self._slots.append(self._allocate(len(self._slots)))
        decoded = self._slots[slot]
        for codec, tensors, out in zip(self.codecs, payload, decoded.tensors, strict=True):
            self._ops.decode(codec, tensors, out)
        decoded.untouched[:] = bytes(self._parameters)
        for param_id in untouched:
            decoded.untouched[param_id] = 1
        release()

    def holds(self, slot: int) -> bool:
        """Whether the gradient can be read here: not if another process has pushed it and died before applying it."""
        return self._decode == "on_push" or slot in self._lent

    def read(self, slots: Sequence[int]) -> tuple[list[list[Tensor]], frozenset[int]]:
        """For every slice the gradients in these slots, or their sum, and the parameters that none of them touched.

        They are to be read only, before the next `put`.
        """
        if self._decode == "on_push":
            decoded = [self._slots[slot] for slot in slots]
            gradients = [list(tensors) for tensors in zip(*[one.tensors for one in decoded], strict=True)]
            return gradients, frozenset.intersection(*[_flagged(one.untouched) for one in decoded])
        lent = [self._lent[slot] for slot in slots]
        untouched = frozenset.intersection(*[one.untouched for one in lent])
        if self._decode == "never":
            return [[one.payload[n][0] for one in lent] for n in range(len(self.codecs))], untouched
        return [[self._sum(lent, n)] for n in range(len(self.codecs))], untouched

    @torch.no_grad()
    def _sum(self, lent: Sequence[LentGradient], n: int) -> Tensor:
        """The sum of the gradients of the n-th slice, decoded one after the other, in this order."""
        if not self._sums:
            self._sums = [(torch.empty_like(x), torch.empty_like(x)) for x in self._weights]
        (total, one), codec = self._sums[n], self.codecs[n]
        self._ops.decode(codec, lent[0].payload[n], total)
        for gradient in lent[1:]:
            self._ops.add_decoded(codec, gradient.payload[n], total, one)
        return total

    def release(self, slots: Sequence[int]) -> None:
        """These gradients were applied or dropped: release the messages that hold them."""
        if self._decode != "on_push":
            for slot in slots:
                if slot in self._lent:
                    self._lent.pop(slot).release()


def _flagged(flags: MutableSequence[int]) -> frozenset[int]:
    values = bytes(flags)
    return frozenset(n for n, flag in enumerate(values) if flag) if any(values) else NO_PARAMETERS


def decode_when_applied(codecs: Sequence[Codec]) -> Decode:
    """How to hold gradients whose messages may be kept until they are applied."""
    return "never" if all(codec.traits.plain for codec in codecs) else "on_apply"


def pending_slots(when: Consistency, workers: int) -> int:
    """How many gradients may be pending together at a shard."""
    return when.most(workers) if isinstance(when, Picks) else workers

"""Shared: ranks of one host reduce in memory that all of them see; no tensor is sent.

An all-reduce of P = 3; each line is the memory of a rank, each column a rank's span:

    copy in    rank 0   . a a      reduce    span 0  span 1  span 2      copy out
               rank 1   b . b                a+b+c                       all ranks read
               rank 2   c c .                        a+b+c               all of the sum
                                                             a+b+c

    each rank:  memory[r] <- x but for span r · barrier · sum <- memory[0] + .. + x + .. on span r · barrier · x <- sum

    T = 2 L + (3 - 1/P) γ m / B      B the rate at which one core moves bytes; 2 rounds

The sum is made in the order of ranks, by one rank each, so it is the same for every number of calls and all ranks end
with the same bits. In every other operation a rank writes its own memory, and after a barrier reads what it needs of
the others'; a second barrier ends it. Only all_to_all, whose lengths not all ranks know, is by messages, whose tensors
a host's transport lends in place.

The barrier is that of `shm_barrier`. No memory is written too early: a rank writes its own memory only after the last
barrier of the call before, at which all have read it; it writes the sum only after the first barrier of a call, which
follows the copying of the last sum on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.collectives.group import check_length, check_op, combine, copy, vector
from manyhands.collectives.plain import PlainCollective
from manyhands.collectives.shm_barrier import shm_barrier
from manyhands.core.errors import refuse_unless
from manyhands.core.port import ReduceOp, Transport
from manyhands.core.vector_ops import vector_ops


def capacity(numel: int) -> int:
    """How many elements to ask for: slightly more, so that similar sizes share the memory."""
    grain = max(1024, 1 << max(0, numel.bit_length() - 4))
    return max(1, -(-numel // grain)) * grain


class Shared(PlainCollective):
    """Collectives in the memory of one host."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        super().__init__(transport, ranks, "shared")
        self._ops = vector_ops(transport)
        hosts = sorted({transport.hosts[rank] for rank in ranks})
        refuse_unless(len(hosts) == 1, "the number of hosts of a shared collective", len(hosts), "1: it needs memory")
        self._barrier = shm_barrier(transport, ranks, f"shared.{self._group.label}", self._group.barrier)
        self._memory: dict[torch.dtype, list[Tensor]] = {}

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in the order of ranks, in place."""
        check_op(op)
        x = vector(x)
        if self._group.size == 1:
            return
        self._group.begin()
        *memory, total = self._memory_for(x)
        self._reduce(x, memory, op, total[self._spans(x)[self._group.index_in_group]])
        self._barrier()
        self._ops.copy(total, x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The first half of an all-reduce, into new memory."""
        x = vector(x)
        if self._group.size == 1:
            return x.clone()
        self._group.begin()
        total = torch.empty_like(x[self._spans(x)[self._group.index_in_group]])
        self._reduce(x, self._memory_for(x)[:-1], "sum", total)
        self._barrier()
        return total

    def _reduce(self, x: Tensor, memory: list[Tensor], op: ReduceOp, out: Tensor) -> None:
        """Copy `x` into this rank's memory, wait for the others, reduce this rank's span of all of them."""
        r = self._group.index_in_group
        own = self._spans(x)[r]
        self._ops.copy(x[: own.start], memory[r][: own.start])
        self._ops.copy(x[own.stop :], memory[r][own.stop :])
        self._barrier()
        memory[r] = x  # no other rank reads the own span, so it was not copied
        first, *others = (one[own] for one in memory)
        if self._ops.computes(out, passes=len(memory)):
            for other in others:
                combine(first, other, op, out)
                first = out

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        """Write the own span, read all others."""
        mine, out = vector(mine), vector(out)
        spans, r = self._spans(out), self._group.index_in_group
        check_length("mine", mine, spans[r])
        self._group.begin()
        copy(mine, out[spans[r]])
        if self._group.size > 1:
            *memory, _ = self._memory_for(out)
            self._ops.copy(mine, memory[r][spans[r]])
            self._barrier()
            for index in self._group.others:
                self._ops.copy(memory[index][spans[index]], out[spans[index]])
            self._barrier()

    def broadcast(self, x: Tensor, root: int) -> None:
        """The root writes, all others read."""
        x, source = vector(x), self._group.index_of(root)
        self._group.begin()
        if self._group.size > 1:
            memory = self._memory_for(x)[source]
            is_root = source == self._group.index_in_group
            if is_root:
                self._ops.copy(x, memory)
            self._barrier()
            if not is_root:
                self._ops.copy(memory, x)
            self._barrier()

    def barrier(self) -> None:
        """Through memory where that is possible."""
        self._group.begin()
        self._barrier()

    def _memory_for(self, x: Tensor) -> list[Tensor]:
        """The memory of each index and, last, of the sum, as long as x."""
        if x.is_meta:
            return [x] * (self._group.size + 1)
        m, memory = x.numel(), self._memory.get(x.dtype)
        if memory is None or memory[0].numel() < m:
            room, kind = capacity(m), str(x.dtype).removeprefix("torch.")
            names = [f"{self._group.label}.{kind}.{room:x}.{index}" for index in range(self._group.size + 1)]
            memory = [self._group.transport.shared(name, room, x.dtype) for name in names]
            self._memory[x.dtype] = memory
        return [one[:m] for one in memory]

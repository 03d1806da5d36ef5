"""Shared: ranks of one host add in memory that all of them see; only "I am done" travels.

P = 3, each line a memory, each column a rank's span:

    copy in    rank 0   . a a      reduce    span 0  span 1  span 2      copy out
               rank 1   b . b                a+b+c                       everyone reads
               rank 2   c c .                        a+b+c               all of the sum
                                                             a+b+c

    each rank:  memory[r] <- x but for span r · meet · sum <- memory[0] + .. + x + .. on span r · meet · x <- sum

    T = 2 L + (3 - 1/P) γ m / B      B the rate at which one core moves bytes; 2 rounds, no tensor is sent

The sum is made in the order of ranks, by one rank each, so it is the same for every number of calls and all ranks end
with the same bits.

How they meet is in gate.py. No memory is written too early: a rank copies in again after the second meeting, where all
have read its last vector; it reduces again after the next first meeting, where all have copied the last sum out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.protocols import Transport
from manyhands.core.worker import REFERENCE_BYTES
from manyhands.topology.collectives.gate import gate
from manyhands.topology.collectives.group import Group


def capacity(numel: int) -> int:
    """How much memory to ask for: a little to spare, so that similar sizes share it."""
    grain = max(1024, 1 << max(0, numel.bit_length() - 4))
    return -(-numel // grain) * grain


class Shared:
    """All-reduce in the memory of one host."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self._group = Group(transport, ranks, "shared")
        hosts = sorted({transport.hosts[rank] for rank in ranks})
        refuse_unless(len(hosts) == 1, "the number of hosts of a shared collective", len(hosts), "1: it needs memory")
        self._meet = gate(transport, ranks, f"shared.{self._group.label}", self._group.meet)
        self._memory: dict[torch.dtype, list[Tensor]] = {}

    def all_reduce(self, x: Tensor) -> None:
        """Sum in place, in the order of ranks."""
        x = self._group.begin(x)
        if self._group.size == 1:
            return
        *memory, total = [x] * (self._group.size + 1) if x.is_meta else self._memory_for(x)
        r = self._group.place
        start, stop = (len(x) * place // self._group.size for place in (r, r + 1))
        self._move(x[:start], memory[r][:start])
        self._move(x[stop:], memory[r][stop:])
        self._meet()
        memory[r] = x  # the span that is left is ours to add up, so nobody else needs it
        self._reduce(*(one[start:stop] for one in (total, *memory)))
        self._meet()
        self._move(total, x)

    def _reduce(self, into: Tensor, first: Tensor, *others: Tensor) -> None:
        self._spend((1 + len(others)) * into.nbytes)
        if not into.is_meta:
            torch.add(first, others[0], out=into)
            for other in others[1:]:
                into.add_(other)

    def _move(self, x: Tensor, into: Tensor) -> None:
        self._spend(x.nbytes)
        if len(x) and not into.is_meta:
            into.copy_(x)

    def _spend(self, nbytes: int) -> None:
        self._group.transport.spend(nbytes / REFERENCE_BYTES, moving=True)

    def _memory_for(self, x: Tensor) -> list[Tensor]:
        """One memory for each place and one for the sum, cut to the length of x."""
        m, memory = x.numel(), self._memory.get(x.dtype)
        if memory is None or memory[0].numel() < m:
            room, kind = capacity(m), str(x.dtype).removeprefix("torch.")
            names = [f"{self._group.label}.{kind}.{room:x}.{place}" for place in range(self._group.size + 1)]
            memory = [self._group.transport.shared(name, room, x.dtype) for name in names]
            self._memory[x.dtype] = memory
        return [one[:m] for one in memory]

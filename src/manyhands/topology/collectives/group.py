"""What all algorithms share: ranks seen as places, calls that cannot be mixed up, and the rules of lending.

    ranks    1   4   5   9      any sorted ranks of the job
    places   0   1   2   3      what an algorithm counts in

A message carries the algorithm and the group in its tag's name and the number of the call in its key, so
a rank that is already in its next call, or in another group, is never mistaken.

Lending. A caller may write into `x` as soon as `all_reduce` returns. Nobody waits for that; instead

1. what is lent out of `x` itself comes back within the call: a rank writes there, or returns, only after a
   message that its receiver (or somebody who had to wait for that receiver) sent after `release`;
2. what a rank says last, which nobody answers, is lent out of an `Outbox`, memory of the algorithm's own. The
   next call writes there only after it has heard from everyone to whom it was lent.

Both are chains of messages that travel anyway, so they hold in any world and cost no round.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError, Refused, refuse_unless
from manyhands.core.protocols import Message, Tag, Transport, recv

KIND = Tag("collective", carries="vectors")


class Group:
    """One rank's view of a group; each rank makes the same calls in the same order, one at a time."""

    def __init__(self, transport: Transport, ranks: Sequence[int], name: str) -> None:
        self.ranks = check_ranks(transport, ranks)
        self.place = self.ranks.index(transport.rank)
        self.size = len(self.ranks)
        self.transport = transport
        self.label = blake2b(",".join(map(str, self.ranks)).encode(), digest_size=4).hexdigest()
        """Names the group in a few letters."""
        self._tag = Tag(f"{KIND.name}:{name}:{self.label}", carries=KIND.carries)

    def begin(self, x: Tensor) -> Tensor:
        """Start a call; returns `x` as the algorithm may write it."""
        refuse_unless(x.dim() == 1 and x.is_contiguous(), "the shape to all-reduce", tuple(x.shape), "one plain row")
        self._tag = self._tag.of(self._tag.key + 1)
        return x.detach() if x.requires_grad else x

    def send(self, to: int, x: Tensor) -> None:
        """Lend `x` to a place."""
        self.transport.send(self.ranks[to], self._tag, tensors=(x,))

    def add(self, frm: int, x: Tensor) -> None:
        """Add what comes from a place to `x`."""
        message = self._receive(frm, x)
        if not x.is_meta:
            x.add_(message.tensors[0])
        message.release()

    def plus(self, frm: int, x: Tensor) -> Tensor:
        """The sum of `x` and what comes from a place, in new memory; `x` stays as it is."""
        message = self._receive(frm, x)
        total = torch.empty_like(x) if x.is_meta else x + message.tensors[0]
        message.release()
        return total

    def take(self, frm: int, *into: Tensor) -> None:
        """Copy what comes from a place into each of these."""
        message = self._receive(frm, into[0])
        for x in into:
            copy(message.tensors[0], x)
        message.release()

    def meet(self) -> None:
        """Wait until everyone is here."""
        others = [(self.place + step) % self.size for step in range(1, self.size)]
        for place in others:
            self.transport.send(self.ranks[place], self._tag)
        for place in others:
            recv(self.transport, self._tag, frm=self.ranks[place]).release()

    def _receive(self, frm: int, like: Tensor) -> Message:
        message = recv(self.transport, self._tag, frm=self.ranks[frm])
        (got,) = message.tensors
        if got.numel() != like.numel() or got.dtype != like.dtype:
            has, wants = (f"{x.numel()} of {x.dtype}" for x in (got, like))
            raise ManyhandsError(f"rank {message.frm} all-reduces another tensor: it sent {has}, here {wants} fit")
        return message


class Outbox:
    """Memory to lend from: one per dtype, as large as the largest call so far."""

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, Tensor] = {}

    def like(self, x: Tensor) -> Tensor:
        """As many elements as `x` has; what they held is lost."""
        if x.is_meta:
            return torch.empty_like(x)
        memory = self._memory.get(x.dtype)
        if memory is None or memory.numel() < x.numel() or memory.device != x.device:
            memory = self._memory[x.dtype] = torch.empty_like(x)
        return memory[: x.numel()]


def copy(x: Tensor, into: Tensor) -> None:
    """Copy, unless there are only sizes."""
    if not into.is_meta:
        into.copy_(x)


def check_ranks(transport: Transport, ranks: Sequence[int]) -> Sequence[int]:
    """The ranks of a group, refused unless they are in order, exist, and include this one; a range stays one."""
    ordered = ranks.step > 0 if isinstance(ranks, range) else list(ranks) == sorted(set(ranks))
    if not ordered:
        raise _refused(ranks, "in order, each rank once")
    if ranks and not 0 <= ranks[0] <= ranks[-1] < transport.size:
        raise _refused(ranks, f"among ranks 0 to {transport.size - 1}")
    if transport.rank not in ranks:
        raise _refused(ranks, f"one with rank {transport.rank}, which asks for it")
    return ranks if isinstance(ranks, range) else list(ranks)


def _refused(ranks: Sequence[int], bound: str) -> Refused:
    return Refused(f"group is {list(ranks)}, but must be {bound}")

"""What all algorithms share: a group of ranks, calls that cannot be confused, and the rules of lending.

    ranks             1   4   5   9      any sorted ranks of the job
    index in group    0   1   2   3      what an algorithm counts in

A message carries the algorithm and the group in its tag's name and the number of the call in its key, so a message of
a rank that is already in its next call, or in another group, is not received by mistake.

Lending. A caller may write into a vector as soon as the call returns. No rank waits for that; instead

1. what is lent out of the vector itself is released within the call: a rank writes there, or returns, only after it
   has received a message which its receiver, or a rank that had to wait for that receiver, sent after `release`;
2. what a rank sends last, to which there is no answer, is lent out of memory of the algorithm's own. In an all-reduce
   that is an `Outbox`: the next all-reduce writes there only after it has received a message from every rank to which
   it was lent. The other operations lend new memory, which is not written again.

These orders follow from messages that are sent anyway, so they hold in any world and cost no round.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from manyhands.core.errors import BadPayload, Refused, refuse_unless
from manyhands.core.port import Message, ReduceOp, Tag, Transport, recv
from manyhands.core.vector_ops import UNCHARGED

KIND = Tag("collective", carries="vectors")


class RankGroup:
    """One rank's view of a group; each rank makes the same calls in the same order, one at a time."""

    def __init__(self, transport: Transport, ranks: Sequence[int], name: str) -> None:
        self.ranks = check_ranks(transport, ranks)
        self.index_in_group = self.ranks.index(transport.rank)
        self.size = len(self.ranks)
        self.others = [(self.index_in_group + step) % self.size for step in range(1, self.size)]
        """The other indices, from the next one on, so that ranks do not all send to the same one first."""
        self.transport = transport
        self.label = blake2b(",".join(map(str, self.ranks)).encode(), digest_size=4).hexdigest()
        """A short name of the group."""
        self._tag = Tag(f"{KIND.name}:{name}:{self.label}", carries=KIND.carries)

    def begin(self) -> None:
        """Start a call: from now on messages carry its number."""
        self._tag = self._tag.of(self._tag.key + 1)

    def index_of(self, root: int) -> int:
        """The index of a rank that must be one of the group."""
        refuse_unless(root in self.ranks, "root", root, f"one of the ranks {list(self.ranks)}")
        return self.ranks.index(root)

    def send(self, to: int, x: Tensor) -> None:
        """Lend `x` to the rank of index `to`."""
        self.transport.send(self.ranks[to], self._tag, tensors=(x,))

    def receive(self, frm: int, like: Tensor) -> Message:
        """The vector from index `frm`; refused unless it has the length and dtype of `like`."""
        message = recv(self.transport, self._tag, frm=self.ranks[frm])
        (got,) = message.tensors
        if got.numel() != like.numel() or got.dtype != like.dtype:
            has, wants = (f"{x.numel()} of {x.dtype}" for x in (got, like))
            raise BadPayload(f"rank {message.frm} passed another tensor to this collective: {has} instead of {wants}")
        return message

    def reduce_into(self, frm: int, x: Tensor, op: ReduceOp = "sum") -> None:
        """Combine what index `frm` sends with `x`, in place."""
        message = self.receive(frm, x)
        combine(x, message.tensors[0], op, out=x)
        message.release()

    def reduced(self, frm: int, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        """`x` combined with what index `frm` sends, in new memory."""
        message = self.receive(frm, x)
        total = torch.empty_like(x)
        combine(x, message.tensors[0], op, out=total)
        message.release()
        return total

    def copy_into(self, frm: int, *outs: Tensor) -> None:
        """Copy what index `frm` sends into each of these."""
        message = self.receive(frm, outs[0])
        for out in outs:
            copy(message.tensors[0], out)
        message.release()

    def barrier(self) -> None:
        """A barrier in one round: an empty message to each of the others, and one from each."""
        for index in self.others:
            self.transport.send(self.ranks[index], self._tag)
        for index in self.others:
            recv(self.transport, self._tag, frm=self.ranks[index]).release()


class Outbox:
    """Memory to lend from: one per dtype, as large as the largest call so far."""

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, Tensor] = {}

    def like(self, x: Tensor) -> Tensor:
        """As many elements as `x` has, with any content."""
        if x.is_meta:
            return x
        memory = self._memory.get(x.dtype)
        if memory is None or memory.numel() < x.numel() or memory.device != x.device:
            memory = self._memory[x.dtype] = torch.empty_like(x)
        return memory[: x.numel()]


def vector(x: Tensor) -> Tensor:
    """`x` without its gradient, refused unless it is a contiguous row."""
    refuse_unless(x.dim() == 1 and x.is_contiguous(), "the shape of a vector", tuple(x.shape), "one contiguous row")
    return x.detach() if x.requires_grad else x


def combine(x: Tensor, y: Tensor, op: ReduceOp, out: Tensor) -> None:
    """Write `x + y` or their maximum; in simulated time that is part of the time of a message."""
    if UNCHARGED.computes(out):
        (torch.add if op == "sum" else torch.maximum)(x, y, out=out)


def copy(x: Tensor, out: Tensor) -> None:
    """Copy, unless both are the same memory."""
    if UNCHARGED.computes(out) and out.data_ptr() != x.data_ptr():
        out.copy_(x)


def check_length(name: str, x: Tensor, span: slice) -> None:
    """Refuse a vector that does not fill its span."""
    length = span.stop - span.start
    refuse_unless(x.numel() == length, f"the length of {name}", x.numel(), f"{length}, as its span")


def check_op(op: str) -> None:
    """Refuse what is no `ReduceOp`."""
    refuse_unless(op in ("sum", "max"), "op", op, "sum or max")


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

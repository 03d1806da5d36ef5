"""PlainCollective: the operations that do not depend on how an algorithm reduces, and simple forms of those that do.

    reduce_scatter   each rank sends span j of x to the j-th rank, which adds in the order of ranks      1 round
    all_gather       each rank sends its span to all others                                              1 round
    all_to_all       each rank sends x_j to the j-th rank                                                1 round
    broadcast        along a binomial tree from the root                                                 lg P rounds
    barrier          each rank sends an empty message to all others                                      1 round

    elements sent    reduce_scatter, all_gather: m (P - 1) by all together, m (P - 1) / P by each if P divides m
                     broadcast: m (P - 1) by all, m lg P by the root

The tree of P = 8 ranks, for the root at index 0; for another root the indices are counted from there:

    0 → 4, 2, 1      4 → 6, 5      2 → 3      6 → 7

A rank waits until one message has left before it sends the next: the deepest branch is first and gets the whole link.

Reference: E. Chan et al., "Collective communication: theory, practice, and experience", 2007,
https://doi.org/10.1002/cpe.1206.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from manyhands.collectives.group import RankGroup, check_length, copy, vector
from manyhands.core.errors import refuse_unless
from manyhands.core.port import Transport, even_spans
from manyhands.core.vector_ops import UNCHARGED


def family(index: int, size: int) -> tuple[int | None, list[int]]:
    """The parent of an index in the binomial tree, and its children, leaves first."""
    children, k = [], 1
    while k < size and index % (2 * k) == 0:
        if index + k < size:
            children.append(index + k)
        k *= 2
    return (index - k if index else None), children


class PlainCollective:
    """All operations but all_reduce; an algorithm replaces those of which it has a form of its own."""

    def __init__(self, transport: Transport, ranks: Sequence[int], name: str) -> None:
        self._group = RankGroup(transport, ranks, name)

    def _spans(self, x: Tensor) -> list[slice]:
        return even_spans(x.numel(), self._group.size)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Send each span to its rank, add the own one in the order of ranks."""
        x, group = vector(x), self._group
        group.begin()
        spans = self._spans(x)
        for index in group.others:
            group.send(index, x[spans[index]].clone())
        own = x[spans[group.index_in_group]]
        total = own.clone()
        for index in range(group.size):
            if index == group.index_in_group:
                if index:
                    UNCHARGED.add(total, own)
            elif index == 0:
                group.copy_into(index, total)
            else:
                group.reduce_into(index, total)
        return total

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        """Send the own span to all others, receive theirs."""
        mine, out, group = vector(mine), vector(out), self._group
        group.begin()
        spans = self._spans(out)
        own = spans[group.index_in_group]
        check_length("mine", mine, own)
        lent = mine.clone()
        copy(mine, out[own])
        for index in group.others:
            group.send(index, lent)
        for index in group.others:
            group.copy_into(index, out[spans[index]])

    def broadcast(self, x: Tensor, root: int) -> None:
        """Receive from the parent, send to the children."""
        x, group = vector(x), self._group
        group.begin()
        first = group.index_of(root)
        parent, children = family((group.index_in_group - first) % group.size, group.size)
        if parent is not None:
            group.copy_into((parent + first) % group.size, x)
        if children:
            self._send_down([(child + first) % group.size for child in children], x.clone())

    def _send_down(self, children: Sequence[int], lent: Tensor) -> None:
        """Send the same to all children, the deepest branch first."""
        deepest, *others = reversed(children)
        self._group.send(deepest, lent)
        for child in others:
            self._group.transport.flush()
            self._group.send(child, lent)

    def all_to_all(self, xs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Send each vector to its rank, receive one from each."""
        group, index = self._group, self._group.index_in_group
        for name, some in (("xs", xs), ("outs", outs)):
            refuse_unless(len(some) == group.size, f"the number of {name}", len(some), f"{group.size}, as ranks")
        xs, outs = [vector(x) for x in xs], [vector(x) for x in outs]
        group.begin()
        check_length(f"outs[{index}]", outs[index], slice(0, xs[index].numel()))
        for other in group.others:
            group.send(other, xs[other].clone())
        copy(xs[index], outs[index])
        for other in group.others:
            group.copy_into(other, outs[other])

    def barrier(self) -> None:
        """One round of empty messages."""
        self._group.begin()
        self._group.barrier()

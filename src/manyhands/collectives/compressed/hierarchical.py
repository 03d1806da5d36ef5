"""Hierarchical: the ranks of one host add up their vectors in memory, and one of them takes part in the sum of hosts.

Two hosts with three ranks each; only what is sent between 0 and 3 is encoded:

    all-reduce    0 + 1 + 2           3 + 4 + 5          raw, in shared memory
    sum              0 <---- encoded ----> 3             any other sum, over the first rank of every host
    broadcast     0 → 1, 2            3 → 4, 5           raw, in shared memory

So a codec sees one vector per host: fewer bytes, and less is lost. On one host the sum is over one rank, and still
encoded: what a method computes does not depend on whether there are others. Inside a host one flag per parameter says
whether it was touched; the flags are max-reduced and broadcast like the vector.

Reference: X. Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision: Training ImageNet in
Four Minutes", 2018, https://arxiv.org/abs/1807.11205: an all-reduce within groups, and between their masters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from manyhands.collectives.choose import collective
from manyhands.collectives.compressed.exchange import ALL_TOUCHED, CompressedSum, Untouched
from manyhands.collectives.group import check_ranks
from manyhands.core.flat import Span
from manyhands.core.strategy import Saved
from manyhands.core.worker import Worker


class Hierarchical:
    """A sum in two levels.

    Args:
        w: this worker.
        make_outer: makes the sum between hosts for these ranks; only they call it.
        ranks: the ranks that sum; all workers if not given.
    """

    def __init__(
        self, w: Worker, make_outer: Callable[[Sequence[int]], CompressedSum], ranks: Sequence[int] | None = None
    ) -> None:
        hosts: dict[int, list[int]] = {}
        for rank in check_ranks(w.transport, w.workers if ranks is None else ranks):
            hosts.setdefault(w.transport.hosts[rank], []).append(rank)
        leaders = [ranks_of_host[0] for ranks_of_host in hosts.values()]
        here = hosts[w.transport.host]
        self._inner, self._leader = collective("auto", w.transport, here), here[0]
        self._outer = make_outer(leaders) if w.rank in leaders else None
        self._parameters = len(w.flat.slots)

    @torch.no_grad()
    def all_reduce(self, vector: Tensor, span: Span, untouched: Untouched | None = None) -> Untouched:
        """Within the host, between hosts, and back."""
        x = vector[span.start : span.stop]
        flags = None if untouched is None else self._flags(untouched)
        self._inner.all_reduce(x)
        if flags is not None:
            self._inner.all_reduce(flags, op="max")
        if self._outer is not None:
            of_all = self._outer.all_reduce(vector, span, None if flags is None else _zeros(flags))
            flags = None if flags is None else self._flags(of_all)
        self._inner.broadcast(x, self._leader)
        if flags is None:
            return ALL_TOUCHED
        self._inner.broadcast(flags, self._leader)
        return _zeros(flags)

    def _flags(self, untouched: Untouched) -> Tensor:
        """1 for each parameter of the model that was touched."""
        flags = torch.ones(self._parameters, dtype=torch.uint8)
        flags[list(untouched)] = 0
        return flags

    def state(self) -> Saved:
        """That of the sum between hosts; a rank that takes no part in it has none."""
        return {} if self._outer is None else self._outer.state()

    def restore(self, saved: Sequence[Saved]) -> None:
        """Give the states of the ranks that took part in the sum between hosts to those that do now."""
        if self._outer is not None:
            self._outer.restore([state for state in saved if state])


def _zeros(flags: Tensor) -> Untouched:
    """The parameters whose flag is 0."""
    return ALL_TOUCHED if bool(flags.all()) else frozenset(torch.nonzero(flags == 0).flatten().tolist())

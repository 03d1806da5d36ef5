"""Hierarchical: ranks of one host add up what they have in their memory, and one of them goes to the other hosts.

Two hosts with three ranks each; only what is between 0 and 3 is encoded and travels:

    add up        0 + 1 + 2           3 + 4 + 5          raw, in shared memory
    sum              0 <---- encoded ----> 3             any other sum, over the first rank of every host
    hand down     0 → 1, 2            3 → 4, 5           raw, in shared memory

So a codec sees one vector per host: fewer bytes, and less is lost. On one host the sum is over one rank, and still
encoded: what a method computes does not depend on whether there are others.

Handing down is an all-reduce in which the others bring zeros, so everyone, the first rank too, reads the same bits.

Reference: X. Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision: Training ImageNet in
Four Minutes", 2018, https://arxiv.org/abs/1807.11205: an all-reduce within groups, and between their masters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from manyhands.core.flat import Span
from manyhands.core.protocols import Saved
from manyhands.core.worker import Worker
from manyhands.topology.collectives import all_reducer
from manyhands.topology.collectives.group import check_ranks
from manyhands.topology.sums.exchange import Sum


class Hierarchical:
    """A sum in two levels.

    Args:
        w: this worker.
        make_outer: makes the sum between hosts for these ranks; only they call it.
        ranks: who sums; all workers if not given.
    """

    def __init__(
        self, w: Worker, make_outer: Callable[[Sequence[int]], Sum], ranks: Sequence[int] | None = None
    ) -> None:
        hosts: dict[int, list[int]] = {}
        for rank in check_ranks(w.transport, w.workers if ranks is None else ranks):
            hosts.setdefault(w.transport.hosts[rank], []).append(rank)
        leaders = [here[0] for here in hosts.values()]
        self._inner = all_reducer("auto", w.transport, hosts[w.transport.host])
        self._outer = make_outer(leaders) if w.rank in leaders else None

    @torch.no_grad()
    def add_up(self, vector: Tensor, span: Span) -> None:
        """Within the host, between hosts, and back."""
        x = vector[span.start : span.stop]
        self._inner.all_reduce(x)
        if self._outer is not None:
            self._outer.add_up(vector, span)
        else:
            x.zero_()
        self._inner.all_reduce(x)

    def state(self) -> Saved:
        """That of the sum between hosts; who takes no part in it remembers nothing."""
        return {} if self._outer is None else self._outer.state()

    def restore(self, saved: Sequence[Saved]) -> None:
        """To those who take part, from those who did."""
        if self._outer is not None:
            self._outer.restore([one for one in saved if one])

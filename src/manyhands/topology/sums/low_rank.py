"""Low rank (PowerSGD): of every large matrix two thin ones are summed, found by one step of the power method.

    M_k = G_k + E_k                            n x m, worker k's gradient and what is left of earlier ones
    A = orthonormal(sum_k M_k Q)               n x r         the same bits on all workers, like everything below
    B = sum_k M_k^T A                          m x r
    sum of all = A B^T                         E_k <- M_k - A B^T / P
    Q <- orthonormal(B)                        the next step begins where this one has ended

        G           A    B^T
      [ . . . . ]   [.]  [ . . . . ]           r (n + m) numbers are summed instead of n m
      [ . . . . ] ≈ [.]
      [ . . . . ]   [.]

    sum of all sums + sum over k of E_k = sum of all G_k, but for rounding; r >= min(n, m) is exact

A parameter is the matrix [its first dimension, all others] if it lies in the stretch as a whole and is large enough:
least_rate r (n + m) < n m. All others are summed as they are, in one all-reduce; all A are another one, and all B a
third. The first Q is drawn from the job's seed and the parameter's number.

Reference: T. Vogels, S. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", 2019, https://arxiv.org/abs/1905.13727 (their P and Q are A and B here: P is the number of workers).

Where we differ: Q is made orthonormal before it is used again, so that small gradients do not underflow. As there, what
a worker has left is what the mean does not show of it: it may grow on one worker, and cancels out over all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.flat import Place, Span
from manyhands.core.protocols import Saved
from manyhands.core.saving import add, named, section, under
from manyhands.core.worker import REFERENCE_FLOPS, Worker
from manyhands.topology.collectives import all_reducer
from manyhands.topology.collectives.group import check_ranks


class Matrix(NamedTuple):
    """A parameter that is summed as two thin matrices."""

    place: Place
    n: int
    m: int
    r: int

    def of(self, vector: Tensor) -> Tensor:
        """Its stretch of a vector like a whole part."""
        return vector[self.place.span.start : self.place.span.stop].view(self.n, self.m)


class LowRankSum:
    """A sum by low-rank matrices.

    Args:
        w: this worker.
        rank: r, how thin they are.
        least_rate: by how much they must be smaller than a parameter at least.
        collective: which algorithm sums them.
        ranks: who sums; all workers if not given.
    """

    def __init__(
        self,
        w: Worker,
        rank: int = 1,
        least_rate: float = 2.0,
        collective: str = "auto",
        ranks: Sequence[int] | None = None,
    ) -> None:
        refuse_unless(rank >= 1, "rank", rank, ">= 1")
        refuse_unless(least_rate > 0, "least_rate", least_rate, "> 0")
        self._w = w
        self._rank = rank
        self._least_rate = least_rate
        self._ranks = check_ranks(w.transport, w.workers if ranks is None else ranks)
        self._collective = all_reducer(collective, w.transport, self._ranks)
        self._left = [torch.zeros_like(part.weights) for part in w.flat.parts]
        """E, one vector per part of the model."""
        self._q: dict[str, Tensor] = {}
        """Q of every parameter that was summed so before."""
        self._plans: dict[Span, tuple[list[Matrix], list[slice]]] = {}

    @torch.no_grad()
    def add_up(self, vector: Tensor, span: Span) -> None:
        """What is no large matrix as it is, the others as two thin ones."""
        if span not in self._plans:
            self._plans[span] = self._plan(span)
        matrices, rest = self._plans[span]
        if rest:
            self._sum_plain([vector[stretch] for stretch in rest])
        if matrices:
            self._sum_thin(vector, matrices)

    def _plan(self, span: Span) -> tuple[list[Matrix], list[slice]]:
        """The matrices of a stretch, and what lies between them."""
        found = [self._matrix(place) for place in self._w.flat.places if _inside(place.span, span)]
        matrices = [one for one in found if one is not None]
        edges = [span.start, *(edge for one in matrices for edge in one.place.span[1:]), span.stop]
        between = [slice(*pair) for pair in list(pairwise(edges))[::2]]
        return matrices, [stretch for stretch in between if stretch.start < stretch.stop]

    def _matrix(self, place: Place) -> Matrix | None:
        if len(place.shape) < 2 or not place.span.numel:
            return None
        n, m = place.shape[0], place.span.numel // place.shape[0]
        r = min(self._rank, n, m)
        return Matrix(place, n, m, r) if (n + m) * r * self._least_rate < n * m else None

    def _sum_plain(self, rest: Sequence[Tensor]) -> None:
        row = torch.cat(list(rest))
        self._w.move(2 * row.nbytes)
        self._collective.all_reduce(row)
        for x, summed in zip(rest, torch.split(row, [x.numel() for x in rest]), strict=True):
            x.copy_(summed)

    def _sum_thin(self, vector: Tensor, matrices: Sequence[Matrix]) -> None:
        self._spend(vector, matrices)
        left = self._left[matrices[0].place.span.part]
        M = [one.of(left).add_(one.of(vector)) for one in matrices]
        A = [orthonormal(a) for a in self._summed([m @ self._start(one) for m, one in zip(M, matrices, strict=True)])]
        B = self._summed([m.T @ a for m, a in zip(M, A, strict=True)])
        for one, m, a, b in zip(matrices, M, A, B, strict=True):
            out = torch.mm(a, b.T, out=one.of(vector))
            m.sub_(out, alpha=1 / len(self._ranks))
            self._q[one.place.name] = orthonormal(b)

    def _summed(self, some: Sequence[Tensor]) -> list[Tensor]:
        """Small matrices summed over everyone, all of them at once."""
        row = torch.cat([x.reshape(-1) for x in some])
        self._collective.all_reduce(row)
        return [y.view_as(x) for x, y in zip(some, torch.split(row, [x.numel() for x in some]), strict=True)]

    def _start(self, one: Matrix) -> Tensor:
        """Q."""
        q = self._q.get(one.place.name)
        if q is None:
            generator = torch.Generator().manual_seed(hash((self._w.seed, one.place.mark)) % 2**63)
            q = orthonormal(torch.randn(one.m, one.r, generator=generator)).to(self._left[one.place.span.part])
        return q

    def _spend(self, vector: Tensor, matrices: Sequence[Matrix]) -> None:
        """Three products, and three passes over the gradient."""
        self._w.transport.spend(sum(6 * one.n * one.m * one.r for one in matrices) / REFERENCE_FLOPS)
        self._w.move(3 * sum(one.place.span.numel for one in matrices) * vector.element_size())

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> Saved:
        """E, which is this worker's own, and Q."""
        places = [place for place in self._w.flat.places if place.name in self._q]
        return under("memory", named(places, self._left)) | under("q", self._q)

    def restore(self, saved: Sequence[Saved]) -> None:
        """E of this worker and of those whose work it takes over; Q is everyone's."""
        matrices = {place.name: self._matrix(place) for place in self._w.flat.places}
        for name, q in section(saved[0], "q").items() if saved else ():
            one = matrices[name]
            fits = one is not None and q.shape == (one.m, one.r)
            refuse_unless(fits, f"the saved shape of Q of {name}", tuple(q.shape), f"that of rank {self._rank}")
            self._q[name] = q.clone()
        for one_state in saved[self._ranks.index(self._w.rank) :: len(self._ranks)]:
            add(self._w.flat.places, self._left, section(one_state, "memory"))


def orthonormal(x: Tensor) -> Tensor:
    """Columns of length 1 that stand on each other and span what those of x do; also if some of these are 0.

    They lie in memory row by row, as after a checkpoint: products with others round in another order.
    """
    Q: Tensor = torch.linalg.qr(x.to(torch.promote_types(x.dtype, torch.float32))).Q
    return Q.to(x.dtype).contiguous()


def _inside(inner: Span, outer: Span) -> bool:
    return inner.part == outer.part and outer.start <= inner.start and inner.stop <= outer.stop

"""Low rank (PowerSGD): instead of every large matrix two thin ones are summed, found by a step of the power method.

    M_k = G_k + E_k                            n x m, worker k's gradient and the remainder of earlier ones
    A = orthonormal(sum_k M_k Q)               n x r         the same bits on all workers, like everything below
    B = sum_k M_k^T A                          m x r
    sum of all = A B^T                         E_k <- M_k - A B^T / P
    Q <- orthonormal(B)                        where the next step begins

        G           A    B^T
      [ . . . . ]   [.]  [ . . . . ]           r (n + m) numbers are summed instead of n m
      [ . . . . ] ≈ [.]
      [ . . . . ]   [.]

    sum of all sums + sum over k of E_k = sum of all G_k, but for rounding; r >= min(n, m) is exact

A parameter is the matrix [its first dimension, all others] if it lies in the span as a whole and is large enough:
least_rate r (n + m) < n m. All others are summed as they are, in one all-reduce; all A are another one, and all B a
third. With the plain ones one number per parameter is summed that says whether a rank has touched it. The first Q is
drawn from the job's seed and the parameter's name.

Reference: T. Vogels, S. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", 2019, https://arxiv.org/abs/1905.13727 (their P and Q are A and B here: P is the number of workers).

Where we differ: Q is made orthonormal before it is used again, so that small gradients do not underflow. As there, the
remainder of a worker is what the mean does not contain of it: it may grow on one worker, and cancels out over all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.collectives.choose import collective
from manyhands.collectives.compressed.exchange import ALL_TOUCHED, Untouched, unsent
from manyhands.collectives.group import check_ranks
from manyhands.core.errors import refuse_unless
from manyhands.core.flat import ParamSlot, Span
from manyhands.core.state import add, named, refuse_lost, section, under
from manyhands.core.strategy import Saved
from manyhands.core.vector_ops import UNCHARGED
from manyhands.core.worker import Worker


class Matrix(NamedTuple):
    """A parameter that is summed as two thin matrices."""

    slot: ParamSlot
    n: int
    m: int
    r: int

    def of(self, vector: Tensor) -> Tensor:
        """The parameter's span of a vector like a whole group, as a matrix."""
        return vector[self.slot.span.start : self.slot.span.stop].view(self.n, self.m)


class LowRankSum:
    """A sum by low-rank matrices.

    Args:
        w: this worker.
        rank: r, the columns of A and B.
        least_rate: how many times smaller than the parameter they must be at least.
        algorithm: the collective that sums them.
        ranks: the ranks that sum; all workers if not given.
    """

    def __init__(
        self,
        w: Worker,
        rank: int = 1,
        least_rate: float = 2.0,
        algorithm: str = "auto",
        ranks: Sequence[int] | None = None,
    ) -> None:
        refuse_unless(rank >= 1, "rank", rank, ">= 1")
        refuse_unless(least_rate > 0, "least_rate", least_rate, "> 0")
        self._w = w
        self._rank = rank
        self._least_rate = least_rate
        self._ranks = check_ranks(w.transport, w.workers if ranks is None else ranks)
        self._collective = collective(algorithm, w.transport, self._ranks)
        self._left = [torch.zeros_like(group.weights) for group in w.flat.groups]
        """E, one vector per group of the model."""
        self._q: dict[str, Tensor] = {}
        """Q of every parameter that was summed as thin matrices before."""
        self._plans: dict[Span, tuple[list[Matrix], list[slice]]] = {}

    @torch.no_grad()
    def all_reduce(self, vector: Tensor, span: Span, untouched: Untouched | None = None) -> Untouched:
        """Large matrices as two thin ones, the rest and the touch counts as they are."""
        if span not in self._plans:
            self._plans[span] = self._plan(span)
        matrices, rest = self._plans[span]
        ids = [] if untouched is None else [s.param_id for s in self._w.flat.slots if s.span.group == span.group]
        counts = torch.tensor([param_id not in (untouched or ()) for param_id in ids]).to(vector)
        if rest or ids:
            self._sum_plain([*(vector[part] for part in rest), counts])
        if matrices:
            self._sum_thin(vector, matrices)
        if not UNCHARGED.computes(counts) or bool(counts.all()):
            return ALL_TOUCHED
        return frozenset(param_id for param_id, count in zip(ids, counts.tolist(), strict=True) if not count)

    def _plan(self, span: Span) -> tuple[list[Matrix], list[slice]]:
        """The matrices of a span, and what lies between them."""
        found = [self._matrix(slot) for slot in self._w.flat.slots if _inside(slot.span, span)]
        matrices = [one for one in found if one is not None]
        edges = [span.start, *(edge for one in matrices for edge in one.slot.span[1:]), span.stop]
        between = [slice(*pair) for pair in list(pairwise(edges))[::2]]
        return matrices, [part for part in between if part.start < part.stop]

    def _matrix(self, slot: ParamSlot) -> Matrix | None:
        if len(slot.shape) < 2 or not slot.span.numel:
            return None
        n, m = slot.shape[0], slot.span.numel // slot.shape[0]
        r = min(self._rank, n, m)
        return Matrix(slot, n, m, r) if (n + m) * r * self._least_rate < n * m else None

    def _sum_plain(self, rest: Sequence[Tensor]) -> None:
        row = self._w.ops.joined(rest)
        self._collective.all_reduce(row)
        for x, summed in zip(rest, torch.split(row, [x.numel() for x in rest]), strict=True):
            self._w.ops.copy(summed, x)

    def _sum_thin(self, vector: Tensor, matrices: Sequence[Matrix]) -> None:
        ops, left = self._w.ops, self._left[matrices[0].slot.span.group]
        M = [ops.add(one.of(left), one.of(vector)) for one in matrices]
        A = self._summed([ops.product(m, self._start(one)) for m, one in zip(M, matrices, strict=True)])
        A = [orthonormal(a) for a in A]
        B = self._summed([ops.product(m.T, a) for m, a in zip(M, A, strict=True)])
        for one, m, a, b in zip(matrices, M, A, B, strict=True):
            out = ops.product(a, b.T, out=one.of(vector))
            ops.add(m, out, scale=-1 / len(self._ranks))
            self._q[one.slot.name] = orthonormal(b)

    def _summed(self, some: Sequence[Tensor]) -> list[Tensor]:
        """Small matrices summed over all ranks, in one all-reduce."""
        row = torch.cat([x.reshape(-1) for x in some])
        self._collective.all_reduce(row)
        return [y.view_as(x) for x, y in zip(some, torch.split(row, [x.numel() for x in some]), strict=True)]

    def _start(self, one: Matrix) -> Tensor:
        """Q of the last step, or a random one."""
        q = self._q.get(one.slot.name)
        if q is None:
            seed = random.Random(f"{self._w.seed}/{one.slot.name}").getrandbits(63)
            generator = torch.Generator().manual_seed(seed)
            q = orthonormal(torch.randn(one.m, one.r, generator=generator)).to(self._left[one.slot.span.group])
        return q

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> Saved:
        """E, which is this worker's own, and Q, which is the same on all."""
        slots = [slot for slot in self._w.flat.slots if slot.name in self._q]
        return under("memory", named(slots, self._left)) | under("q", self._q)

    def restore(self, saved: Sequence[Saved]) -> None:
        """E of this worker and of those that it replaces; Q of any of them."""
        matrices = {slot.name: self._matrix(slot) for slot in self._w.flat.slots}
        for name, q in section(saved[0], "q").items() if saved else ():
            one = matrices[name]
            fits = one is not None and q.shape == (one.m, one.r)
            refuse_unless(fits, f"the saved shape of Q of {name}", tuple(q.shape), f"that of rank {self._rank}")
            self._q[name] = q.clone()
        for left in unsent(saved[self._ranks.index(self._w.rank) :: len(self._ranks)]):
            refuse_lost({f"memory/{name}": x for name, x in left.items() if matrices.get(name) is None})
            add(self._w.flat.slots, self._left, left)


def orthonormal(x: Tensor) -> Tensor:
    """Orthonormal columns whose span contains that of the columns of x, also if some of these are 0.

    They are stored row by row, as after a checkpoint, because products with another layout round differently.
    """
    Q: Tensor = torch.linalg.qr(x.to(torch.promote_types(x.dtype, torch.float32))).Q
    return Q.to(x.dtype).contiguous()


def _inside(inner: Span, outer: Span) -> bool:
    return inner.group == outer.group and outer.start <= inner.start and inner.stop <= outer.stop

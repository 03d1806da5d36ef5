"""SparCML: sparse vectors are summed while they are sparse, and become dense when that is smaller.

Three ways, by how many numbers k each rank has and how many, K, the sum will have (N in all, P ranks):

    double   SSAR_Recursive_double    round i: swap streams with place xor 2^i, merge; dense in flight when nnz > δ
    split    SSAR_Split_allgather     send your numbers of part j to its owner j; owners merge and tell their streams
    dense    DSAR_Split_allgather     the same, but owners tell dense parts, encoded by another codec if one is given

    rounds and bytes sent per rank, b per pair of index and value, v per value:

    double   lg P             k b lg P  to  (P - 1) k b       few numbers: the fewest rounds
    split    2 messages to    up to k b  +  (P - 1) K/P b     many numbers, and still sparse
    dense    everyone         up to k b  +  (P - 1) N/P v     the sum is dense anyway

    auto     dense if K > δ = N v / (c + v) is to be expected, K = N (1 - (1 - k/N)^P); double if K pairs are few (64
             KiB), else split: so all ranks choose the same without asking

N = 8, four ranks with two numbers each, by `double`:

    rank 0   0:1 5:2        0:2 5:2 6:3
    rank 1   0:1 6:3        0:2 5:2 6:3             0:0 1:-1 5:3 6:3 7:4      (0 has cancelled out and stays)
    rank 2   1:-1 5:1       0:-2 1:-1 5:1 7:4
    rank 3   0:-2 7:4       0:-2 1:-1 5:1 7:4

Reference: C. Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning", 2019,
https://arxiv.org/abs/1802.08021.

Where we differ: owners tell everyone directly, in P - 1 messages instead of lg P rounds. Numbers of ranks that are no
power of two are folded (see `collectives/fold`). What owners encode may be remembered by its codec; when the number of
workers changes that is handed to the first codec, if that remembers anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.flat import Span
from manyhands.core.protocols import Codec, Saved, Warms
from manyhands.core.saving import section, under
from manyhands.core.sending import Sender, over
from manyhands.core.worker import Worker
from manyhands.topology.collectives.choose import SMALL
from manyhands.topology.collectives.fold import Fold
from manyhands.topology.collectives.group import Group
from manyhands.topology.sums.exchange import Exchange
from manyhands.topology.sums.streams import (
    INDEX_BYTES,
    Stream,
    check_pairs,
    expected_union,
    most_sparse,
    received,
    stream_of,
    total,
)
from manyhands.topology.sums.stripes import AllGather, cut, hand_over

Algorithm = Literal["auto", "double", "split", "dense"]


class Sparcml:
    """A sum of sparse vectors.

    Args:
        w: this worker.
        codec: what makes vectors sparse.
        ranks: who sums; all workers if not given.
        algorithm: double, split or dense; auto: by what is to be expected.
        values: how dense parts are told; as they are, if not given.
    """

    def __init__(
        self,
        w: Worker,
        codec: Codec,
        ranks: Sequence[int] | None = None,
        *,
        algorithm: Algorithm = "auto",
        values: Codec | None = None,
    ) -> None:
        check_pairs(codec)
        known = get_args(Algorithm)
        refuse_unless(algorithm in known, "algorithm", algorithm, f"one of {', '.join(known)}")
        dense = algorithm in ("auto", "dense")
        refuse_unless(dense or values is None, "algorithm", algorithm, "auto or dense if values are to be encoded")
        self._w = w
        self._algorithm = algorithm
        self._exchange = Exchange(w, ranks, "sparcml")
        self._fold = Fold(Group(w.transport, self._exchange.ranks, "sparcml"))
        self._sender = Sender(w, codec)
        self._told = None if values is None else AllGather(w, values, ranks, "sparcml-values")

    @torch.no_grad()
    def add_up(self, vector: Tensor, span: Span) -> None:
        """Make a stream of it, sum the streams, write the sum."""
        if not span.numel:
            return
        x, algorithm = vector[span.start : span.stop], self.choose(vector, span)
        mine = self._encode(vector, span)
        if algorithm == "double":
            self._write(self._double(mine), x)
            return
        part = self._split(mine, span)
        if algorithm == "split" or self._told is None:
            self._tell(part if algorithm == "split" else part.dense(), x, span)
        else:
            own = self._parts(span)[self._exchange.place]
            self._write(part, vector[own.start : own.stop])
            self._told.all_gather(vector, self._parts(span))

    def choose(self, vector: Tensor, span: Span) -> str:
        """Which algorithm this stretch is for; it depends on sizes only."""
        if self._algorithm != "auto":
            return self._algorithm
        like = torch.empty_like(vector[span.start : span.stop], device="meta")
        codec = self._sender.codec
        now = codec.at(self._w.step) if isinstance(codec, Warms) else codec
        N, pair = span.numel, INDEX_BYTES + like.element_size()
        k = min(N, over(now, span, self._w.flat.places).nbytes(like) / pair)
        K, δ = expected_union(N, k, self._exchange.size), most_sparse(N, like.element_size())
        if δ < K:
            return "dense"
        return "double" if K * pair <= SMALL else "split"

    def _encode(self, vector: Tensor, span: Span) -> Stream:
        (scale,) = self._exchange.agree(self._sender, vector, [span])
        payload = self._sender.encode(vector, span, scale)
        codec = over(self._sender.codec, span, self._w.flat.places)
        return stream_of(codec, payload, vector[span.start : span.stop])

    # -- recursive doubling -----------------------------------------------------------------------

    def _double(self, mine: Stream) -> Stream:
        fold, exchange = self._fold, self._exchange
        exchange.begin()
        if fold.companion is not None and exchange.place % 2 == 0:
            exchange.send(fold.companion, mine.tensors)
            return received(exchange.receive(fold.companion).keep(), mine.numel, mine.values.dtype)
        if fold.companion is not None:
            mine = self._merge([fold.companion], mine).packed()
        bit = 1
        while bit < fold.power:
            partner = fold.outer(fold.inner ^ bit)
            exchange.send(partner, mine.tensors)
            mine = self._merge([partner], mine).packed()
            bit *= 2
        if fold.companion is not None:
            exchange.send(fold.companion, mine.tensors)
        return mine

    def _merge(self, others: Sequence[int], mine: Stream) -> Stream:
        """The sum of what these places send and of the own stream, in the order of places."""
        place, N, dtype = self._exchange.place, mine.numel, mine.values.dtype
        messages = {other: self._exchange.receive(other) for other in others}
        streams = {other: received(message.tensors, N, dtype) for other, message in messages.items()} | {place: mine}
        self._w.move(sum(stream.nbytes for stream in streams.values()))
        merged = total([streams[one] for one in sorted(streams)])
        for message in messages.values():
            message.release()
        return merged

    # -- owners of parts --------------------------------------------------------------------------

    def _parts(self, span: Span) -> list[Span]:
        return cut(span, self._exchange.size, grain=1)

    def _split(self, mine: Stream, span: Span) -> Stream:
        """The sum of the part that this rank owns."""
        pieces = [mine.cut(part.start - span.start, part.stop - span.start) for part in self._parts(span)]
        self._exchange.begin()
        for place in self._exchange.others:
            self._exchange.send(place, pieces[place].tensors)
        return self._merge(self._exchange.others, pieces[self._exchange.place])

    def _tell(self, part: Stream, x: Tensor, span: Span) -> None:
        """Tell the own part, write everyone's."""
        parts = self._parts(span)
        self._exchange.begin()
        for place in self._exchange.others:
            self._exchange.send(place, part.tensors)
        for place, tensors in self._exchange.in_order(part.tensors):
            out = x[parts[place].start - span.start : parts[place].stop - span.start]
            self._write(received(tensors, out.numel(), out.dtype), out)

    def _write(self, stream: Stream, out: Tensor) -> None:
        self._w.move(out.nbytes)
        stream.write(out)

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> Saved:
        """What was not sent yet, as a worker and as an owner."""
        owner = {} if self._told is None else self._told.sender.state()
        return under("memory", self._sender.state()) | under("owner", owner)

    def restore(self, saved: Sequence[Saved]) -> None:
        """Send what was not sent yet."""
        if self._told is not None:
            hand_over(self._exchange, saved, self._sender, self._told.sender)
            return
        for one in self._exchange.inherited(saved):
            self._sender.inherit(section(one, "memory"))

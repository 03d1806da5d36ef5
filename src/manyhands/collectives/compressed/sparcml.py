"""SparCML: sparse vectors are summed while they are sparse, and become dense when that is smaller.

Three algorithms, by how many numbers k each rank has and how many, K, the sum will have (N in all, P ranks):

    double   SSAR_Recursive_double    round i: swap streams with index xor 2^i, merge; dense in flight when nnz > δ
    split    SSAR_Split_allgather     send the numbers of part j to its owner j; owners merge and send their streams
    dense    DSAR_Split_allgather     the same, but owners send dense parts, encoded by another codec if one is given

    rounds and bytes sent per rank, b per pair of index and value, v per value:

    double   lg P             k b lg P  to  (P - 1) k b       few numbers: the fewest rounds
    split    2 messages to    up to k b  +  (P - 1) K/P b     many numbers, and still sparse
    dense    all others       up to k b  +  (P - 1) N/P v     the sum is dense anyway

    auto     dense if K > δ = N v / (c + v) is expected, K = N (1 - (1 - k/N)^P); double if K pairs are few (64 KiB),
             else split: so all ranks choose the same without a message

N = 8, four ranks with two numbers each, by `double`:

    rank 0   0:1 5:2        0:2 5:2 6:3
    rank 1   0:1 6:3        0:2 5:2 6:3             0:0 1:-1 5:3 6:3 7:4      (0 has cancelled out and stays)
    rank 2   1:-1 5:1       0:-2 1:-1 5:1 7:4
    rank 3   0:-2 7:4       0:-2 1:-1 5:1 7:4

Reference: C. Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning", 2019,
https://arxiv.org/abs/1802.08021.

Where we differ: owners send to all others directly, in P - 1 messages instead of lg P rounds. Numbers of ranks that are
no power of two are folded (see `collectives/fold`). The codec of dense parts may have a memory; when the number of
workers changes its content is given to the first codec, if that has a memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from manyhands.collectives.choose import SMALL
from manyhands.collectives.compressed.exchange import ALL_TOUCHED, PayloadExchange, Untouched, unsent
from manyhands.collectives.compressed.streams import (
    INDEX_BYTES,
    Stream,
    check_pairs,
    expected_union,
    most_sparse,
    received,
    stream_of,
    total,
)
from manyhands.collectives.compressed.stripes import EncodedAllGather, cut, inherit
from manyhands.collectives.fold import Fold
from manyhands.collectives.group import RankGroup
from manyhands.core.codec import Codec, Warms
from manyhands.core.encoder import Encoder, codec_for_span
from manyhands.core.errors import refuse_unless
from manyhands.core.flat import Span
from manyhands.core.state import under
from manyhands.core.strategy import Saved
from manyhands.core.worker import Worker

Algorithm = Literal["auto", "double", "split", "dense"]


class Sparcml:
    """A sum of sparse vectors.

    Args:
        w: this worker.
        codec: what makes vectors sparse.
        ranks: the ranks that sum; all workers if not given.
        algorithm: double, split or dense; auto: by the expected number of non-zeros.
        values: how dense parts are encoded; sent as they are, if not given.
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
        self._exchange = PayloadExchange(w, ranks, "sparcml")
        self._fold = Fold(RankGroup(w.transport, self._exchange.ranks, "sparcml"))
        self._encoder = Encoder(w, codec)
        self._dense_parts = None if values is None else EncodedAllGather(w, values, ranks, "sparcml-values")

    @torch.no_grad()
    def all_reduce(self, vector: Tensor, span: Span, untouched: Untouched | None = None) -> Untouched:
        """Make a stream of the span, sum the streams, write the sum."""
        if not span.numel:
            return untouched or ALL_TOUCHED
        self._exchange.untouched = untouched or ALL_TOUCHED
        x, algorithm = vector[span.start : span.stop], self.choose(vector, span)
        mine = self._encode(vector, span)
        if algorithm == "double":
            self._double(mine).write(x, self._w.ops)
        else:
            part = self._split(mine, span)
            if algorithm == "split" or self._dense_parts is None:
                self._gather(part if algorithm == "split" else part.dense(), x, span)
            else:
                own = self._parts(span)[self._exchange.index_in_group]
                part.write(vector[own.start : own.stop], self._w.ops)
                self._dense_parts.all_gather(vector, self._parts(span))
        return self._exchange.untouched

    def choose(self, vector: Tensor, span: Span) -> str:
        """The algorithm for this span; it depends on sizes only."""
        if self._algorithm != "auto":
            return self._algorithm
        like = torch.empty_like(vector[span.start : span.stop], device="meta")
        codec = self._encoder.codec
        now = codec.at(self._w.step) if isinstance(codec, Warms) else codec
        N, pair = span.numel, INDEX_BYTES + like.element_size()
        k = min(N, codec_for_span(now, span, self._w.flat.slots).nbytes(like) / pair)
        K, δ = expected_union(N, k, self._exchange.size), most_sparse(N, like.element_size())
        if δ < K:
            return "dense"
        return "double" if K * pair <= SMALL else "split"

    def _encode(self, vector: Tensor, span: Span) -> Stream:
        (scale,) = self._exchange.common_scales(self._encoder, vector, [span])
        payload = self._encoder.encode(vector, span, scale)
        codec = codec_for_span(self._encoder.codec, span, self._w.flat.slots)
        return stream_of(codec, payload, vector[span.start : span.stop])

    # -- recursive doubling -----------------------------------------------------------------------

    def _double(self, mine: Stream) -> Stream:
        fold, exchange = self._fold, self._exchange
        exchange.begin()
        if fold.companion is not None and not fold.takes_part:
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
        """The sum of the own stream and of those that these indices send, in the order of indices."""
        index, N, dtype = self._exchange.index_in_group, mine.numel, mine.values.dtype
        messages = {other: self._exchange.receive(other) for other in others}
        streams = {other: received(message.tensors, N, dtype) for other, message in messages.items()} | {index: mine}
        merged = total([streams[one] for one in sorted(streams)], self._w.ops)
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
        for index in self._exchange.others:
            self._exchange.send(index, pieces[index].tensors)
        return self._merge(self._exchange.others, pieces[self._exchange.index_in_group])

    def _gather(self, part: Stream, x: Tensor, span: Span) -> None:
        """Send the own part to all others, write all parts."""
        parts = self._parts(span)
        self._exchange.begin()
        for index in self._exchange.others:
            self._exchange.send(index, part.tensors)
        for index, tensors in self._exchange.in_order(part.tensors):
            out = x[parts[index].start - span.start : parts[index].stop - span.start]
            received(tensors, out.numel(), out.dtype).write(out, self._w.ops)

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> Saved:
        """What was not sent yet, as a worker and as an owner."""
        owner = {} if self._dense_parts is None else self._dense_parts.encoder.state()
        return under("memory", self._encoder.state()) | under("owner", owner)

    def restore(self, saved: Sequence[Saved]) -> None:
        """Take over what was not sent yet."""
        if self._dense_parts is not None:
            inherit(self._exchange, saved, self._encoder, self._dense_parts.encoder)
            return
        self._encoder.inherit(unsent(self._exchange.inherited(saved)))

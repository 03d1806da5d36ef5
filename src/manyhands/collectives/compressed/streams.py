"""Streams: the numbers of a span, some of them with their indices, or all of them.

    sparse   indices  [ 0  5  6 ]     int32, ascending, c = 4 bytes each        dense   values [ 2 0 0 0 0 2 3 0 ]
             values   [ 2  2  3 ]     v bytes each

    dense is smaller if nnz > δ = N v / (c + v)                    N/2 for float32, 2N/3 for float64, N/3 for float16
    of P streams with k of N numbers each, at random indices, the union has about N (1 - (1 - k/N)^P)

Values that cancel out are still stored. Values of one index are added in the order of the streams, beginning with 0:
the sum of two streams has the same bits in either order, so partners agree.

With sizes only a stream has the expected number of elements.

Reference: C. Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning", 2019,
https://arxiv.org/abs/1802.08021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor

from manyhands.core.codec import Codec, Payload, Sparse, Wraps
from manyhands.core.encoder import PerParameterCodec
from manyhands.core.errors import BadPayload, refuse_unless
from manyhands.core.vector_ops import UNCHARGED, VectorOps

INDEX_BYTES = 4


@dataclass(frozen=True)
class Stream:
    """The numbers of a span.

    Args:
        numel: N.
        values: those that are stored.
        indices: their indices in the span; None if all are stored.
    """

    numel: int
    values: Tensor
    indices: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is sent."""
        return (self.values,) if self.indices is None else (self.indices, self.values)

    @property
    def nbytes(self) -> int:
        """Bytes of what is sent."""
        return sum(x.nbytes for x in self.tensors)

    def packed(self) -> Stream:
        """The same numbers, dense if that is smaller."""
        return self.dense() if self.values.numel() > most_sparse(self.numel, self.values.element_size()) else self

    def dense(self) -> Stream:
        """The same numbers, all of them stored."""
        if self.indices is None:
            return self
        return Stream(self.numel, self.write(self.values.new_empty(self.numel)))

    def cut(self, low: int, high: int) -> Stream:
        """The stream of a part of the span."""
        if self.indices is None:
            return Stream(high - low, self.values[low:high])
        if self.values.is_meta:
            return _of_size(high - low, self.values.numel() * (high - low) / self.numel, self.values)
        ends = torch.tensor([low, high], dtype=torch.int32)
        first, last = torch.searchsorted(self.indices, ends).tolist()
        return Stream(high - low, self.values[first:last], self.indices[first:last] - low)

    def write(self, out: Tensor, ops: VectorOps = UNCHARGED) -> Tensor:
        """Fill a vector, which is returned, with the numbers, and 0 where none is stored."""
        if self.indices is None:
            return ops.copy(self.values, out)
        if ops.computes(out):
            out.zero_().index_copy_(0, self.indices.long(), self.values)
        return out


def total(streams: Sequence[Stream], ops: VectorOps = UNCHARGED) -> Stream:
    """The sum of streams of one span, in new memory: dense if one of them is, else with the union of their indices."""
    N, like = streams[0].numel, streams[0].values
    stored = [one.indices for one in streams if one.indices is not None]
    computes = ops.computes(*(x for one in streams for x in one.tensors))
    if len(stored) < len(streams):
        out = like.new_zeros(N)
        for one in streams if computes else ():
            _add(one, out)
        return Stream(N, out)
    if not computes:
        return _of_size(N, N * (1 - prod(1 - i.numel() / max(1, N) for i in stored)), like)
    indices = torch.unique_consecutive(torch.cat(stored).sort().values)
    values = like.new_zeros(indices.numel())
    for one, i in zip(streams, stored, strict=True):
        values.index_add_(0, torch.searchsorted(indices, i), one.values)
    return Stream(N, values, indices)


def _add(stream: Stream, out: Tensor) -> None:
    if stream.indices is None:
        out.add_(stream.values)
    else:
        out.index_add_(0, stream.indices.long(), stream.values)


def _of_size(N: int, nnz: float, like: Tensor) -> Stream:
    count = min(N, ceil(nnz - 1e-9 * N))  # a whole number stays one in spite of rounding
    return Stream(N, like.new_empty(count), like.new_empty(count, dtype=torch.int32))


def most_sparse(N: int, v: int) -> float:
    """δ: how many numbers of v bytes may be stored before all N are smaller."""
    return N * v / (INDEX_BYTES + v)


def expected_union(N: int, k: float, P: int) -> float:
    """How many of N indices are used if each of P ranks uses k at random."""
    return N * (1 - (1 - k / N) ** P)


# -- making and receiving streams ---------------------------------------------------------------------------


def received(tensors: Payload, N: int, dtype: torch.dtype) -> Stream:
    """A received payload as a stream of N numbers; refused if it cannot be one."""
    if tensors and tensors[0].is_meta:
        return Stream(N, tensors[-1], tensors[0] if len(tensors) == 2 else None)
    kinds = [x.dtype for x in tensors]
    if kinds == [dtype] and tensors[0].numel() == N:
        return Stream(N, tensors[0])
    if kinds != [torch.int32, dtype] or tensors[0].numel() != tensors[1].numel() or not _ascend(tensors[0], N):
        raise BadPayload(f"{len(tensors)} tensors were received that are no stream of {N} numbers of {dtype}")
    return Stream(N, tensors[1], tensors[0])


def _ascend(indices: Tensor, N: int) -> bool:
    if not indices.numel():
        return True
    return int(indices[0]) >= 0 and int(indices[-1]) < N and bool((indices[1:] > indices[:-1]).all())


def stream_of(codec: Codec, payload: Payload, like: Tensor) -> Stream:
    """The payload of a codec for a span as a stream, in new memory."""
    sparse = _within(codec)
    if like.is_meta:
        return _of_size(like.numel(), payload[0].nbytes / (INDEX_BYTES + like.element_size()), like).packed()
    if sparse is not None and not isinstance(codec, PerParameterCodec):
        indices, values = sparse.pairs(payload)
        return Stream(like.numel(), values, indices).packed()
    out = torch.empty_like(like)
    codec.decode(payload, out)
    indices = out.nonzero().view(-1)
    return Stream(like.numel(), out[indices], indices.int()).packed()


def check_pairs(codec: Codec) -> None:
    """Refuse a codec that sends all numbers, because nothing would be sparse."""
    refuse_unless(_within(codec) is not None, "codec", codec, "one that gives pairs, such as TopK or one around it")


def _within(codec: object) -> Sparse | None:
    """The innermost codec if it gives pairs: wrappers have memory, warm up or cut, and do not change its payload."""
    while isinstance(codec, Wraps):
        codec = codec.codec
    return codec if isinstance(codec, Sparse) else None

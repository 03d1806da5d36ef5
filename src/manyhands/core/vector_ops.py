"""VectorOps: operations on vectors of the size of a model. Simulated time is charged here, and sizes are handled here.

    computes(out)   charge the time of writing `out`; are there numbers to write?

An operation is charged by the bytes that it writes, at the rate at which a reference core copies: a copy, a sum, a
difference, an encoding and a decoding are one pass over their result. In a task of sizes only vectors are meta tensors:
the time passes, nothing is computed. So a method calls these operations and is the same in all three cases:

    real processes       VectorOps        computes, takes the time that it takes
    simulated time       SimulatedOps     charges, then computes
    sizes only           SimulatedOps     charges

An operation takes effect at the end of its time. What torch computes beside these operations is free in simulated time:
that is meant for single numbers, and for what happens once per run (setup, checkpoints, answers).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from manyhands.core.codec import Codec, Payload
from manyhands.core.kernels import compiled
from manyhands.core.port import REFERENCE_FLOPS, Message, Transport

LITTLE = 256 * 1024
"""Fewer bytes than this are likely to be in the cache when they are read again."""

ONE = {dtype: torch.ones((), dtype=dtype, device="cpu") for dtype in (torch.float32, torch.float64)}
"""A factor of 1 for `addcmul_`, which needs two factors."""


class VectorOps:
    """Vector operations that take no simulated time."""

    def computes(self, *outs: Tensor, passes: int = 1) -> bool:
        """Charge the time of some passes over these tensors; whether they have numbers, and not sizes only."""
        return not (outs and outs[0].is_meta)

    def charge_flops(self, flops: float) -> None:
        """Charge the time of that many floating-point operations."""

    def copy(self, x: Tensor, out: Tensor) -> Tensor:
        """out <- x"""
        return out.copy_(x) if self.computes(out) else out

    def clone(self, x: Tensor) -> Tensor:
        """A copy in new memory; of sizes only, `x` itself."""
        return x.clone() if self.computes(x) else x

    def keep(self, message: Message) -> tuple[Tensor, ...]:
        """Copies of a message's tensors, which is released."""
        if message.tensors:
            self.computes(*message.tensors)
        return message.keep()

    def joined(self, xs: Sequence[Tensor]) -> Tensor:
        """The vectors one after the other, in new memory."""
        row = torch.cat(list(xs))
        self.computes(row)
        return row

    def zero(self, out: Tensor) -> Tensor:
        """out <- 0"""
        return out.zero_() if self.computes(out) else out

    def zeros_like(self, x: Tensor) -> Tensor:
        """0, in new memory."""
        self.computes(x)
        return torch.zeros_like(x)

    def add(self, out: Tensor, x: Tensor | float, scale: float = 1) -> Tensor:
        """out <- out + scale x"""
        return out.add_(x, alpha=scale) if self.computes(out) else out

    def scale(self, out: Tensor, factor: float | Tensor) -> Tensor:
        """out <- factor out"""
        return out.mul_(factor) if self.computes(out) else out

    def divide(self, out: Tensor, divisor: float | Tensor) -> Tensor:
        """out <- out / divisor"""
        return out.div_(divisor) if self.computes(out) else out

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        """factor x, in new memory."""
        return x * factor if self.computes(x) else x

    def difference(self, x: Tensor, y: Tensor, scale: float = 1) -> Tensor:
        """scale (x - y), in new memory."""
        if not self.computes(y):
            return y
        return x - y if scale == 1 else (x - y).mul_(scale)

    def product(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """The matrix product of a and b; charged by its floating-point operations."""
        self.charge_flops(2 * a.shape[0] * a.shape[1] * b.shape[1])
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)

    # -- codecs -----------------------------------------------------------------------------------

    def encoded(self, codec: Codec, x: Tensor) -> tuple[Tensor, ...]:
        """The payload of a vector without a memory; one that holds the vector itself costs nothing."""
        if codec.traits.plain or self.computes(x):
            return codec.encode(x, None)
        return (sized(codec.nbytes(x)),)

    def decoded(self, codec: Codec, payload: Payload, like: Tensor) -> Tensor:
        """The decoded vector, read-only: it may be a view of the payload."""
        if codec.traits.plain:
            return payload[0]
        return self.decode(codec, payload, torch.empty_like(like))

    def decode(self, codec: Codec, payload: Payload, out: Tensor) -> Tensor:
        """out <- the decoded vector"""
        if self.computes(out):
            codec.decode(payload, out)
        return out

    def add_decoded(self, codec: Codec, payload: Payload, out: Tensor, spare: Tensor) -> Tensor:
        """out <- out + the decoded vector, in one pass by way of `spare`, which is as large."""
        if self.computes(out):
            codec.decode(payload, spare)
            out.add_(spare)
        return out


class SimulatedOps(VectorOps):
    """Vector operations that are charged to one rank."""

    def __init__(self, transport: Transport) -> None:
        self._charge = transport.charge_copy
        self._charge_compute = transport.charge_compute

    def computes(self, *outs: Tensor, passes: int = 1) -> bool:
        self._charge(passes * sum([out.nbytes for out in outs]))
        return not (outs and outs[0].is_meta)

    def charge_flops(self, flops: float) -> None:
        self._charge_compute(flops / REFERENCE_FLOPS)


UNCHARGED = VectorOps()
"""For what takes no simulated time by itself, such as a sum that is part of the time of a message."""


def vector_ops(transport: Transport) -> VectorOps:
    """The operations of one rank."""
    return SimulatedOps(transport) if transport.is_simulated else UNCHARGED


@cache
def sized(nbytes: int) -> Tensor:
    """A payload of that many bytes without content."""
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


# -- one pass over memory ------------------------------------------------------------------------------


def stream(x: Tensor, into: Tensor) -> None:
    """Copy past the caches a tensor that is not read again soon; a small or unsuitable one is copied normally."""
    copy = compiled("manyhands_stream", None, c_void_p, c_void_p, c_int64)
    if copy is None or not _streams(x, into):
        into.copy_(x)
    else:
        copy(into.data_ptr(), x.data_ptr(), x.nbytes)


def step(w: Tensor, g: Tensor, scale: float, into: Tensor | None = None) -> None:
    """w <- w + scale g, in one pass over memory, and the same `into` other memory, bit-identical on every path.

    The product is rounded before it is added, unlike in `add_` with alpha, which fuses the two.
    """
    kernel = None
    if into is not None and w.dtype == torch.float32 and _streams(w, into) and _streams(w, g):
        kernel = compiled("manyhands_step_into", None, c_void_p, c_void_p, c_void_p, c_float, c_int64)
    if kernel is not None and into is not None:
        kernel(w.data_ptr(), g.data_ptr(), into.data_ptr(), scale, w.numel())
        return
    w.addcmul_(g, ONE[w.dtype], value=scale)
    if into is not None:
        stream(w, into)


def mean(gs: Sequence[Tensor], into: Tensor) -> None:
    """The mean of several vectors, summed in their order, in one pass over memory; bit-identical on every path."""
    kernel = None
    if into.dtype == torch.float32 and all(_streams(g, into) for g in gs):
        kernel = compiled("manyhands_mean", None, c_void_p, c_void_p, c_int64, c_int64)
    if kernel is not None:
        addresses = (c_void_p * len(gs))(*(g.data_ptr() for g in gs))
        kernel(into.data_ptr(), addresses, len(gs), into.numel())
        return
    into.copy_(gs[0])
    for g in gs[1:]:
        into.add_(g)
    into.div_(len(gs))


def _streams(x: Tensor, into: Tensor) -> bool:
    """Whether x is large, and both tensors are alike, contiguous and on the CPU."""
    alike = x.dtype == into.dtype and x.numel() == into.numel()
    return x.nbytes >= LITTLE and alike and x.is_cpu and into.is_cpu and x.is_contiguous() and into.is_contiguous()

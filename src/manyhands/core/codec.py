"""Codec: what do workers send? The contract of encoders and decoders, their traits and their optional methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

Payload = Sequence[Tensor]
"""The tensors that are sent instead of a vector."""


@dataclass(frozen=True)
class CodecTraits:
    """Facts about a codec, with the knobs it was given. The contract suite tests each of them."""

    random: bool = False
    """Whether the payload depends on torch's default generator."""
    unbiased: bool = False
    """Whether E[decode(encode(x))] = x for a codec without a memory."""
    momentum: bool = False
    """Whether its memory also accumulates momentum. Otherwise decoded vectors plus the memory's first row add up to
    the inputs: nothing is lost."""
    plain: bool = False
    """Whether the payload is the vector itself, in its own memory, so that a reader needs no copy."""
    varies: bool = False
    """Whether the size of a payload depends on the numbers: `nbytes` is then an estimate, and `most` a bound."""


class Codec(Protocol):
    """What do workers send? A codec has knobs only; its memory is a tensor in parameter coordinates, cut by span.

    A random codec draws from torch's default generator, which the encoder has seeded (core/encoder.py).
    `OPTIONAL` lists the methods that only some codecs have.
    """

    @property
    def by_parameter(self) -> bool:
        """Whether each parameter is encoded separately, in its own shape; otherwise any span, as a flat row."""

    @property
    def traits(self) -> CodecTraits:
        """What the contract suite may expect of it."""

    def memory(self, like: Tensor) -> Tensor | None:
        """The zeroed memory for a row like this one, if the codec has a memory: one row, or several.

        The first row is what has not been sent yet: a vector that is added to it is sent later.
        """

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """The payload of `x`, which must be finite and is not changed; updates `memory` in place."""

    def decode(self, payload: Payload, out: Tensor) -> None:
        """Write the decoded vector into `out`; a payload that cannot belong to a tensor like `out` is refused."""

    def nbytes(self, like: Tensor) -> int:
        """The bytes of a payload for a tensor like this one; an estimate if they vary (see `CodecTraits`)."""


OPTIONAL = {
    "most": "Varies: the largest number of bytes of a payload",
    "pairs": "Sparse: the indices and values that a payload holds",
    "at": "Warms: the codec that encodes in a given step",
    "fraction": "Thins: the fraction of the numbers that is sent",
    "with_fraction": "Thins: the same codec with another fraction",
    "codec": "Wraps: the codec inside",
    "shared": "Shares: whether all workers are to use one scale",
    "scale": "Shares: the scale that `encode` would use",
    "encode_at": "Shares: `encode` with a given scale",
    "rounding": "RoundingCodec: the largest relative change of a number",
}
"""The methods and properties that only some codecs have. A contract test refuses a public name that is in neither
list, since a misspelled optional method would never be called."""


@runtime_checkable
class Varies(Protocol):
    """A codec whose payload is larger for some numbers than for others."""

    def most(self, like: Tensor) -> int:
        """The largest number of bytes of a payload."""


def most_bytes(codec: Codec, like: Tensor) -> int:
    """The largest number of bytes of any codec's payload."""
    return codec.most(like) if isinstance(codec, Varies) else codec.nbytes(like)


@runtime_checkable
class Sparse(Protocol):
    """A codec that sends only some numbers, unchanged."""

    def pairs(self, payload: Payload) -> tuple[Tensor, Tensor]:
        """Their indices (int32, ascending) and values."""


@runtime_checkable
class Warms(Protocol):
    """A codec that uses other codecs at the beginning of a run; it decodes the payloads of all of them."""

    def at(self, step: int) -> Codec:
        """The codec that encodes in this step of a worker."""


@runtime_checkable
class Thins(Protocol):
    """A codec that sends only a fraction of the numbers."""

    fraction: float

    def with_fraction(self, fraction: float) -> Codec:
        """The same codec with another fraction."""


@runtime_checkable
class Wraps(Protocol):
    """A codec around another one."""

    codec: Codec


@runtime_checkable
class Shares(Protocol):
    """A codec whose scale may be common to all workers: the largest of their own, which they exchange first.

    A codec by parameter has one scale for each parameter.
    """

    @property
    def shared(self) -> bool:
        """Whether it asks for a common scale."""

    def scale(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """The scale that `encode` would use, one number; a meta tensor if `x` is one. Changes nothing."""

    def encode_at(self, x: Tensor, memory: Tensor | None, scale: Tensor) -> tuple[Tensor, ...]:
        """Like `encode`, with a scale that is at least the worker's own."""


def shares(codec: object) -> TypeGuard[Shares]:
    """Whether a codec asks for a scale that is common to all workers."""
    return isinstance(codec, Shares) and codec.shared


@runtime_checkable
class RoundingCodec(Protocol):
    """A codec that sends every number, possibly rounded, as one tensor and has no memory: it can encode weights too.

    Other codecs are for gradients and their sums only: the receiver takes a number that was not sent for 0.
    """

    def rounding(self, dtype: torch.dtype) -> float:
        """The largest relative change of a number of this dtype that is neither huge nor tiny."""

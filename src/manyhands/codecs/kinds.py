"""What a codec may be able to do beside encoding, and what a codec around another one has of it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from manyhands.codecs.payload import no_scale
from manyhands.core.errors import refuse_unless
from manyhands.core.protocols import Codec, Varies, Warms, shares


@runtime_checkable
class Thins(Protocol):
    """A codec that keeps only a fraction of the numbers."""

    fraction: float

    def with_fraction(self, fraction: float) -> Codec:
        """The same with another one."""


def surround(outer: object, codec: Codec, *others: Codec) -> None:
    """Refuse what is not the same in every step within another codec; let the outer one vary if one within does."""
    for one in (codec, *others):
        refuse_unless(not isinstance(one, Warms), "codec", one, "the same in every step: let warmup(...) be outermost")
    if any(isinstance(one, Varies) for one in (codec, *others)):
        object.__setattr__(outer, "most", _Most((codec, *others)))


def scale_of(codec: Codec, x: Tensor, memory: Tensor | None) -> Tensor:
    """A codec's own scale; 0 if it shares none."""
    return codec.scale(x, memory) if shares(codec) else no_scale(x)


def encode_at(codec: Codec, x: Tensor, memory: Tensor | None, scale: Tensor) -> tuple[Tensor, ...]:
    """With this scale, if the codec shares one."""
    return codec.encode_at(x, memory, scale) if shares(codec) else codec.encode(x, memory)


class _Most:
    """As many bytes as any of these codecs may need."""

    def __init__(self, codecs: tuple[Codec, ...]) -> None:
        self._codecs = codecs

    def __call__(self, like: Tensor) -> int:
        return max(codec.most(like) if isinstance(codec, Varies) else codec.nbytes(like) for codec in self._codecs)

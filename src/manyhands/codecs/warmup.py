"""Warm-up: at the beginning of a run a larger fraction of the numbers is sent.

    stages i = 0, 1, ... of the first steps, equally long:   fraction = first^(i + 1), and at least the codec's own
    afterwards:                                              the codec's own

        first = 1/4, own 0.001, 5 stages      sent   25 %   6.25 %   1.5625 %   0.39 %    0.1 %     and so on
                                      left out       75 %  93.75 %  98.4375 %  99.61 %   99.9 %

A payload says by its size which stage has encoded it: fractions fall, so each stage has a largest payload, and the
smallest stage that the payload fits decodes it. Two stages with the same largest payload select equally many numbers,
and the pairs of indices and values mean the same in all of them.

Reference: Y. Lin et al., "Deep Gradient Compression", 2018, https://arxiv.org/abs/1712.01887, section 3.3.

Where we differ: stages are counted in a worker's steps, not in epochs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from torch import Tensor

from manyhands.codecs.dgc import Dgc
from manyhands.codecs.feedback import Feedback
from manyhands.codecs.topk import TopK
from manyhands.codecs.wrapping import refuse_warmup
from manyhands.core.codec import Codec, CodecTraits, Thins, Wraps, most_bytes
from manyhands.core.errors import refuse_unless


@dataclass(frozen=True)
class WarmUp:
    """A codec whose fraction falls.

    Args:
        codec: topk() or sampledtopk(), or one around them, such as feedback(topk()) or dgc().
        steps: how many steps of a worker the warm-up takes.
        first: the fraction of the first stage.
        stages: how many stages the warm-up has.
    """

    codec: Codec
    steps: int
    first: float = 0.25
    stages: int = 5

    def __post_init__(self) -> None:
        refuse_unless(self.steps >= 0, "steps", self.steps, ">= 0")
        refuse_unless(0 < self.first <= 1, "first", self.first, "> 0 and <= 1")
        refuse_unless(self.stages >= 1, "stages", self.stages, ">= 1")
        bound = "one that keeps a fraction of the numbers, such as feedback(topk())"
        refuse_unless(_thinning(self.codec) is not None, "codec", self.codec, bound)
        refuse_warmup(self.codec)

    @property
    def by_parameter(self) -> bool:
        """As the codec inside."""
        return self.codec.by_parameter

    @property
    def traits(self) -> CodecTraits:
        """Those of the codec inside."""
        return replace(self.codec.traits, plain=False)

    def at(self, step: int) -> Codec:
        """The codec that encodes in this step, from 0."""
        return self._stages[step * self.stages // self.steps] if 0 <= step < self.steps else self.codec

    @cached_property
    def _stages(self) -> tuple[Codec, ...]:
        """The codec of each stage, with falling fractions."""
        inner = _thinning(self.codec)
        assert inner is not None
        fractions = [max(inner.fraction, self.first ** (stage + 1)) for stage in range(self.stages)]
        return tuple(_with_fraction(self.codec, fraction) for fraction in fractions)

    def memory(self, like: Tensor) -> Tensor | None:
        """That of the codec inside, in every stage."""
        return self.codec.memory(like)

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """As after the warm-up; during it, use `at`."""
        return self.codec.encode(x, memory)

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """Decode by the smallest stage that a payload of this size fits."""
        size = sum(tensor.nbytes for tensor in payload)
        smallest_first = (self.codec, *reversed(self._stages))
        fitting = (codec for codec in smallest_first if size <= most_bytes(codec, out))
        next(fitting, self._stages[0]).decode(payload, out)

    def nbytes(self, like: Tensor) -> int:
        """As after the warm-up."""
        return self.codec.nbytes(like)

    def most(self, like: Tensor) -> int:
        """The largest payload of the first stage."""
        return most_bytes(self._stages[0], like)


def _thinning(codec: object) -> Thins | None:
    """The codec that has the fraction, inside any number of others."""
    while not isinstance(codec, Thins) and isinstance(codec, Wraps):
        codec = codec.codec
    return codec if isinstance(codec, Thins) else None


def _with_fraction(codec: Codec, fraction: float) -> Codec:
    """The same codec with another fraction inside."""
    if isinstance(codec, Thins):
        return codec.with_fraction(fraction)
    outer = cast(Any, codec)
    return cast(Codec, replace(outer, codec=_with_fraction(outer.codec, fraction)))


EXAMPLES: Mapping[str, Codec] = {
    "warm-up": WarmUp(TopK(0.01), 10),
    "warm-up with feedback": WarmUp(Feedback(TopK(0.01)), 10),
    "warm-up of dgc": WarmUp(Dgc(), 9),
}

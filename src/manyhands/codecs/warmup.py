"""Warm-up: at the beginning of a run a larger fraction of the numbers is sent.

    stages i = 0, 1, ... of the first steps, equally long:   fraction = first^(i + 1), and no less than the codec's own
    afterwards:                                              the codec's own

        first = 1/4, own 0.001, 5 stages      sent   25 %   6.25 %   1.5625 %   0.39 %    0.1 %     and so on
                                      left out       75 %  93.75 %  98.4375 %  99.61 %   99.9 %

Reference: Y. Lin et al., "Deep Gradient Compression", 2018, https://arxiv.org/abs/1712.01887, section 3.3.

Where we differ: stages are counted in a worker's steps, not in epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from manyhands.codecs.kinds import Thins, surround
from manyhands.core.errors import BadPayload, refuse_unless
from manyhands.core.protocols import Codec


@dataclass(frozen=True)
class WarmUp:
    """A codec whose fraction falls.

    Args:
        codec: topk() or sampledtopk(), or one around them, such as feedback(topk()) or dgc().
        steps: of a worker, until it is as it stays.
        first: the fraction of the first stage.
        stages: how many there are.
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
        refuse_unless(_within(self.codec) is not None, "codec", self.codec, bound)
        surround(self, self.thinned(0))

    @property
    def by_parameter(self) -> bool:
        """As the codec's."""
        return self.codec.by_parameter

    def at(self, step: int) -> Codec:
        """What encodes in this step, from 0."""
        return self.thinned(step * self.stages // self.steps) if 0 <= step < self.steps else self.codec

    def thinned(self, stage: int) -> Codec:
        """What encodes in a stage."""
        own = _within(self.codec)
        assert own is not None
        return _thinned(self.codec, max(own.fraction, self.first ** (stage + 1)))

    def memory(self, like: Tensor) -> Tensor | None:
        """The codec's own."""
        return self.codec.memory(like)

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """As when it has warmed up; before, `at` says what encodes."""
        return self.codec.encode(x, memory)

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """What any of the stages has made."""
        for stage in reversed(range(self.stages)):
            try:
                return self.thinned(stage).decode(payload, out)
            except BadPayload:
                continue
        self.codec.decode(payload, out)

    def nbytes(self, like: Tensor) -> int:
        """As when it has warmed up."""
        return self.codec.nbytes(like)


def _within(codec: object) -> Thins | None:
    """The codec that has the fraction, whatever is around it."""
    while not isinstance(codec, Thins) and hasattr(codec, "codec"):
        codec = codec.codec
    return codec if isinstance(codec, Thins) else None


def _thinned(codec: Codec, fraction: float) -> Codec:
    """The same codec with another fraction inside."""
    if isinstance(codec, Thins):
        return codec.with_fraction(fraction)
    outer = cast(Any, codec)
    return cast(Codec, replace(outer, codec=_thinned(outer.codec, fraction)))

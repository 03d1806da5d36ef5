"""Threshold: an accumulated number is sent when it exceeds a threshold τ, and then as ±τ.

    r <- r + x                    r = 0 at first
    r[i] > τ     send (i, +),  r[i] <- r[i] - τ
    r[i] < -τ    send (i, -),  r[i] <- r[i] + τ          hence  sum of all that was sent + r = sum of all x

A number that is sent takes a word of 32 bits: 2 i, plus 1 if it is negative.

        τ = 0.5    x = 0.3 -0.7 0.1 1.2      words 3 6      sent 0 -0.5 0 0.5      r = 0.3 -0.2 0.1 0.7
                   x = 0.3 -0.1 0.1 0.1      words 0 6      sent 0.5 0 0 0.5       r = 0.1 -0.3 0.2 0.3

τ is in the units of x and should be larger than most |x|: at most τ of a number is sent in a step, the rest remains in
r. A small τ does not mean that everything is sent: steps are ±τ.

Reference: N. Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", 2015,
https://www.isca-archive.org/interspeech_2015/strom15_interspeech.html.

Where we differ: the optional entropy code is `Rice`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.codecs.payload import check_ascending, expect, write_at
from manyhands.core.codec import Codec, CodecTraits
from manyhands.core.errors import BadPayload, refuse_unless

USUAL = 0.01
"""The fraction of the numbers that an estimate assumes to be sent."""


@dataclass(frozen=True)
class Strom:
    """Numbers above a threshold; the rest stays in its memory.

    Args:
        threshold: τ.
    """

    threshold: float
    by_parameter: ClassVar[bool] = False
    traits: ClassVar[CodecTraits] = CodecTraits(varies=True)

    def __post_init__(self) -> None:
        refuse_unless(0 < self.threshold < inf, "threshold", self.threshold, "> 0 and finite")

    def memory(self, like: Tensor) -> Tensor:
        """r, the numbers that have not been sent."""
        return torch.zeros_like(like)

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """A word for each number that is sent."""
        assert memory is not None, "Strom needs the memory that memory() gave"
        refuse_unless(x.numel() < 2**30, "the length of a vector", x.numel(), "< 2**30 (twice an index is an int32)")
        r = memory.add_(x).reshape(-1)
        indices = (r.abs() > self.threshold).nonzero().view(-1)
        has = r[indices]
        write_at(indices, has - self.threshold * has.sign(), memory)
        return ((indices * 2 + (has < 0)).int(),)

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """τ or -τ at the indices of the words, 0 elsewhere."""
        length = payload[0].numel() if payload else 0
        (words,) = expect(payload, (length, torch.int32))
        if bool((words < 0).any()):
            raise BadPayload(f"a word is {int(words.min())}, but must be >= 0")
        check_ascending(words >> 1, out.numel())
        write_words(words, self.threshold, out)

    def nbytes(self, like: Tensor) -> int:
        """An estimate: as if one of a hundred numbers were sent."""
        return 4 * int(like.numel() * USUAL)

    def most(self, like: Tensor) -> int:
        """A word for each number."""
        return 4 * like.numel()


def write_words(words: Tensor, threshold: float, out: Tensor) -> None:
    """τ or -τ at the indices of the words, 0 elsewhere."""
    write_at(words >> 1, threshold * (1.0 - 2.0 * (words & 1)).to(out.dtype), out.zero_())


EXAMPLES: Mapping[str, Codec] = {"threshold": Strom(0.7)}

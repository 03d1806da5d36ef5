"""Deep gradient compression: what is not sent yet gathers momentum as if it had been.

    g <- g min(1, clip / ||g||)                                 of this worker's gradient, before anything is added
    u <- μ u + g          or, Nesterov,   u <- μ (u + g)
    v <- v + u                            v <- v + u + g
    payload = C(v)                        v = 0 where it was sent, and u = 0 too (masking)

The momentum is in here: let the rule be plain SGD. Sending everything (fraction 1) is SGD with momentum without
masking, and SGD without momentum with it, for then u is 0 in every step.

Reference: Y. Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training",
2018, https://arxiv.org/abs/1712.01887. What it does about the first epochs is `WarmUp`; its threshold from a sample is
`SampledTopK`.

Where we differ: the clip is that of one worker. It should be the whole one divided by sqrt(P), by whoever knows P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from manyhands.codecs.kinds import surround
from manyhands.codecs.payload import place
from manyhands.codecs.topk import TopK
from manyhands.core.errors import refuse_unless
from manyhands.core.protocols import Codec, Sparse


@dataclass(frozen=True)
class Dgc:
    """A sparse codec with momentum.

    Args:
        codec: C, one that keeps some numbers as they are, such as topk() or sampledtopk().
        momentum: μ.
        nesterov: whether a step looks ahead.
        masking: whether a number's momentum ends when it is sent, so that an old direction is not followed for long.
        clip: the longest gradient, in the l2-norm of what is sent together; 0: any.
    """

    codec: Codec = field(default_factory=lambda: TopK(0.001))
    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip: float = 0.0

    def __post_init__(self) -> None:
        refuse_unless(isinstance(self.codec, Sparse), "codec", self.codec, "one that gives pairs, such as topk()")
        refuse_unless(self.codec.memory(torch.empty(0)) is None, "codec", self.codec, "one without a memory of its own")
        refuse_unless(0 <= self.momentum < 1, "momentum", self.momentum, ">= 0 and < 1")
        refuse_unless(self.clip >= 0, "clip", self.clip, ">= 0")
        surround(self, self.codec)

    @property
    def by_parameter(self) -> bool:
        """As the codec's."""
        return self.codec.by_parameter

    def memory(self, like: Tensor) -> Tensor:
        """v and u."""
        return like.new_zeros(2, *like.shape)

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """What the codec makes of v."""
        assert memory is not None, "Dgc needs the memory that memory() gave"
        v, u = memory
        self._accumulate(self._clipped(x), v, u)
        payload = self.codec.encode(v, None)
        assert isinstance(self.codec, Sparse)
        sent, _ = self.codec.pairs(payload)
        place(sent, 0.0, v)
        if self.masking:
            place(sent, 0.0, u)
        return payload

    def _clipped(self, g: Tensor) -> Tensor:
        norm = float(g.norm()) if self.clip else 0.0
        return g * (self.clip / norm) if norm > self.clip else g

    def _accumulate(self, g: Tensor, v: Tensor, u: Tensor) -> None:
        if self.nesterov:
            u.add_(g).mul_(self.momentum)
            v.add_(u).add_(g)
        else:
            u.mul_(self.momentum).add_(g)
            v.add_(u)

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """As the codec does."""
        self.codec.decode(payload, out)

    def nbytes(self, like: Tensor) -> int:
        """As the codec's."""
        return self.codec.nbytes(like)

"""Deep gradient compression: numbers that have not been sent yet accumulate momentum as if they had been.

    g <- g min(1, clip / ||g||)           the gradient of this worker alone
    u <- μ u + g          or, Nesterov,   u <- μ (u + g)
    v <- v + u                            v <- v + u + g
    payload = C(v)                        v = 0 where it was sent, and with masking u = 0 too

The codec has the momentum, so the rule should be plain SGD. If everything is sent (fraction 1), this is SGD with
momentum without masking, and SGD without momentum with masking, because u is 0 in every step.

Reference: Y. Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training",
2018, https://arxiv.org/abs/1712.01887. Its warm-up in the first epochs is `WarmUp`; its threshold from a sample is
`SampledTopK`.

Where we differ: the clip is that of one worker: give it the clip of the whole gradient divided by sqrt(P).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from manyhands.codecs.payload import write_at
from manyhands.codecs.sampled import SampledTopK
from manyhands.codecs.topk import TopK
from manyhands.codecs.wrapping import refuse_warmup
from manyhands.core.codec import Codec, CodecTraits, Sparse, most_bytes
from manyhands.core.errors import refuse_unless


@dataclass(frozen=True)
class Dgc:
    """A sparse codec with momentum.

    Args:
        codec: C, one that sends some numbers unchanged, such as topk() or sampledtopk().
        momentum: μ.
        nesterov: whether the momentum is Nesterov's.
        masking: whether sending a number sets its momentum to 0, so that a stale direction is not followed for long.
        clip: the largest l2-norm of a gradient span that is encoded together; 0: no clipping.
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
        refuse_warmup(self.codec)

    @property
    def by_parameter(self) -> bool:
        """As the codec inside."""
        return self.codec.by_parameter

    @property
    def traits(self) -> CodecTraits:
        """Those of the codec inside, and momentum."""
        return replace(self.codec.traits, unbiased=False, momentum=True, plain=False)

    def memory(self, like: Tensor) -> Tensor:
        """v (what has not been sent) and u (the momentum)."""
        return like.new_zeros(2, *like.shape)

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """C(v), after v has accumulated the gradient with momentum."""
        assert memory is not None, "Dgc needs the memory that memory() gave"
        v, u = memory
        self._accumulate(self._clipped(x), v, u)
        payload = self.codec.encode(v, None)
        assert isinstance(self.codec, Sparse)
        sent, _ = self.codec.pairs(payload)
        write_at(sent, 0.0, v)
        if self.masking:
            write_at(sent, 0.0, u)
        return payload

    def _clipped(self, g: Tensor) -> Tensor:
        norm = float(g.contiguous().norm()) if self.clip else 0.0  # strides must not change its last bit
        return g * (self.clip / norm) if norm > self.clip else g

    def _accumulate(self, g: Tensor, v: Tensor, u: Tensor) -> None:
        if self.nesterov:
            u.add_(g).mul_(self.momentum)
            v.add_(u).add_(g)
        else:
            u.mul_(self.momentum).add_(g)
            v.add_(u)

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """As the codec inside."""
        self.codec.decode(payload, out)

    def nbytes(self, like: Tensor) -> int:
        """As the codec inside."""
        return self.codec.nbytes(like)

    def most(self, like: Tensor) -> int:
        """As the codec inside."""
        return most_bytes(self.codec, like)


EXAMPLES: Mapping[str, Codec] = {
    "dgc": Dgc(TopK(0.1)),
    "dgc, sampled, nesterov": Dgc(SampledTopK(0.1), nesterov=True),
    "dgc, clipped": Dgc(TopK(0.05), masking=False, clip=2.0),
}

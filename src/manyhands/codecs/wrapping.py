"""What a codec around another one has in common with it: the refusal of warm-up inside, scales, sizes."""

from __future__ import annotations

from torch import Tensor

from manyhands.codecs.payload import no_scale
from manyhands.core.codec import Codec, Warms, shares
from manyhands.core.errors import refuse_unless


def refuse_warmup(*inside: Codec) -> None:
    """Refuse a codec inside another one that depends on the step: only the outermost codec is given the step."""
    for codec in inside:
        refuse_unless(
            not isinstance(codec, Warms), "codec", codec, "the same in every step: let warmup(...) be outermost"
        )


def scale_of(codec: Codec, x: Tensor, memory: Tensor | None) -> Tensor:
    """The worker's own scale; 0 if the codec shares none."""
    return codec.scale(x, memory) if shares(codec) else no_scale(x)


def encode_at(codec: Codec, x: Tensor, memory: Tensor | None, scale: Tensor) -> tuple[Tensor, ...]:
    """Encode with this scale if the codec shares one, else with its own."""
    return codec.encode_at(x, memory, scale) if shares(codec) else codec.encode(x, memory)

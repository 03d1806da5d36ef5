"""Encoding and decoding 25 MB by one thread, in multiples of copying them.

sign             one bit with two means per block of 4096 numbers
topk             the largest 1 %, exactly
qsgd4            QSGD with 7 levels, 4 bits for a number
ternary          TernGrad with clipping, 2 bits for a number
sign-fallback    the same without the compiled kernels
topk-fallback

Memory is allocated and touched before, as for gradients; memory that a codec allocates itself is included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from _side_by_side import WARM_UP, slowness, take_turns
from torch import Tensor

from manyhands.codecs import OneBit, Qsgd, TernGrad, TopK, vector_kernels
from manyhands.core.codec import Codec
from manyhands.core.errors import ManyhandsError
from manyhands.report.progress import Progress

NUMBERS = 6_250_000
ROUNDS = 20
STEPS = 3
CODECS: dict[str, Codec] = {"sign": OneBit(), "topk": TopK(0.01), "qsgd4": Qsgd(7), "ternary": TernGrad()}
GOALS = {
    "sign": "<= 1.5",
    "topk": "<= 3",
    "qsgd4": "<= 3",
    "ternary": "<= 3",
    "sign-fallback": "<= 2",
    "topk-fallback": "<= 8",
}


@contextmanager
def without_kernels() -> Iterator[None]:
    """Codecs use torch and numpy, as without compiled kernels."""
    before, vector_kernels.compiled = vector_kernels.compiled, lambda *_: None
    try:
        yield
    finally:
        vector_kernels.compiled = before


def timed(work: Callable[[], object], steps: int) -> float:
    """The seconds of so many calls."""
    began = time.perf_counter()
    for _ in range(steps):
        work()
    return time.perf_counter() - began


def both_ways(codec: Codec, x: Tensor, out: Tensor) -> None:
    codec.decode(codec.encode(x, None), out)


def run(progress: Progress) -> list[dict[str, Any]]:
    """Measure all sides. Rounds are printed to stderr, because `progress` counts samples."""
    torch.set_num_threads(1)
    if not vector_kernels.loaded():
        raise ManyhandsError("the kernels are not compiled here: install again where there is a C compiler")
    x, out = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0)), torch.zeros(NUMBERS)

    def compiled(name: str) -> Callable[[int], float]:
        return lambda steps: timed(lambda: both_ways(CODECS[name], x, out), steps)

    def fallback(name: str) -> Callable[[int], float]:
        def measured(steps: int) -> float:
            with without_kernels():
                return timed(lambda: both_ways(CODECS[name], x, out), steps)

        return measured

    sides: dict[str, Callable[[int], float]] = {"memcpy": lambda steps: timed(lambda: out.copy_(x), steps)}
    sides |= {name: compiled(name) for name in CODECS}
    sides |= {f"{name}-fallback": fallback(name) for name in ("sign", "topk")}
    for side in list(sides.values()) * WARM_UP:
        side(1)
    seconds = take_turns(sides, STEPS, ROUNDS)
    return [slowness(name, seconds[name], seconds["memcpy"], goal) for name, goal in GOALS.items()]

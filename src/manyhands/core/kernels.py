"""Functions in C, if they were compiled; otherwise slower ones in torch give the same results.

Every `kernels.c` of the package is compiled into one library when the package is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@cache
def compiled(name: str, result: Any, *arguments: Any) -> Callable[..., Any] | None:
    """The function of this name; None if there is no library, or one without this function."""
    for path in (Path(__file__).parents[1] / "_native").glob("kernels*.so"):
        try:
            function = CDLL(str(path))[name]
        except (OSError, AttributeError):  # built for another machine, or from older sources
            continue
        function.argtypes, function.restype = list(arguments), result
        found: Callable[..., Any] = function
        return found
    return None


LITTLE = 256 * 1024
"""Fewer bytes than this are likely to be in the cache when they are read again."""

ONE = {dtype: torch.ones((), dtype=dtype, device="cpu") for dtype in (torch.float32, torch.float64)}
"""A factor of 1 for `addcmul_`, which needs two factors."""


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


def _streams(x: Tensor, into: Tensor) -> bool:
    """Whether x is large, and both tensors are alike, contiguous and on the CPU."""
    alike = x.dtype == into.dtype and x.numel() == into.numel()
    return x.nbytes >= LITTLE and alike and x.is_cpu and into.is_cpu and x.is_contiguous() and into.is_contiguous()

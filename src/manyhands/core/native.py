"""Functions in C, where they were compiled. Without a compiler nothing is missing but speed.

Every `kernels.c` of the package is compiled into one library when it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor


@cache
def compiled(name: str, result: Any, *arguments: Any) -> Callable[..., Any] | None:
    """The function of this name; None if there is no library here, or an older one."""
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
"""Bytes that may well be in the cache still when they are read again."""


def stream(x: Tensor, into: Tensor) -> None:
    """Copy what nobody will read for a while; plainly if it is little, or cannot be done past the caches."""
    if x.nbytes < LITTLE:
        into.copy_(x)
        return
    copy = compiled("manyhands_stream", None, c_void_p, c_void_p, c_int64)
    fits = x.dtype == into.dtype and x.is_cpu and into.is_cpu and x.is_contiguous() and into.is_contiguous()
    if copy is None or not fits or x.numel() != into.numel():
        into.copy_(x)
    else:
        copy(into.data_ptr(), x.data_ptr(), x.nbytes)

"""Functions in C, if they were compiled; otherwise slower ones in torch give the same results.

Every `kernels.c` of the package is compiled into one library when the package is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from functools import cache
from pathlib import Path
from typing import Any


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

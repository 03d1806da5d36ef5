"""The k largest magnitudes of a vector: in C where that was compiled, else in torch, with the same result.

t = the k-th largest |x|      all |x| > t, then the first of those with |x| = t, until there are k
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from manyhands.core.native import compiled

Pairs = tuple[Tensor, Tensor]
"""Indices (int32, ascending) and values."""


def loaded() -> bool:
    """Whether the compiled kernels are in use."""
    return _kernel() is not None


def largest(x: Tensor, k: int) -> Pairs:
    """The k entries of a vector with the largest magnitudes; of equal ones the first, and NaN counts as infinite."""
    kernel = _kernel()
    fits = x.dtype is torch.float32 and x.is_cpu and x.is_contiguous()
    return in_torch(x, k) if kernel is None or not fits else in_c(kernel, x, k)


def in_c(kernel: Callable[..., int], x: Tensor, k: int) -> Pairs:
    """By the compiled kernel; float32 only."""
    indices, values = torch.empty(k, dtype=torch.int32), torch.empty(k)
    taken = kernel(x.data_ptr(), x.numel(), k, indices.data_ptr(), values.data_ptr())
    return indices[:taken], values[:taken]


def in_torch(x: Tensor, k: int) -> Pairs:
    """By torch, any float type."""
    if k == 0:
        return x.new_empty(0, dtype=torch.int32), x.new_empty(0)
    a = x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    t = a.topk(k, sorted=False).values.min()
    above, equal = (a > t).nonzero().view(-1), (a == t).nonzero().view(-1)
    indices = torch.cat([above, equal[: k - above.numel()]]).sort().values
    return indices.int(), x[indices]


def _kernel() -> Callable[..., int] | None:
    return compiled("manyhands_largest", c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p)

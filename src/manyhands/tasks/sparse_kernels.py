"""Linear models with few features per sample: in C where it was compiled, else in torch.

dots       z_i = sum_j x_ij w[v_ij]
scatter    w[v_ij] <- w[v_ij] + (scale r_i) x_ij       row by row; a feature may occur several times

The sums of `dots` in C and torch may differ in the last bits; what `scatter` writes does not.
"""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from manyhands.core.kernels import compiled

ROWS = (c_void_p, c_void_p, c_int64, c_int64)
"""The arguments of a kernel for a matrix of features: features, values, number of rows, number of columns."""


def dots(w: Tensor, features: Tensor, values: Tensor) -> Tensor:
    """One number for each row of features and their values."""
    kernel = compiled("manyhands_dots", c_int32, c_void_p, c_int64, *ROWS, c_void_p)
    if kernel is not None and _fits(w, features, values):
        z = torch.empty(len(features))
        if kernel(w.data_ptr(), w.numel(), features.data_ptr(), values.data_ptr(), *features.shape, z.data_ptr()):
            return z  # else a feature is out of range, and torch raises the error
    return embedding_bag(features, w.view(-1, 1), mode="sum", per_sample_weights=values).squeeze(-1)


def scatter(w: Tensor, features: Tensor, values: Tensor, r: Tensor, scale: float) -> None:
    """Write the weights of these features only; `dots` must have accepted them before."""
    kernel = compiled("manyhands_scatter", None, c_void_p, *ROWS, c_void_p, c_float)
    if kernel is not None and _fits(w, features, values):
        kernel(w.data_ptr(), features.data_ptr(), values.data_ptr(), *features.shape, r.data_ptr(), scale)
    else:
        w.index_add_(0, features.flatten(), (values * (scale * r).unsqueeze(1)).flatten())


def _fits(w: Tensor, features: Tensor, values: Tensor) -> bool:
    """Whether the tensors have the types and shapes of the kernels."""
    known = w.dtype == values.dtype == torch.float32 and features.dtype == torch.int64
    alike = features.dim() == 2 and features.shape == values.shape
    return known and alike and all(x.is_cpu and x.is_contiguous() for x in (w, features, values))

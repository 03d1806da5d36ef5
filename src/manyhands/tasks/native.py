"""Linear models of few features per sample: in C where that was compiled, else in torch.

dots       z_i = sum_j x_ij w[v_ij]
scatter    w[v_ij] <- w[v_ij] + (scale r_i) x_ij       row after row; a feature may come several times

The sums of `dots` may differ in the last bits, what `scatter` writes does not.
"""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from manyhands.core.native import compiled

ROWS = (c_void_p, c_void_p, c_int64, c_int64)
"""How a kernel is told of them: features, values, how many rows, how many columns."""


def dots(w: Tensor, features: Tensor, values: Tensor) -> Tensor:
    """One number for each row of features and their values."""
    kernel = compiled("manyhands_dots", c_int32, c_void_p, c_int64, *ROWS, c_void_p)
    if kernel is not None and _fits(w, features, values):
        z = torch.empty(len(features))
        if kernel(w.data_ptr(), w.numel(), features.data_ptr(), values.data_ptr(), *features.shape, z.data_ptr()):
            return z  # else there is a feature that w does not have, and torch will say so
    return embedding_bag(features, w.view(-1, 1), mode="sum", per_sample_weights=values).squeeze(-1)


def scatter(w: Tensor, features: Tensor, values: Tensor, r: Tensor, scale: float) -> None:
    """Write the weights of these features and no others; `dots` must have been content with them."""
    kernel = compiled("manyhands_scatter", None, c_void_p, *ROWS, c_void_p, c_float)
    if kernel is not None and _fits(w, features, values):
        kernel(w.data_ptr(), features.data_ptr(), values.data_ptr(), *features.shape, r.data_ptr(), scale)
    else:
        w.index_add_(0, features.flatten(), (values * (scale * r).unsqueeze(1)).flatten())


def _fits(w: Tensor, features: Tensor, values: Tensor) -> bool:
    """Whether it is what the kernels are made for."""
    known = w.dtype == values.dtype == torch.float32 and features.dtype == torch.int64
    alike = features.dim() == 2 and features.shape == values.shape
    return known and alike and all(x.is_cpu and x.is_contiguous() for x in (w, features, values))

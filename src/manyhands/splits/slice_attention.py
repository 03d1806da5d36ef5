"""Slice attention: nn.MultiheadAttention, of which each member of a team has some heads.

Q, K, V   by rows: those of the own heads         softmax(Q K^T / sqrt(d)) V      head by head
output    by columns: those of the own heads      summed over the members; the bias is added once
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.core.errors import Refused
from manyhands.splits.slice_plan import SlicedLayer

if TYPE_CHECKING:
    from manyhands.splits.slice_layers import SliceLayers


def attention(
    run: SliceLayers,
    one: SlicedLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The forward pass, with the arguments of torch's."""
    layer = one.layer
    assert isinstance(layer, nn.MultiheadAttention)
    is_batched = query.dim() == 3
    same = query is key and key is value
    inputs = [run.enter(one, query)] * 3 if same else [run.enter(one, x) for x in (query, key, value)]
    inputs = [_batch_first(x, layer.batch_first) for x in inputs]
    heads = one.widths[run.index]
    weights, biases = layer.in_proj_weight.chunk(3), _thirds(layer.in_proj_bias)
    projected = [functional.linear(x, of, bias) for x, of, bias in zip(inputs, weights, biases, strict=True)]
    q, k, v = (_by_head(x, heads) for x in projected)
    mask = _mask(run, one, q, k, attn_mask, key_padding_mask)
    run.random_apart()
    scores = q @ k.transpose(-2, -1) / math.sqrt(layer.head_dim)
    shares = torch.softmax(scores if mask is None else scores + mask, -1)
    out = functional.dropout(shares, layer.dropout, layer.training) @ v
    y = functional.linear(out.transpose(1, 2).flatten(2), layer.out_proj.weight)
    y = run.leave(one, y)
    if layer.out_proj.bias is not None:
        y = y + layer.out_proj.bias
    y = y if is_batched and layer.batch_first else (y.transpose(0, 1) if is_batched else y.squeeze(0))
    if not need_weights:
        return y, None
    if not average_attn_weights:
        raise Refused("average_attn_weights is False, but must be True: the heads are on several ranks")
    mean = run.total(one, shares.sum(1)) / layer.num_heads
    return y, mean if is_batched else mean.squeeze(0)


def _batch_first(x: Tensor, is_first: bool) -> Tensor:
    if x.dim() == 2:
        return x.unsqueeze(0)
    return x if is_first else x.transpose(0, 1)


def _thirds(bias: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None, None, None) if bias is None else bias.chunk(3)


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # type: ignore[no-untyped-call,no-any-return]


def _mask(
    run: SliceLayers, one: SlicedLayer, q: Tensor, k: Tensor, mask: Tensor | None, padding: Tensor | None
) -> Tensor | None:
    """What is added to the scores of the own heads."""
    total = None
    if mask is not None:
        total = _added_mask(mask, q.dtype)
        if mask.dim() == 3:  # of each sample and head
            first = sum(one.widths[: run.index])
            total = total.view(q.shape[0], -1, *mask.shape[1:])[:, first : first + q.shape[1]]
    if padding is not None:
        missing = _added_mask(padding if padding.dim() == 2 else padding.unsqueeze(0), q.dtype)[:, None, None, :]
        total = missing if total is None else total + missing
    return total


def _added_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Truth values mean that a position is left out."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)

"""Derived weights: those that a layer computes from others in its forward pass, such as by weight normalisation.

A graph keeps them by value. Writing to the parameters before the backward pass would then change some of the weights
that it uses and not others, so that policies which do it are refused for such layers.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from manyhands.core.errors import Refused

WHY = "but this method writes to the weights between the two passes of a mini-batch: use pipedream or gpipe"


def refuse_derived(model: nn.Module) -> None:
    """Refuse layers whose weights are computed from other parameters."""
    for name, layer in model.named_modules():
        hooks = layer._forward_pre_hooks.values()
        if is_parametrized(layer) or any(isinstance(hook, WeightNorm | SpectralNorm) for hook in hooks):
            raise Refused(f"the weights of layer {name} are derived from other parameters in its forward pass, {WHY}")


def refuse_autocast() -> None:
    """Refuse casts of weights, which are copies too."""
    if torch.is_autocast_enabled("cpu"):
        raise Refused(f"autocast makes copies of the weights in the forward pass, {WHY}")

"""A model that is given as a list of its pipeline stages, which are applied one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class GivenStages(nn.Sequential):
    """A pipeline has one stage for each member; a worker that trains the whole model runs them in order."""


def given_model(given: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """The model that a user has given: a module, or a list of stages, which may be an `nn.ModuleList`."""
    is_list = isinstance(given, nn.ModuleList) and type(given).forward is nn.ModuleList.forward
    return given if isinstance(given, nn.Module) and not is_list else GivenStages(*given)  # type: ignore[misc]

"""Cuts: how a model is divided into pipeline stages, as a user chooses it.

    a list of stages  as they are (core/given_stages.py)
    nn.Sequential     its layers are divided (splits/layers.py)
    any other model   segments of its forward pass (splits/cutting.py)

So is an nn.Sequential with chosen cuts, or with weights that two of its stages would share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeGuard, get_args

from torch import nn

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.given_stages import GivenStages
from manyhands.core.work import source_of
from manyhands.splits.cut_stage import CutStage, CutStages
from manyhands.splits.cutting import Balance, cut
from manyhands.splits.layers import stages
from manyhands.splits.tied_weights import shared_names

Names = Sequence[str] | str | None
"""Of the modules with which stages 1, 2, ... begin; None: chosen."""


@dataclass(frozen=True)
class Cuts:
    """Where a model is cut into stages.

    Args:
        at: the names of the modules with which stages 1, 2, ... begin, also as one text; None: chosen.
        balance: what the largest stage has little of, if the cuts are chosen.
        example: inputs of the model for a few samples; None: a task has some.
    """

    at: Names = None
    balance: Balance = "work"
    example: Sequence[Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = get_args(Balance)
        refuse_unless(self.balance in known, "balance", self.balance, f"one of {', '.join(known)}")
        is_free = self.at is None or self.balance == "work"
        refuse_unless(is_free, "balance", self.balance, "left as it is: the cuts are given by name")

    def are_timed(self, model: nn.Module) -> bool:
        """Whether the cuts depend on a measurement."""
        return self.balance == "time" and not isinstance(model, GivenStages)

    def stages(self, model: nn.Module, count: int) -> Sequence[nn.Module]:
        """The layers of an nn.Sequential; of other modules, or with chosen cuts, segments of their forward pass."""
        if isinstance(model, GivenStages):
            return self._given(model, count)
        if is_chain(model) and self.at is None and self.balance != "parameters":
            found = stages(model, count)
            if not shared_names(model, found):
                return found
        names = self.at.replace(",", " ").split() if isinstance(self.at, str) else self.at
        segments = cut(model, self.inputs(model), count, names, self.balance)
        return _as_layers(model, segments) or segments

    def _given(self, model: GivenStages, count: int) -> Sequence[nn.Module]:
        """The stages that a user has listed."""
        listed = f"{len(model)}, the length of the list of stages that the model was given as"
        refuse_unless(count == len(model), "the number of stages", count, listed)
        why = "left out: the model was given as a list of stages"
        refuse_unless(self.at is None, "cut", self.at, why)
        refuse_unless(self.balance == "work", "balance", self.balance, why)
        for number, stage in enumerate(model):
            has_parameters = any(True for _ in stage.parameters())
            refuse_unless(has_parameters, f"the number of parameters of stage {number}", 0, ">= 1")
        if not shared_names(model, list(model)):
            return list(model)
        return cut(model, self.inputs(model), count, [str(number) for number in range(1, count)])

    def inputs(self, model: nn.Module) -> Sequence[Any]:
        """Inputs of the model for a few samples."""
        example = source_of(model).example
        if self.example is not None:
            return self.example
        if example is None:
            raise Refused(
                f"the model is a {type(model).__name__}, which is cut by running it: give inputs for a few samples, "
                "mh.join(example=(x,)), or make it an nn.Sequential"
            )
        return example()


def _as_layers(model: nn.Module, found: Sequence[CutStage]) -> Sequence[nn.Module]:
    """The stages of a chain that is cut between its layers, which take one tensor; none if they are no such ones."""
    names, cuts = list(model._modules), found[0].plan.cuts
    if not is_chain(model) or not set(cuts) <= set(names) or shared_names(model, found):
        return []
    layers, firsts = list(model), [0, *map(names.index, cuts), len(model)]
    return [nn.Sequential(*layers[start:stop]) for start, stop in pairwise(firsts)]


def is_chain(model: nn.Module | None) -> TypeGuard[nn.Sequential]:
    """Whether a model runs its layers one after another."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def joined(own: Sequence[nn.Module]) -> nn.Module:
    """The stages of one rank as a module."""
    if len(own) == 1:
        return own[0]
    cut_stages = [stage for stage in own if isinstance(stage, CutStage)]
    return CutStages(cut_stages) if cut_stages else nn.ModuleList(own)


def parted(part: nn.Module) -> Sequence[nn.Module]:
    """The stages of a module that `joined` has made."""
    if isinstance(part, CutStages):
        return part.stages
    return list(part) if isinstance(part, nn.ModuleList) else [part]

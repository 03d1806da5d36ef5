"""Cut stages: the stages of a module that was cut by running it (splits/cutting.py), as modules.

Each refers to the whole model and has the modules and tensors of its own segment of the forward pass, by their names in
the model. A tensor that several stages use belongs to each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from manyhands.splits.cut_pass import CutPass, CutPlan


class Belongings(NamedTuple):
    """The stage in which each module ends, and the stages that use each parameter and buffer, by name."""

    modules: Mapping[str, int]
    tensors: Mapping[str, frozenset[int]]


class ModelPart(nn.Module):
    """A part of a model: some of its modules and tensors, by their names in the model.

    Args:
        model: the whole model, which is not changed.
        own: what belongs to which stage.
        stages: the numbers of the stages that the part consists of.
    """

    def __init__(self, model: nn.Module, own: Belongings, stages: Collection[int]) -> None:
        super().__init__()
        self._in_tuple = (model,)  # so that it is not a module inside this one
        self._modules_here = {name for name, stage in own.modules.items() if stage in stages}
        self._tensors_here = {name for name, users in own.tensors.items() if not users.isdisjoint(stages)}

    @property
    def whole(self) -> nn.Module:
        """The model."""
        return self._in_tuple[0]

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """This part and the modules of the model that end in it, by their names in the model."""
        yield "", self
        yield from ((name, one) for name, one in self.whole.named_modules() if name in self._modules_here)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this part uses, by their names in the model."""
        yield from ((name, p) for name, p in self.whole.named_parameters() if name in self._tensors_here)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The buffers that this part uses, by their names in the model."""
        yield from ((name, x) for name, x in self.whole.named_buffers() if name in self._tensors_here)


class CutStage(ModelPart):
    """One stage of a model.

    Args:
        model: the whole model, which is not changed.
        plan: where it is cut.
        index: the number of the stage.
        own: what belongs to which stage.
    """

    def __init__(self, model: nn.Module, plan: CutPlan, index: int, own: Belongings) -> None:
        super().__init__(model, own, [index])
        self.plan, self.index, self.own = plan, index, own
        self._sizes: dict[Any, Any] = {}

    def forward(self, fields: Sequence[Any], received: Sequence[Tensor | None]) -> Any:
        """What travels to the next stage; on the last stage, what the model returns.

        Args:
            fields: the inputs of the model: every stage has the mini-batch.
            received: what the previous stage returned; empty on the first one.
        """
        return CutPass(self.whole, self.plan, self.index, self._sizes, received).run(fields)


class CutStages(ModelPart):
    """Several stages of a model, which one rank has."""

    def __init__(self, stages: Sequence[CutStage]) -> None:
        super().__init__(stages[0].whole, stages[0].own, [stage.index for stage in stages])
        self.stages = tuple(stages)

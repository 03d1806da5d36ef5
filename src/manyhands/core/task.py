"""Task: a model, its data and its loss, independent of how and by how many workers it is trained."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.given_stages import given_model
from manyhands.core.model_check import refuse_uninitialised
from manyhands.core.work import ModelWork, WorkSource, complete, estimate
from manyhands.core.work_counter import count_work, example


def is_stream(data: Any) -> bool:
    """Whether samples can only be iterated over, not indexed."""
    if isinstance(data, IterableDataset):
        return True
    return not (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


@dataclass(frozen=True)
class Task:
    """A model, its data and its loss.

    Args:
        model: builds a new model, or a list of its pipeline stages; called once per rank, right after torch's generator
            was seeded.
        data: any map-style data set; a sample is a tuple of fields, the last one the target.
        loss: `loss(model(*fields), target)`; None if `model(*fields)` returns its own loss.
        batch_size: samples per mini-batch of one worker.
        test: the data set that `metric` is measured on.
        metric: `metric(outputs, targets)`, a mean over a batch, such as the accuracy.
        name: the name in reports.
        epochs: how long to train by default.
        work: floating-point operations of forward and backward for one sample; None: they are counted (core/work.py).
            If given, each layer has its counted share of them.
        sizes_only: the model is on the meta device and never trained: to simulate times only. Of the data only the
            number of samples and the sizes of the first one are used.
        gradient: `gradient(model, *fields)`, instead of a loss that autograd can differentiate: returns the loss to
            report, and gradients by parameter name.
    """

    model: Callable[[], nn.Module | Sequence[nn.Module]]
    data: Any
    loss: Callable[..., Tensor] | None = None
    batch_size: int = 32
    test: Any = None
    metric: Callable[[Tensor, Tensor], float] | None = None
    name: str = "task"
    epochs: float = 40
    work: float | None = None
    sizes_only: bool = False
    gradient: Callable[..., tuple[Tensor, Mapping[str, Tensor]]] | None = None
    _counted: list[ModelWork] = field(default_factory=list, init=False, repr=False, compare=False)
    """The work of the model, once it was asked for."""
    _found: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What else was found out by running a model."""

    def __post_init__(self) -> None:
        refuse_unless(self.batch_size >= 1, "batch_size", self.batch_size, ">= 1")
        refuse_unless(self.epochs > 0, "epochs", self.epochs, "> 0")
        refuse_unless(self.work is None or self.work > 0, "work", self.work, "> 0, or None: counted")
        for name, data in {"data": self.data, "test": self.test}.items():
            if data is not None and is_stream(data):
                raise Refused(
                    f"{name} is a {type(data).__name__}, but must have a length and an index; "
                    "your own loop (mh.join) can share a stream"
                )
        refuse_unless(len(self.data) >= 1, "the number of samples", len(self.data), ">= 1")
        if self.gradient is not None and self.loss is not None:
            raise Refused("loss and gradient are both given, but a task needs only one of them")

    def build(self, seed: int) -> nn.Module:
        """A new model whose weights depend only on the seed."""
        torch.default_generator.manual_seed(seed)
        with torch.device("meta") if self.sizes_only else nullcontext():
            model = given_model(self.model())
        refuse_uninitialised(model)
        vars(model)[WorkSource.NAME] = WorkSource(self.counted_work, self.example_inputs, self._found)
        return model

    def counted_work(self, model: nn.Module) -> ModelWork:
        """The work of a model that this task has built; counted once, since all of them are alike."""
        if not self._counted:
            self._counted.append(replace(self._count(model), given=self.work))
        return self._counted[0]

    def example_inputs(self) -> tuple[Any, ...]:
        """The inputs of the model for a few samples, as many as work is counted on."""
        fields = example(self.data, "meta" if self.sizes_only else None)
        return fields if self.loss is None else fields[:-1]

    def _count(self, model: nn.Module) -> ModelWork:
        if self.gradient is not None:
            return estimate(model, "the task computes its gradient without autograd")
        try:
            return complete(model, count_work(model, self.example_inputs()))
        except Exception as error:  # of the data set or the model, which may be anything
            return estimate(model, f"a forward pass over the first sample failed: {type(error).__name__}: {error}")

    def loss_of(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The loss of the model on one mini-batch."""
        if self.loss is None:
            loss: Tensor = model(*batch)
            return loss
        return self.loss(model(*batch[:-1]), batch[-1])

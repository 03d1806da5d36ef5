"""Task: what is to be learned, apart from how and by how many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from manyhands.core.errors import Refused, refuse_unless


def is_stream(data: Any) -> bool:
    """Whether samples can only be walked over, not asked for."""
    if isinstance(data, IterableDataset):
        return True
    return not (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


@dataclass(frozen=True)
class Task:
    """A model, its data and its loss.

    Args:
        model: builds a fresh model; called once per rank, right after torch's generator was seeded.
        data: any map-style data set; a sample is a tuple of fields, the last one the target.
        loss: `loss(model(*fields), target)`; None if `model(*fields)` returns its own loss.
        batch_size: samples per mini-batch of one worker.
        test: what `metric` is measured on after training.
        metric: `metric(outputs, targets)`, a mean over a batch, such as the accuracy.
        name: how reports call it.
        epochs: how long to train when nobody says.
        work: floating-point operations of forward and backward for one sample; None: 6 per parameter.
        sizes_only: the model is never run and has no numbers, only sizes: for virtual time.
        gradient: `gradient(model, *fields)`, instead of a loss that can be differentiated: gives the loss to report,
            and a gradient for each parameter it has one for, by name.
    """

    model: Callable[[], nn.Module]
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

    def __post_init__(self) -> None:
        refuse_unless(self.batch_size >= 1, "batch_size", self.batch_size, ">= 1")
        refuse_unless(self.epochs > 0, "epochs", self.epochs, "> 0")
        for name, data in {"data": self.data, "test": self.test}.items():
            if data is not None and is_stream(data):
                raise Refused(
                    f"{name} is a {type(data).__name__}, but must have a length and samples to ask for; "
                    "your own loop (mh.join) can share a stream"
                )
        refuse_unless(len(self.data) >= 1, "the number of samples", len(self.data), ">= 1")
        if self.gradient is not None and self.loss is not None:
            raise Refused("loss and gradient are both given, but a task needs only one of them")

    def build(self, seed: int) -> nn.Module:
        """A model whose weights depend on the seed and on nothing else."""
        torch.default_generator.manual_seed(seed)
        if not self.sizes_only:
            return self.model()
        with torch.device("meta"):
            return self.model()

    def loss_of(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Run the model on one mini-batch and say how wrong it was."""
        if self.loss is None:
            loss: Tensor = model(*batch)
            return loss
        return self.loss(model(*batch[:-1]), batch[-1])

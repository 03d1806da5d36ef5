"""Fields: what a user passes to one step, by position or by name; and the task made of a model and a loss alone.

step(x, y)          loss(model(x), y)              the last field is the target
step(x, y, mask=m)  loss(model(x, mask=m), y)      the last one without a name
step(x=x, y=y)      loss(model(x=x), y)            if all have names, the last of them
step(**batch)       model(**batch)                 a model that returns its own loss
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from manyhands.core.errors import Refused
from manyhands.core.task import Task


class Fields(tuple[Any, ...]):
    """A mini-batch as a tuple; the last of its fields may have names."""

    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, fields: tuple[Any, ...], named: Mapping[str, Any]) -> Fields:
        """Positional fields, then named ones."""
        batch = cls((*fields, *named.values()))
        batch.names = tuple(named)
        return batch

    @property
    def samples(self) -> int:
        """The number of samples: the length of the first field."""
        try:
            return len(self[0])
        except (IndexError, TypeError):
            first = f"a {type(self[0]).__name__} without a length" if self else "missing"
            raise Refused(f"the first field of a step is {first}, but must be a batch of samples") from None


class OwnTask(Task):
    """The task of a user's own loop: a model and a loss for `Fields`. The user's loop supplies the data."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor] | None) -> None:
        super().__init__(model=lambda: model, data=(None,), loss=loss, name="own loop")

    def loss_of(self, model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
        """Run the model on one mini-batch; the loss, refused if it is not a tensor of one number."""
        names = batch.names if isinstance(batch, Fields) else ()
        fields, named = list(batch[: len(batch) - len(names)]), dict(zip(names, batch[-len(names) :], strict=False))
        if self.loss is None:
            return _checked(model(*fields, **named))
        if len(batch) < 2:
            raise Refused("a step has 1 field, but must have an input and a target: the loss compares them")
        target = fields.pop() if fields else named.pop(names[-1])
        return _checked(self.loss(model(*fields, **named), target))


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        actual = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise Refused(f"the loss is {actual}, but must be a tensor of one number")
    return loss

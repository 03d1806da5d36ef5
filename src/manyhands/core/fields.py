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


class StepLoss(float):
    """The loss of a step as a number, with what the model returned beside it.

    Args:
        loss: the newest known loss; that of this mini-batch, except in a pipeline that streams.
        outputs: what the model returned, without its graph; what came after the loss, if a tuple was returned. None if
            this rank has not run the whole model.
    """

    outputs: Any

    def __new__(cls, loss: float, outputs: Any = None) -> StepLoss:
        made = super().__new__(cls, loss)
        made.outputs = outputs
        return made

    @property
    def loss(self) -> float:
        """The loss as a plain number."""
        return float(self)


class OwnTask(Task):
    """The task of a user's own loop: a model and a loss for `Fields`. The user's loop supplies the data."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        super().__init__(model=lambda: model, data=(None,), loss=loss, name="own loop")
        self._outputs: Any = None

    def take_outputs(self) -> Any:
        """What the last passes returned beside the loss."""
        outputs, self._outputs = self._outputs, None
        return outputs

    def loss_of(self, model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
        """Run the model on one mini-batch; the loss, refused if it is not a tensor of one number.

        Model and loss function may return the loss alone, in front of a tuple, or as `.loss` or ["loss"].
        """
        names = batch.names if isinstance(batch, Fields) else ()
        fields, named = list(batch[: len(batch) - len(names)]), dict(zip(names, batch[-len(names) :], strict=False))
        if self.loss is None:
            outputs = model(*fields, **named)
            loss = self._split(outputs)
            self._outputs = outputs if self._outputs is None else self._outputs
            return loss
        if len(batch) < 2:
            raise Refused("a step has 1 field, but must have an input and a target: the loss compares them")
        target = fields.pop() if fields else named.pop(names[-1])
        outputs = model(*fields, **named)
        loss = self._split(self.loss(outputs, target))
        self._outputs = without_graph(outputs) if self._outputs is None else self._outputs
        return loss

    def _split(self, found: Any) -> Tensor:
        """The loss in what was returned; what comes after it in a tuple becomes the outputs."""
        self._outputs = None
        if isinstance(found, tuple) and found:
            loss, *rest = found
            self._outputs = without_graph(rest[0] if len(rest) == 1 else tuple(rest))
            return _checked(loss)
        if isinstance(found, Mapping) and "loss" in found:
            return _checked(found["loss"])
        return _checked(found if isinstance(found, Tensor) else getattr(found, "loss", found))


def without_graph(outputs: Any) -> Any:
    """Outputs whose tensors do not keep the graph of their computation alive."""
    if isinstance(outputs, Tensor):
        return outputs.detach()
    if isinstance(outputs, Mapping):
        return {name: without_graph(value) for name, value in outputs.items()}
    if type(outputs) in (list, tuple):
        return type(outputs)(without_graph(value) for value in outputs)
    return outputs


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        actual = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise Refused(f"the loss is {actual}, but must be a tensor of one number")
    return loss

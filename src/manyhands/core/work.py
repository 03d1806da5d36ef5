"""Work: how many floating-point operations training takes for one sample, by module. Virtual seconds follow it.

    y = x W           forward         2 operations for each multiply-add
    dx = dy W^T       to_input        as many, unless x needs no gradient: that is so in the first layer
    dW = x^T dy       to_weights      as many, unless W is frozen

Matrix products and convolutions are counted (core/work_counter.py). Biases, activations, pooling and losses are not:
they take few operations. A module that has parameters and no product, such as an embedding or a normalisation, is
estimated: 2 operations per parameter for each of the three. So is a whole model that cannot be counted; `why_estimated`
says why.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

OPERATIONS_PER_PARAMETER = 2
"""In each of the three parts of an estimate: a multiply-add."""


@dataclass(frozen=True)
class Work:
    """Operations for one sample, or shares of them."""

    forward: float = 0.0
    to_input: float = 0.0
    to_weights: float = 0.0

    @property
    def backward(self) -> float:
        return self.to_input + self.to_weights

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: Work) -> Work:
        return Work(self.forward + other.forward, self.to_input + other.to_input, self.to_weights + other.to_weights)

    def __truediv__(self, by: float) -> Work:
        return Work(self.forward / by, self.to_input / by, self.to_weights / by)


@dataclass(frozen=True)
class ModelWork:
    """The work of a model for one sample.

    Args:
        modules: the work of each module, without that of the modules inside it. Products with a parameter belong to the
            module that has the parameter, others to the module whose forward pass computes them.
        given: the total according to the task; None: the sum over the modules.
        why_estimated: the reason why the model was not counted; empty if it was.
    """

    modules: Mapping[str, Work]
    given: float | None = None
    why_estimated: str = ""

    @cached_property
    def _counted(self) -> Work:
        return sum(self.modules.values(), Work())

    @property
    def total(self) -> float:
        """Operations of both passes for one sample."""
        return self._counted.total if self.given is None else self.given

    def share(self, names: Iterable[str] | None = None) -> Work:
        """What these modules, or all, have of the total: shares that add up to 1 for the whole model."""
        work = self._counted if names is None else sum((self.modules.get(name, Work()) for name in names), Work())
        return work / (self._counted.total or 1.0)

    def of(self, name: str) -> Work:
        """The operations of one module."""
        work = self.modules.get(name, Work())
        return work if self.given is None else work / (self._counted.total / self.given)

    def backward_shares(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """What each of these parameters, given by name and size, has of the backward pass; the sum is 1.

        A module's work is divided by size over its own parameters, that of modules without any over all.
        """
        module_sizes: dict[str, int] = {}
        for name, size in sizes.items():
            module_sizes[owner(name)] = module_sizes.get(owner(name), 0) + size
        work = {name: self.modules.get(name, Work()).backward for name in module_sizes}
        if not any(work.values()):
            work = {name: float(size) for name, size in module_sizes.items()}
        total = sum(work.values())
        return {
            name: work[owner(name)] / total * size / (module_sizes[owner(name)] or 1) for name, size in sizes.items()
        }


def owner(parameter: str) -> str:
    """The name of the module that has this parameter."""
    return parameter.rpartition(".")[0]


def estimate(model: nn.Module, why: str) -> ModelWork:
    """The work of a model that cannot be counted, from its parameters."""
    return ModelWork(_by_parameters(model, {}), why_estimated=why)


def complete(model: nn.Module, counted: Mapping[str, Work]) -> ModelWork:
    """The work of a model whose products were counted; modules that have parameters and no product are estimated."""
    return ModelWork(_by_parameters(model, counted))


def _by_parameters(model: nn.Module, counted: Mapping[str, Work]) -> dict[str, Work]:
    sizes: dict[str, int] = {}
    for name, p in model.named_parameters():
        sizes[owner(name)] = sizes.get(owner(name), 0) + p.numel()
    each = {name: float(OPERATIONS_PER_PARAMETER * size) for name, size in sizes.items() if name not in counted}
    return {**counted, **{name: Work(one, one, one) for name, one in each.items()}}


# -- the work of a model that a task has built -----------------------------------------------------------


class WorkSource:
    """Counts the work of a model: an attribute of a model that a task has built.

    It refers to the task and its data, so copies and files of the model do not contain it.

    Args:
        count: counts the work.
        example: inputs of the model for a few samples.
        found: what else was found out by running a model of this task; all its models are alike.
    """

    NAME = "_manyhands_work_source"

    def __init__(
        self,
        count: Callable[[nn.Module], ModelWork] | None = None,
        example: Callable[[], tuple[Any, ...]] | None = None,
        found: dict[Hashable, Any] | None = None,
    ) -> None:
        self.count, self.example = count, example
        self.found: dict[Hashable, Any] = {} if found is None else found

    def __reduce__(self) -> tuple[type[WorkSource], tuple[()]]:
        return WorkSource, ()


def source_of(model: nn.Module) -> WorkSource:
    """What the task that has built a model knows of it; an empty one if no task has."""
    source: WorkSource = vars(model).get(WorkSource.NAME) or WorkSource()
    return source


def note_example(model: nn.Module, example: Sequence[Any]) -> None:
    """For a model that no task has built: inputs for a few samples."""
    vars(model)[WorkSource.NAME] = WorkSource(example=lambda: tuple(example))


def work_of(model: nn.Module) -> ModelWork:
    """The work of a model: counted on a sample of the task that has built it, else estimated."""
    source = source_of(model)
    if source.count is None:
        return estimate(model, "the model was not built by a task, so its samples are not known")
    work: ModelWork = source.count(model)
    return work

"""Placeholder: a tensor of a known size and type whose numbers are on another rank; and the keys of such values."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as tree

from manyhands.core.errors import ManyhandsError

PARAMETER = "parameter "
"""The source of a key that is the value of a parameter."""


class Key(NamedTuple):
    """A value of a forward pass: number `output` of the results of the `call`-th call of `source`."""

    source: str
    call: int
    output: int = 0

    def __str__(self) -> str:
        number = f", call {self.call}" if self.call > 1 else ""
        return self.source if self.source.startswith(PARAMETER) else f"the result of {self.source}{number}"


class Missing(ManyhandsError):
    """A stage needs a value of an earlier stage that it has not received."""

    def __init__(self, key: Key, segment: int, stage: int) -> None:
        super().__init__(
            f"stage {stage} needs {key}, which stage {segment} computes and has not sent: "
            "the forward pass takes another way than for the example that the model was cut on"
        )
        self.key, self.segment, self.stage = key, segment, stage


class NeedsNumbers(RuntimeError):
    """An operation on a placeholder needs more than its size and type."""


@dataclass(frozen=True)
class Size:
    """What is known of a placeholder."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Size:
        return x.known if isinstance(x, Placeholder) else cls(x.shape, x.dtype, x.device)

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class NumbersSource(Protocol):
    """The forward pass that a placeholder belongs to."""

    def with_numbers(self, values: Any) -> Any:
        """Nested values, with received ones in the place of placeholders."""


class Placeholder(Tensor):
    """A value of an earlier stage.

    Args:
        size: its shape, type and device.
        key: which value of the forward pass it is.
        segment: the stage that computes it.
        run: the forward pass of this stage.
    """

    known: Size
    key: Key
    segment: int
    run: NumbersSource

    @staticmethod
    def __new__(cls, size: Size, key: Key, segment: int, run: NumbersSource) -> Placeholder:
        make: Any = Tensor._make_wrapper_subclass
        made: Placeholder = make(cls, size.shape, dtype=size.dtype, device=size.device)
        made.known, made.key, made.segment, made.run = size, key, segment, run
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operation that the pass does not look at: inside a module that is no open one, or after the pass."""
        kwargs = kwargs or {}
        known, out = by_size_alone(func, args, kwargs)
        if known:
            return out
        run = next(x.run for x in leaves_of((args, kwargs)) if isinstance(x, Placeholder))
        args, kwargs = run.with_numbers((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NeedsNumbers(str(func))


def by_size_alone(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Whether a function of placeholders returns a size, a type and the like, and what it returns."""
    with torch._C.DisableTorchFunctionSubclass(), suppress(RuntimeError, TypeError):
        out = func(*args, **kwargs)
        return not tensors_in(out), out
    return False, None


def replaced(kind: type, change: Callable[[Any], Any], values: Any) -> Any:
    """Nested values, with `change(x)` in the place of each leaf x of a kind."""
    if isinstance(values, kind):
        return change(values)
    of = type(values)
    if of is tuple or of is list:
        return of([replaced(kind, change, x) for x in values])
    if of is dict:
        return {name: replaced(kind, change, x) for name, x in values.items()}
    return values if of in LEAVES else tree.tree_map_only(kind, change, values)


def leaves_of(values: Any) -> list[Any]:
    """The leaves of nested values, in order."""
    of = type(values)
    if of is tuple or of is list:
        return [leaf for x in values for leaf in leaves_of(x)]
    if of is dict:
        return [leaf for x in values.values() for leaf in leaves_of(x)]
    return [values] if of in LEAVES else tree.tree_leaves(values)


LEAVES = frozenset({Tensor, torch.nn.Parameter, Placeholder, type(None), bool, int, float, str, slice, type(...)})
"""The usual leaves, for which torch's functions for nested values, which are slow, are not asked."""


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in nested values."""
    return [x for x in leaves_of(values) if isinstance(x, Tensor)]


def signature(values: Any) -> Hashable:
    """Equal for nested values whose tensors have the same sizes, and whose other leaves are equal."""
    of = type(values)
    if of is tuple or of is list:
        return of, tuple([signature(x) for x in values])
    if of is dict:
        return of, tuple([(name, signature(x)) for name, x in values.items()])
    if isinstance(values, Tensor):
        return Size.of(values), of is Placeholder
    if of in LEAVES and of is not slice:
        return of, values
    leaves, structure = tree.tree_flatten(values)
    return structure, tuple(map(_leaf_signature, leaves))


def _leaf_signature(x: Any) -> Hashable:
    if isinstance(x, Tensor):
        return Size.of(x), isinstance(x, Placeholder)
    if isinstance(x, slice):  # unhashable before Python 3.12
        return slice, x.start, x.stop, x.step
    return type(x), x if isinstance(x, Hashable) else repr(x)


def writes(func: Any) -> bool:
    """Whether a function of torch changes its first argument: `add_`, `x += y`, `x[0] = y`."""
    name: str = func.__name__
    if name.startswith("__"):
        return name == "__setitem__" or name in IN_PLACE_OPERATORS
    return name.endswith("_")


IN_PLACE_OPERATORS = frozenset(
    f"__i{name}__"
    for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "div", "mod", "pow", "and", "or", "xor")
) | {"__ilshift__", "__irshift__"}

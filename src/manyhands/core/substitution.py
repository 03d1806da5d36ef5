"""Substitution: a model computes with other tensors in the place of some of its parameters or buffers.

It is what `torch.func.functional_call` does, with the places looked up once instead of in every pass; so it also works
for a part of a model that refers to the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class Substitution:
    """Where tensors are in a model.

    Args:
        model: has the tensors.
        tensors: parameters or buffers of it, each once.
    """

    def __init__(self, model: nn.Module, tensors: Iterable[Tensor]) -> None:
        number = {id(x): n for n, x in enumerate(tensors)}
        self._places = [
            (held, name, number[id(x)])
            for module in model.modules()
            for held in _tensors_of(module)
            for name, x in held.items()
            if id(x) in number
        ]
        first = {n: (held, name) for held, name, n in reversed(self._places)}
        self._first = [first[n] for n in range(len(number))]

    def current(self) -> list[Tensor]:
        """What is there now: a module may have put a new tensor in the place of a buffer."""
        return [held[name] for held, name in self._first]

    @contextmanager
    def by(self, others: Sequence[Tensor]) -> Iterator[None]:
        """Within it these tensors are there, in the same order."""
        own = [held[name] for held, name, _ in self._places]
        for held, name, n in self._places:
            held[name] = others[n]
        try:
            yield
        finally:
            for (held, name, _), x in zip(self._places, own, strict=True):
                held[name] = x


def _tensors_of(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers

"""Footprint: how much memory the tensors of a rank take that it keeps between two steps.

Weights, gradients, what rules and codecs remember, versions, inboxes: whatever can be reached from its worker and its
strategy, each piece of memory once. What a forward pass keeps for the backward pass is gone by then, and data sets are
not counted. So it is the same in both worlds, and nobody has to allocate anything to know it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from manyhands.core.task import Task

OUTSIDE = ("manyhands.runtime", "manyhands.virtual")
"""The worlds behind the port: a rank's way to the others leads to all of them."""


def footprint(*roots: object) -> int:
    """Bytes of all tensors that can be reached from these."""
    pieces: dict[int, int] = {}
    seen: dict[int, object] = {}
    left: list[object] = list(roots)
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one  # kept, or another one may get its number
        if isinstance(one, Tensor) and one.is_sparse:
            left += [one._indices(), one._values()]
        elif isinstance(one, Tensor):
            memory = one.untyped_storage()
            pieces[memory._cdata] = memory.nbytes()
            left.append(one.grad)
        else:
            left.extend(_inside(one))
    return sum(pieces.values())


def _inside(one: object) -> Iterator[object]:
    """What a container or an object of ours holds."""
    if isinstance(one, Mapping):
        yield from one.values()
    elif isinstance(one, Collection) and not isinstance(one, str | bytes | range):
        yield from one
    elif isinstance(one, nn.Module):
        yield from one.parameters()
        yield from one.buffers()
    elif _is_ours(one):
        yield from vars(one).values() if hasattr(one, "__dict__") else ()
        for kind in type(one).__mro__:
            yield from (getattr(one, name, None) for name in _slots(kind))


def _slots(kind: type) -> Collection[str]:
    slots: Any = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def _is_ours(one: object) -> bool:
    home = type(one).__module__
    return home.startswith("manyhands.") and not home.startswith(OUTSIDE) and not isinstance(one, Task | type)

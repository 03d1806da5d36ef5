"""Footprint: the bytes of all tensors that a rank keeps between two steps.

Weights, gradients, state of rules and codecs, stashed versions, pending gradients: every tensor that can be reached
from the worker and its strategy, each storage once. Activations are freed by the end of a step, so they are not
counted, nor are data sets. The result is the same in both worlds, and nothing has to be allocated for a model of sizes
only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core.flat import ParamSlot, Span
from manyhands.core.task import Task

LEAVES = frozenset({int, float, bool, str, bytes, range, type(None), torch.dtype, torch.Size, Span, ParamSlot})
"""Types that hold no tensor: most of what a worker refers to, so they are skipped first."""
OUTSIDE = ("manyhands.runtime", "manyhands.virtual")
"""Packages that are not searched: a transport refers to the memory of other ranks."""


def footprint(*roots: object) -> int:
    """Bytes of all tensors that can be reached from these objects."""
    storages: dict[int, int] = {}
    seen: dict[int, object] = {}
    left: list[object] = list(roots)
    while left:
        one = left.pop()
        if type(one) in LEAVES or id(one) in seen:
            continue
        seen[id(one)] = one  # a reference keeps its id from being used again
        if isinstance(one, Tensor) and one.is_sparse:
            left += [one._indices(), one._values()]
        elif isinstance(one, Tensor):
            memory = one.untyped_storage()
            storages[memory._cdata] = memory.nbytes()
            left.append(one.grad)
        else:
            left.extend(_inside(one))
    return sum(storages.values())


def _inside(one: object) -> Iterator[object]:
    """What a container, a module or an object of this package refers to."""
    if isinstance(one, Mapping):
        yield from one.values()
    elif isinstance(one, Collection) and not isinstance(one, str | bytes):
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

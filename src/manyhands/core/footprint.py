"""Footprint: the bytes of all tensors that a rank keeps between two steps, and what they are for.

Weights, gradients, state of rules and codecs, stashed versions, pending gradients: every tensor that can be reached
from the worker and its strategy, each storage once. Activations are freed by the end of a step, so they are not
counted, nor are data sets. The result is the same in both worlds, and nothing has to be allocated for a model of sizes
only.

    weights      parameters and buffers of what the rank trains
    gradient     the flat gradient
    optimizer    the state of rules
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core.flat import Flat, ParamSlot, Span
from manyhands.core.task import Task
from manyhands.core.weight_slice import WeightSlice

LEAVES = frozenset({int, float, bool, str, bytes, range, type(None), torch.dtype, torch.Size, Span, ParamSlot})
"""Types that hold no tensor: most of what a worker refers to, so they are skipped first."""
OUTSIDE = ("manyhands.runtime", "manyhands.virtual")
"""Packages that are not searched: a transport refers to the memory of other ranks."""


Storages = dict[int, int]
"""The bytes of each storage, by its address."""


def footprint(*roots: object) -> int:
    """Bytes of all tensors that can be reached from these objects."""
    return sum(storages(*roots).values())


def by_purpose(trained: nn.Module, *roots: object) -> dict[str, int]:
    """The bytes of what is reached from a module and these objects, by purpose, and of everything (`bytes`)."""
    found = list(reachable(trained, *roots))
    flats = [one for one in found if isinstance(one, Flat)]
    slices = [one for one in found if isinstance(one, WeightSlice)]
    weights = _of(p for p in [*trained.parameters(), *trained.buffers()])
    gradient = _of(group.outgoing for flat in flats for group in flat.groups)
    rules = storages(*slices)
    for storage in (*weights, *gradient, *_of(one.weights for one in slices), *_of(_weights(flats))):
        rules.pop(storage, None)
    kinds = {"weights": weights, "gradient": gradient, "optimizer": rules, "bytes": _of(_tensors(found))}
    return {name: sum(kind.values()) for name, kind in kinds.items()}


def _weights(flats: Iterable[Flat]) -> Iterator[Tensor]:
    return (group.weights for flat in flats for group in flat.groups)


def storages(*roots: object) -> Storages:
    """The storages of all tensors that can be reached from these objects."""
    return _of(_tensors(reachable(*roots)))


def _tensors(found: Iterable[object]) -> Iterator[Tensor]:
    return (one for one in found if isinstance(one, Tensor) and not one.is_sparse)


def _of(tensors: Iterable[Tensor]) -> Storages:
    memories = [x.untyped_storage() for x in tensors]
    return {memory._cdata: memory.nbytes() for memory in memories}


def reachable(*roots: object) -> Iterator[object]:
    """These objects and what they refer to, each once; a sparse tensor refers to its indices and values."""
    seen: dict[int, object] = {}
    left: list[object] = list(roots)
    while left:
        one = left.pop()
        if type(one) in LEAVES or id(one) in seen:
            continue
        seen[id(one)] = one  # a reference keeps its id from being used again
        yield one
        if isinstance(one, Tensor):
            left += [one._indices(), one._values()] if one.is_sparse else [one.grad]
        else:
            left.extend(_inside(one))


def _inside(one: object) -> Iterator[object]:
    """What a container, a module or an object of this package refers to."""
    if isinstance(one, Mapping):
        yield from one.values()
    elif isinstance(one, Collection) and not isinstance(one, str | bytes):
        yield from one
    elif isinstance(one, nn.Module):
        yield from one.parameters()
        yield from one.buffers()
    elif isinstance(one, torch.optim.Optimizer):
        yield one.state
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

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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manyhands.core.flat import Flat, ParamSlot, Span
from manyhands.core.task import Task
from manyhands.core.weight_slice import WeightSlice

if TYPE_CHECKING:
    from manyhands.core.worker import Worker

LEAVES = frozenset({int, float, bool, str, bytes, range, type(None), torch.dtype, torch.Size, Span, ParamSlot})
"""Types that hold no tensor: most of what a worker refers to, so they are skipped first."""
OUTSIDE = ("manyhands.runtime", "manyhands.virtual")
"""Packages that are not searched: a transport refers to the memory of other ranks."""


Storages = dict[int, int]
"""The bytes of each storage, by its address."""


def footprint(*roots: object) -> int:
    """Bytes of all tensors that can be reached from these objects."""
    return sum(storages(*roots).values())


def by_purpose(w: Worker, strategy: object) -> dict[str, int]:
    """The bytes that a worker and its strategy keep, by purpose, and all of them (`bytes`)."""
    found = list(reachable(w, strategy))
    weights = _of([*w.trained.parameters(), *w.trained.buffers()])
    gradient = _of(group.outgoing for group in w.flat.groups)
    everything = _of(_tensors(found))
    if w.flat.is_meta:  # of sizes only, all ranks refer to one model, and to the flat models of all of them
        others = _of([*w.model.parameters(), *_of_flats(one for one in found if isinstance(one, Flat))])
        own = {**weights, **gradient, **_of(_of_flats([w.flat]))}
        everything = {storage: size for storage, size in everything.items() if storage in own or storage not in others}
    sizes = {"weights": sum(weights.values()), "gradient": sum(gradient.values())}
    return {**sizes, "optimizer": rule_bytes(w, strategy), "bytes": sum(everything.values())}


def rule_bytes(*roots: object) -> int:
    """The bytes of the state of all rules that are reached."""
    found = list(reachable(*roots))
    slices = [one for one in found if isinstance(one, WeightSlice)]
    rules = storages(*slices)
    known = _of(_of_flats(one for one in found if isinstance(one, Flat))) | _of(one.weights for one in slices)
    return sum(size for storage, size in rules.items() if storage not in known)


def _of_flats(flats: Iterable[Flat]) -> Iterator[Tensor]:
    """Weights and gradients."""
    for flat in flats:
        for group in flat.groups:
            yield from (group.weights, group.outgoing)


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

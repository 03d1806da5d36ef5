"""Sharding: how a model is divided over parameter servers, by size or by layer.

size           the flat vector cut into equal spans; layers may be cut, the load is even to one element
layer          whole layers, the largest first, each to the server with the least so far
round-robin    whole layers, to one server after the other

VGG-16 on 4 servers: the fullest one keeps 3.06 times the mean with layers in turn, 2.97 by layer, exactly 1 by size.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Literal

from torch import nn

from manyhands.core.errors import refuse_unless
from manyhands.core.flat import Flat, Span
from manyhands.core.rule import Rule

Shards = list[list[Span]]
"""For every shard the spans it keeps."""
Sharding = Literal["size", "layer", "round-robin"]


def by_size(flat: Flat, count: int) -> Shards:
    """Cut the model into `count` shards of equal size, first ones one element longer."""
    refuse_unless(count <= flat.numel, "servers", count, f"<= {flat.numel}, the number of parameters")
    base, longer = divmod(flat.numel, count)
    shards, start = [], 0
    for number in range(count):
        stop = start + base + (number < longer)
        shards.append(_spans(flat, start, stop))
        start = stop
    return shards


def _spans(flat: Flat, start: int, stop: int) -> list[Span]:
    """The spans of [start, stop) when all dtype groups are laid end to end."""
    spans, offset = [], 0
    for number, group in enumerate(flat.groups):
        low, high = max(start - offset, 0), min(stop - offset, group.weights.numel())
        if low < high:
            spans.append(Span(number, low, high))
        offset += group.weights.numel()
    return spans


def by_layer(flat: Flat, count: int) -> Shards:
    """Give whole layers to servers, largest first, least loaded first."""
    shards: Shards = [[] for _ in range(count)]
    loads = [0] * count
    for spans in sorted(_layers(flat, count), key=_load, reverse=True):
        least = loads.index(min(loads))
        shards[least] += spans
        loads[least] += _load(spans)
    return [sorted(spans) for spans in shards]


def in_turn(flat: Flat, count: int) -> Shards:
    """Give whole layers to servers, one after the other."""
    layers = _layers(flat, count)
    return [sorted(chain(*layers[number::count])) for number in range(count)]


def _layers(flat: Flat, count: int) -> list[list[Span]]:
    """What each layer, a module's own parameters, has; there must be one for each of `count` servers."""
    layers: dict[str, list[Span]] = {}
    for index in flat.slots:
        layers.setdefault(index.name.rpartition(".")[0], []).append(index.span)
    refuse_unless(count <= len(layers), "servers", count, f"<= {len(layers)}, the number of layers (sharding by layer)")
    return list(layers.values())


def _load(spans: list[Span]) -> int:
    return sum(span.numel for span in spans)


def check_servers(servers: int, model: nn.Module) -> None:
    """Refuse more servers than there are parameters to keep."""
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    refuse_unless(servers <= parameters, "servers", servers, f"<= {parameters}, the number of parameters")


WAYS: dict[Sharding, Callable[[Flat, int], Shards]] = {"size": by_size, "layer": by_layer, "round-robin": in_turn}


def cut(flat: Flat, how: Sharding, count: int, rule: Rule, *, at_most: bool = False) -> Shards:
    """Shards of a model, whole layers if the rule needs them; `at_most`: fewer if there is not enough to cut."""
    refuse_unless(how in WAYS, "shard", how, f"one of {', '.join(WAYS)}")
    how = "layer" if how == "size" and not rule.elementwise else how
    if at_most:
        count = min(count, flat.numel if how == "size" else len(_layers(flat, 0)))
    return WAYS[how](flat, count)

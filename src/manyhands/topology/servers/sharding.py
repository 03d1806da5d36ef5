"""Who keeps which weights: parameter servers sharded by size or by layer.

by_size    the flat vector cut into equal stretches; layers may be cut, the load is even to one element
by_layer   whole layers, the largest first, each to the server with the least so far

VGG-16 on 4 servers: by layer the fullest one keeps 2.97 times the mean, by size exactly 1.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.flat import Flat, Span
from manyhands.core.protocols import Rule

Shards = list[list[Span]]
"""For every shard the spans it keeps."""
Sharding = Literal["size", "layer"]


def by_size(flat: Flat, count: int) -> Shards:
    """Cut the model into `count` stretches of equal size, first ones one element longer."""
    refuse_unless(count <= flat.numel, "servers", count, f"<= {flat.numel}, the number of parameters")
    base, longer = divmod(flat.numel, count)
    shards, start = [], 0
    for number in range(count):
        stop = start + base + (number < longer)
        shards.append(_spans(flat, start, stop))
        start = stop
    return shards


def _spans(flat: Flat, start: int, stop: int) -> list[Span]:
    """The stretch [start, stop) of the model's parts laid end to end."""
    spans, offset = [], 0
    for number, part in enumerate(flat.parts):
        low, high = max(start - offset, 0), min(stop - offset, part.weights.numel())
        if low < high:
            spans.append(Span(number, low, high))
        offset += part.weights.numel()
    return spans


def by_layer(flat: Flat, count: int) -> Shards:
    """Give whole layers (a module's own parameters) to servers, largest first, least loaded first."""
    layers: dict[str, list[Span]] = {}
    for place in flat.places:
        layers.setdefault(place.name.rpartition(".")[0], []).append(place.span)
    refuse_unless(count <= len(layers), "servers", count, f"<= {len(layers)}, the number of layers (sharding by layer)")
    shards: Shards = [[] for _ in range(count)]
    loads = [0] * count
    for spans in sorted(layers.values(), key=lambda spans: -sum(span.numel for span in spans)):
        least = loads.index(min(loads))
        shards[least] += spans
        loads[least] += sum(span.numel for span in spans)
    return [sorted(spans) for spans in shards]


def check_servers(servers: int, model: nn.Module) -> None:
    """Refuse more servers than there are parameters to keep."""
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    refuse_unless(servers <= parameters, "servers", servers, f"<= {parameters}, the number of parameters")


def cut(flat: Flat, how: Sharding, count: int, rule: Rule, *, at_most: bool = False) -> Shards:
    """Shards of a model, whole layers if the rule needs them; `at_most`: fewer if there is not enough to cut."""
    if how not in ("size", "layer"):
        raise Refused(f"shard is {how!r}, but must be 'size' or 'layer'")
    how = how if rule.elementwise else "layer"
    if at_most:
        layers = len({place.name.rpartition(".")[0] for place in flat.places})
        count = min(count, layers if how == "layer" else flat.numel)
    return by_size(flat, count) if how == "size" else by_layer(flat, count)

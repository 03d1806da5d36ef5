"""Model check: what a model must be before a run begins; each rank compares its model with that of rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise, zip_longest

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from manyhands.core.errors import Refused
from manyhands.core.port import Tag, Transport, recv

LAYOUT = Tag("layout", carries="nothing")

_Entry = tuple[str, tuple[int, ...], str, str]
"""The name, shape and dtype of a tensor, and other properties in words: tied, frozen, group."""


def refuse_unlike(transport: Transport, model: nn.Module, groups: Sequence[Sequence[str]] = ()) -> None:
    """Refuse a model whose parameters, buffers or parameter groups differ from those of rank 0; name the first."""
    refuse_uninitialised(model)
    own = _layout(model, {name: number for number, names in enumerate(groups) for name in names})
    if transport.rank == 0:
        for rank in transport.peers():
            transport.send(rank, LAYOUT, own)
        return
    for here, there in zip_longest(own, recv(transport, LAYOUT, frm=0).meta):
        if here != there:
            raise Refused(
                f"rank {transport.rank} has another model than rank 0: {_words(here)} here, {_words(there)} there"
            )


def refuse_uninitialised(model: nn.Module) -> None:
    """Refuse a lazy layer, whose parameters have no shape before its first forward pass; name the first."""
    for name, x in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(x):
            raise Refused(
                f"{name} has no shape yet, but must have one: run one forward pass where the model is made, "
                "or give its layer the number of inputs"
            )


def _layout(model: nn.Module, groups: Mapping[str, int]) -> tuple[_Entry, ...]:
    first: dict[int, str] = {}
    entries = []
    for name, x in model.state_dict(keep_vars=True).items():
        tied = f", tied to {first[id(x)]}" if first.setdefault(id(x), name) != name else ""
        frozen = ", frozen" if isinstance(x, nn.Parameter) and not x.requires_grad else ""
        group = f", in group {groups[name]}" if name in groups else ""
        entries.append((name, tuple(x.shape), str(x.dtype), tied + frozen + group))
    return tuple(entries)


def _words(entry: _Entry | None) -> str:
    if entry is None:
        return "nothing more"
    name, shape, dtype, properties = entry
    return f"{name} {list(shape)} of {dtype.removeprefix('torch.')}{properties}"


def refuse_strides(parameters: Mapping[str, Tensor]) -> None:
    """Refuse parameters that no view of a flat tensor can replace."""
    for name, p in parameters.items():
        if not p.is_contiguous():
            raise Refused(f"{name} is laid out with strides {p.stride()}, but must be contiguous (no channels-last)")


def refuse_overlaps(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse two parameters in the same memory, which would be separated here: tied weights must be one parameter."""
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in parameters.items() if p.nbytes)
    for (_, stop, name), (start, _, other) in pairwise(spans):
        if start and start < stop:
            raise Refused(f"{other} overlaps {name} in memory, but must have its own memory, or be the same parameter")

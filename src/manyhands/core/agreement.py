"""Agreement: nobody begins with another model than the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from torch import nn

from manyhands.core.errors import Refused
from manyhands.core.protocols import Tag, Transport, recv

LAYOUT = Tag("layout", carries="nothing")

_One = tuple[str, tuple[int, ...], str, str]
"""A name, a shape, a dtype, and whatever else may differ, in words."""


def refuse_unlike(transport: Transport, model: nn.Module, groups: Sequence[Sequence[str]] = ()) -> None:
    """Refuse a model whose parameters or buffers are not those of rank 0, or not in the same groups, and say which."""
    mine = _layout(model, {name: number for number, names in enumerate(groups) for name in names})
    if transport.rank == 0:
        for rank in transport.peers():
            transport.send(rank, LAYOUT, mine)
        return
    for here, there in zip_longest(mine, recv(transport, LAYOUT, frm=0).meta):
        if here != there:
            raise Refused(
                f"rank {transport.rank} has another model than rank 0: {_words(here)} here, {_words(there)} there"
            )


def _layout(model: nn.Module, groups: Mapping[str, int]) -> tuple[_One, ...]:
    first: dict[int, str] = {}
    found = []
    for name, x in model.state_dict(keep_vars=True).items():
        tied = f", tied to {first[id(x)]}" if first.setdefault(id(x), name) != name else ""
        frozen = ", frozen" if isinstance(x, nn.Parameter) and not x.requires_grad else ""
        group = f", in group {groups[name]}" if name in groups else ""
        found.append((name, tuple(x.shape), str(x.dtype), tied + frozen + group))
    return tuple(found)


def _words(one: _One | None) -> str:
    return "nothing more" if one is None else f"{one[0]} {list(one[1])} of {one[2].removeprefix('torch.')}{one[3]}"

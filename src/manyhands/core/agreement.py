"""Agreement: nobody begins with another model than the others."""

from __future__ import annotations

from itertools import zip_longest

from torch import nn

from manyhands.core.errors import Refused
from manyhands.core.protocols import Tag, Transport, recv

LAYOUT = Tag("layout", carries="nothing")


def refuse_unlike(transport: Transport, model: nn.Module) -> None:
    """Refuse a model whose parameters or buffers are not those of rank 0, and say which."""
    mine = tuple((name, tuple(x.shape), str(x.dtype)) for name, x in model.state_dict(keep_vars=True).items())
    if transport.rank == 0:
        for rank in transport.peers():
            transport.send(rank, LAYOUT, mine)
        return
    for here, there in zip_longest(mine, recv(transport, LAYOUT, frm=0).meta):
        if here != there:
            raise Refused(
                f"rank {transport.rank} has another model than rank 0: {_words(here)} here, {_words(there)} there"
            )


def _words(one: tuple[str, tuple[int, ...], str] | None) -> str:
    return "nothing more" if one is None else f"{one[0]} {list(one[1])} of {one[2].removeprefix('torch.')}"

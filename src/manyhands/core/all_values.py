"""All values: every rank of a user's own loop learns a value of every other, such as a metric to be averaged.

    rank a  --- VALUE[number] --->  rank b          each to each: there is no lead whose loss could end it
    rank a  <-- VALUE[number] ----  rank b

A rank returns when it has the value of each of the others or knows that it is lost, so this is also a barrier. All
ranks call it equally often. Training steps are not disturbed: the messages have a tag of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.port import Tag, Transport, recv

VALUE = Tag("loop-value")

Value = float | int | str | bool | None | Tensor


def all_values(transport: Transport, ranks: Sequence[int], number: int, value: Value) -> dict[int, Value]:
    """The value of every living one of these ranks, this one's included, in the call of this number."""
    send_value(transport, ranks, number, value)
    return receive_values(transport, ranks, number, value)


def send_value(transport: Transport, ranks: Sequence[int], number: int, value: Value) -> None:
    """Send this rank's value to the others."""
    tensors = (value,) if isinstance(value, Tensor) else ()
    for rank in ranks:
        if rank != transport.rank:
            transport.send(rank, VALUE.of(number), () if tensors else (value,), tensors)


def receive_values(transport: Transport, ranks: Sequence[int], number: int, value: Value) -> dict[int, Value]:
    """The values that the living ranks have sent, with this rank's own, in the order of ranks."""
    found: dict[int, Value] = {transport.rank: value}
    for rank in ranks:
        if rank == transport.rank:
            continue
        try:
            message = recv(transport, VALUE.of(number), frm=rank)
        except PeerLost:
            continue
        found[rank] = message.meta[0] if message.meta else message.keep()[0]
    return dict(sorted(found.items()))

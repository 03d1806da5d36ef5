"""Lane: a worker's way to one shard, the same to the method whichever way it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.flat import Span
from manyhands.core.protocols import Saved
from manyhands.core.saving import Piece
from manyhands.topology.servers.inbox import Payload


class Lane(Protocol):
    """What a worker can do with a shard."""

    spans: list[Span]
    lag: int
    """How stale this worker's last read or push was."""
    refused: bool
    """Whether the gradient that was pushed before the last read was not accepted."""

    def ask(self) -> None:
        """Say that a read is coming; asking all shards first saves waiting for one after the other."""

    def pull(self, into: Sequence[Tensor]) -> None:
        """Read the shard's weights, when admitted; there must have been an `ask`."""

    def push(self, payload: Payload, untouched: Sequence[int], into: Sequence[Tensor] = (), batches: int = 1) -> None:
        """Hand over an encoded gradient of some mini-batches, one payload per span; it is lent until applied.

        Where that saves a copy, the weights may be read `into` memory whose next use is a pull.
        """

    def exchange(self, payload: Payload, alpha: float) -> Payload:
        """The elastic move: hand over where this worker is, get how far the shard's weights came; both encoded."""

    def look(self, into: Sequence[Tensor]) -> None:
        """Read the weights as they are, without being admitted, while no worker is in a step; it counts as no read."""

    def done(self) -> None:
        """This worker will not come again."""

    def lose(self, loss: PeerLost) -> None:
        """This worker was told of a loss while it waited for something else: whoever must know is told."""

    def rest(self) -> None:
        """This worker will not come again before it joins."""

    def join(self) -> None:
        """This worker is back; it may come as soon as all others are back too."""

    def state(self) -> list[Piece]:
        """What the shard remembers, once every worker rests."""

    def restore(self, saved: Saved) -> None:
        """Let the shard remember what was saved; nobody may have pushed yet."""

    def final(self, into: Sequence[Tensor]) -> None:
        """Read the weights once every worker is done or rests."""

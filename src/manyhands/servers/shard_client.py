"""ShardClient: how a worker reaches one shard. A method is written against this, wherever the shard is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.flat import Span
from manyhands.core.lag import Outcomes
from manyhands.core.state import StateSlice
from manyhands.core.strategy import Saved
from manyhands.servers.pending_gradients import Payload


class Pushed(NamedTuple):
    """What is known of a push when the call returns."""

    version: int
    """The version of the weights that this worker read last."""
    read: bool = False
    """Whether the push has read that version, so that a pull need not copy it again."""
    refused: bool = False
    """Whether the gradient was refused; a remote shard reports that with the next pull."""


class Moved(NamedTuple):
    """The result of an elastic move."""

    version: int
    """How many moves of all workers the shard has made, this one included."""
    moves: Payload


class ShardClient(Protocol):
    """What a worker can do with a shard."""

    spans: list[Span]
    version: int
    """The version that this worker's gradients are computed at: the one it has read last."""
    ahead: int
    """How many clocks this worker was ahead of the slowest when it read last."""

    def ask(self) -> None:
        """Announce a pull; a worker asks all shards before it waits for the first."""

    def pull(self, into: Sequence[Tensor], unchanged: bool = False) -> bool:
        """Read the shard's weights once admitted; returns whether a gradient pushed since the last pull was refused.

        There must have been an `ask`. `unchanged` says that `into` still holds what the last push has read.
        """

    def push_pull(
        self, payload: Payload, untouched: Sequence[int], into: Sequence[Tensor] = (), batches: int = 1
    ) -> Pushed:
        """Push an encoded gradient of some mini-batches, one payload per span; it is lent until applied.

        Where that saves a pass over memory, the new weights are read `into` the worker's memory at the same time.
        """

    def outcomes(self) -> Outcomes:
        """What has become known since the last call about this worker's gradients."""

    def exchange(self, payload: Payload, alpha: float) -> Moved:
        """The elastic move: send this worker's weights, receive by how much the shard's have moved; both encoded."""

    def peek(self, into: Sequence[Tensor]) -> None:
        """Read the current weights without admission, while no worker is in a step; it does not count as a read."""

    def done(self) -> None:
        """This worker has finished."""

    def lose(self, loss: PeerLost) -> None:
        """Handle a loss that was raised while this worker waited for something other than this shard."""

    def quiesce(self) -> None:
        """This worker neither pushes nor pulls until it joins again."""

    def join(self) -> None:
        """This worker continues, or joins a running job; it may push once all others have joined too."""

    def state(self) -> list[StateSlice]:
        """The state of the shard, once every worker has quiesced."""

    def restore(self, saved: Saved) -> None:
        """Load a saved state into the shard, before the first push."""

    def final(self, into: Sequence[Tensor]) -> None:
        """Read the weights once every worker has finished or quiesced."""

"""Loop positions: in a user's own loop, a worker whose partner will never come fails and says why, instead of waiting.

    worker a   takes step 6, ends          --- POSITION[ended, 6 steps] --->  worker b   in step 7: an error
    worker a   evaluates after step 5      --- POSITION[answer, 5 steps] -->  worker b   in step 6: an error

In lock step, all workers take equally many steps (except with servers that continue without a worker), and call what
concerns all of them (`answer`, `reduce`, `save`) after the same one. In any method they call it equally often. Each
worker sends its position to the others when it calls such a function and when it ends; an activity of its own receives
theirs. Both sides look, whichever is first: a worker at each step and call, the activity at each message.
"""

from __future__ import annotations

from typing import NamedTuple

from manyhands.core.errors import ManyhandsError, PeerLost
from manyhands.core.port import Tag, recv
from manyhands.core.strategy import Traits
from manyhands.core.worker import Worker

POSITION = Tag("loop-position", carries="nothing", credit=64)
END = "end"


class OutOfStep(ManyhandsError):
    """Two workers of a user's loop wait for each other at different places."""


class Position(NamedTuple):
    """Where a worker is: how many steps it has begun, and calls of all workers; the last call, or `END`."""

    steps: int = 0
    calls: int = 0
    call: str = ""


class LoopPosition:
    """The position of this worker, compared with the last one that is known of each other worker.

    Args:
        worker: this rank.
        traits: those of its strategy; they say whether all workers take equally many steps.
    """

    def __init__(self, worker: Worker, traits: Traits) -> None:
        self._worker, self._lockstep = worker, traits.lockstep
        self._even = traits.lockstep and not traits.may_end_early
        self._at = Position()
        self._others: dict[int, Position] = {}

    def watch(self) -> None:
        """Begin to receive the positions of the others."""
        if len(self._worker.members) > 1:
            self._worker.transport.spawn(self._receive, daemon=True)

    def _receive(self) -> None:
        while True:
            try:
                message = recv(self._worker.transport, POSITION)
            except PeerLost:
                if not self._worker.transport.peers():
                    return
                continue
            self._others[message.frm] = Position(*message.meta)
            message.release()
            self._check()

    def at_step(self) -> None:
        """This worker begins the step after those that it has taken; nothing if it has begun it."""
        if self._at.steps <= self._worker.step:
            self._at = self._at._replace(steps=self._worker.step + 1)
            self._check()

    def at_call(self, name: str) -> None:
        """This worker calls a function that all of them call together."""
        self._at = Position(self._at.steps, self._at.calls + 1, name)
        self._announce(only_lockstep=True)

    def at_end(self) -> None:
        """This worker has left its loop."""
        self._at = Position(self._worker.step, self._at.calls, END)
        self._announce()

    def _announce(self, only_lockstep: bool = False) -> None:
        w = self._worker
        if self._lockstep or not only_lockstep:
            for rank in w.members:
                if rank != w.rank:
                    w.transport.send(rank, POSITION, tuple(self._at))
        self._check()

    def _check(self) -> None:
        for rank, other in list(self._others.items()):
            if why := self._difference(self._at, other, rank):
                raise OutOfStep(f"rank {self._worker.rank} {why}")

    def _difference(self, at: Position, other: Position, rank: int) -> str:
        """Why this worker and another can no longer meet; empty if they can."""
        if other.call == END:
            if self._even and (at.steps > other.steps or (at.call == END and at.steps < other.steps)):
                ended = f"ended its loop after {at.steps}" if at.call == END else f"is in step {at.steps}"
                return (
                    f"{ended}{' steps' if at.call == END else ''}, but rank {rank} ended its loop after {other.steps}: "
                    "workers in lock step must take equally many; leave the loop by what hands.reduce returns, which "
                    "is the same on all ranks"
                )
            if at.calls > other.calls:
                return f"waits in hands.{at.call}, but rank {rank} has ended its loop: call it on all ranks"
        elif self._lockstep and at.calls < other.calls and at.steps > other.steps:
            return (
                f"is in step {at.steps}, but rank {rank} waits in hands.{other.call} after step {other.steps}: "
                "call it on all ranks, after the same step"
            )
        elif at.calls == other.calls and at.call not in (other.call, END):
            return f"waits in hands.{at.call}, but rank {rank} in hands.{other.call}: call the same on all ranks"
        return ""

"""Warm start: the first worker trains alone for some steps, then all others begin.

    first worker   step, step, ..., step | GO to all
    others         wait for it           | step, step, ...

Early updates are large, and large stale updates do harm. The others hold a mini-batch each while they wait. When the
first worker reaches a checkpoint, they take one step and wait again, so that they reach it too. When it has finished
or is lost, they begin.
"""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.core.errors import PeerLost
from manyhands.core.port import Tag, recv
from manyhands.core.worker import Worker
from manyhands.servers import ShardClient

GO = Tag("go", carries="nothing")


class WarmStart:
    """Whether this worker may take a step.

    Args:
        w: this worker.
        steps: how many the first worker takes alone.
    """

    def __init__(self, w: Worker, steps: int) -> None:
        self._steps = steps
        self._first = w.workers[0]
        self.is_over = steps == 0 or len(w.workers) == 1

    def wait(self, w: Worker, clients: Sequence[ShardClient]) -> None:
        """Called before a step: wait until this worker may take it."""
        if w.rank == self._first:
            if w.step >= self._steps:
                self.release(w, for_good=True)
            return
        while not self.is_over:
            try:
                message = recv(w.transport, GO, frm=self._first)
            except PeerLost as loss:
                self.is_over = loss.rank == self._first
                for client in clients:
                    client.lose(loss)
            else:
                (self.is_over,) = message.meta
                return

    def release(self, w: Worker, for_good: bool) -> None:
        """The first worker lets the others take one step, or all of them."""
        if w.rank == self._first and not self.is_over:
            self.is_over = for_good
            for rank in w.workers[1:]:
                w.transport.send(rank, GO, (for_good,))

"""LoopWorker: a worker whose gradients are computed by the user's own loop.

    strategy     ... w.gradient(batch) ...................... sums, sends, updates ...
                          | pause                                ^ resume
    user's loop           model(x), loss.backward(), clip ...... optimizer.step()

The strategy is the same as in a managed run. It runs in a coroutine, one step after the other, and pauses where it asks
for a gradient. The user's loop is then in turn: it computes with the weights that the strategy has left in the model,
and whatever it does to the gradients before its optimizer steps is in force.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from manyhands.core.coroutine import Coroutine
from manyhands.core.flat import Span
from manyhands.core.strategy import Batch
from manyhands.core.worker import Worker


class LoopWorker(Worker):
    """A rank with a model that its user runs.

    `drive` begins with a function that takes one step of the strategy; then `request` and `supply` alternate.
    """

    loss = math.nan
    """The loss of the mini-batch that is being consumed, if it is known."""
    in_step = False
    """Whether the strategy has asked for a gradient and waits for it."""

    def drive(self, step: Callable[[Batch], Any]) -> None:
        """Take all steps by this function, from the next `request` on."""
        self._turns = Coroutine(lambda: self._steps(step))

    def _steps(self, step: Callable[[Batch], Any]) -> None:
        while True:
            step(())
            self._turns.pause()

    def request(self) -> None:
        """Begin a step: run the strategy until it asks for a gradient; nothing if it has."""
        if not self.in_step:
            self.in_step = True
            self.loss = math.nan
            self._turns.resume()

    def supply(self) -> None:
        """The gradient is in `flat`: run the strategy to the end of its step."""
        self.request()
        self.in_step = False
        self._turns.resume()

    def abandon(self) -> None:
        """No further gradient will come: end a step that has begun where it waits for one."""
        self._turns.stop()
        self.in_step = False

    def gradient(
        self, batch: Batch, fired: Callable[[Span], None] | None = None, origin: tuple[int, int, int] | None = None
    ) -> float:
        """Wait until the user's loop has computed the gradient."""
        with self.timer.computing():
            self._turns.pause()
            if fired is None:
                self.charge_passes(self.batch_size)
            elif self.transport.is_simulated:
                self._charge_buckets(self.batch_size, fired)
            else:
                for bucket in self.flat.buckets():
                    fired(bucket)
        return self.loss

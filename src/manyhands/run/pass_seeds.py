"""Pass seeds: within the forward passes of a prepared model, torch's random numbers depend on the rank and the step.

    script       torch.manual_seed(0); torch.rand(2)   |   model(x)                |   torch.rand(2)
    generator    the script's own                      |   seed, rank, step, pass  |   the script's own, as if there had
                                                                                       been no pass

So dropout differs between workers, is the same in both worlds and after a resume, and what the script draws outside of
the model's passes is what `torch.manual_seed` says.
"""

from __future__ import annotations

import torch

from manyhands.core.worker import Worker


class PassSeeds:
    """Seeds torch's generator before a forward pass, and puts it back after it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._step = self._number = -1
        self._depth = 0

    def begin(self) -> None:
        """A forward pass begins; one within another is part of it."""
        self._depth += 1
        if self._depth > 1:
            return
        w = self._worker
        self._number = self._number + 1 if self._step == w.step else 0
        self._step = w.step
        self._outside = torch.default_generator.get_state()
        w.seed_torch(w.rank, w.step, self._number)

    def end(self) -> None:
        """A forward pass has ended; nothing if it was not seeded."""
        if self._depth:
            self._depth -= 1
            if not self._depth:
                torch.default_generator.set_state(self._outside)

"""Manual changes: weights that a user's loop has changed itself, such as by `clamp_` or `load_state_dict`.

    strategy's turn      weights are written
    note                 how often autograd has counted a write; a sample of the weights
    user's turn          model(x), backward ... perhaps p.clamp_(-1, 1)
    refuse               in a method that will overwrite the weights from elsewhere, a change would be lost

In a method whose workers have weights of their own (`keeps_changes`) such a change is in force, and nothing is noted.
`p.data.clamp_()` is not counted by autograd, so that some elements of every parameter are compared as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.core.errors import Refused
from manyhands.core.flat import DtypeGroup
from manyhands.core.strategy import Traits
from manyhands.core.worker import Worker

PER_PARAMETER = 4
"""Elements of every parameter that are compared."""


class ManualChanges:
    """What the weights were when the strategy had its last turn.

    Args:
        worker: this rank, which is set up.
        traits: those of its strategy.
    """

    def __init__(self, worker: Worker, traits: Traits) -> None:
        self._worker, self._active = worker, not traits.keeps_changes
        self._parameters = [worker.flat.parameter(slot) for slot in worker.flat.slots] if self._active else []
        self._indices = [_sample(group) for group in worker.flat.groups] if self._active else []
        self.note()

    def note(self) -> None:
        """Remember the weights: the user's turn begins."""
        if self._active:
            self._writes, self._values = self._seen()

    def refuse(self) -> None:
        """Refuse weights that are not those of the last `note`: the strategy's turn begins."""
        if not self._active:
            return
        writes, values = self._seen()
        if writes != self._writes or not all(map(torch.equal, values, self._values)):
            raise Refused(
                "the script has changed weights of the model, but in this method they come from elsewhere, and the "
                "change would be lost: use hands.prepare with a method whose workers have weights of their own, such "
                "as bsp or easgd; hands.load(path) loads the weights of a checkpoint everywhere"
            )

    def _seen(self) -> tuple[int, list[Tensor]]:
        groups = self._worker.flat.groups
        writes = sum(p._version for p in self._parameters)
        pairs = zip(groups, self._indices, strict=True)
        return writes, [group.weights.detach()[index].nan_to_num() for group, index in pairs]  # released ones are NaN


def _sample(group: DtypeGroup) -> Tensor:
    """Some elements of every parameter: the first, the last, and those between at equal distances."""
    spans = [slot.span for slot in group.slots]
    steps = torch.linspace(0, 1, PER_PARAMETER, dtype=torch.float64)  # exact beyond 2^24 elements
    return torch.cat([(span.start + steps * max(0, span.numel - 1)).long() for span in spans])

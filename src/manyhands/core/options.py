"""Options: the numbers of an optimizer, such as its learning rate, as they are at this step.

user's loop      scheduler.step(); optimizer.param_groups[0]["lr"] = ...
at each step     options.values <- the numbers of all parameter groups
where the        rules read options.values; a push to a server carries them along, and the server sets its own
weights are      before it applies that gradient
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Options:
    """The numbers of all parameter groups in one row, which every rule that is made of the optimizer reads."""

    values: tuple[float, ...] = ()

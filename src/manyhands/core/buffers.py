"""Buffers: the tensors of a model that are not trained, such as BatchNorm's statistics, merged over the workers.

Each worker updates its own copy. The lead gathers them, together with how far each worker has come: floating-point
buffers are averaged, of integers (counters) the maximum is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.core.gather import Gathered, gather, need_all
from manyhands.core.strategy import Weights
from manyhands.core.worker import Worker


def gather_buffers(w: Worker) -> Gathered | None:
    """The buffers of what each worker trains; meta: its position in its data, the steps it has taken, the names."""
    trained = {id(buffer) for buffer in w.trained.buffers()}
    named = {name: buffer for name, buffer in w.model.named_buffers() if id(buffer) in trained}
    return gather(w, (w.step, w.step - w.joined_at, *named), tuple(named.values()))


def average_buffers(w: Worker) -> Weights | None:
    """The merged buffers of the whole model, on the lead; None on the other workers."""
    if not any(True for _ in w.model.buffers()) or w.task.sizes_only:
        return {}
    gathered = gather_buffers(w)
    if gathered is None:
        return None
    if w.trained is not w.model:
        need_all(w, gathered)
    return merge_buffers(gathered)


@torch.no_grad()
def merge_buffers(gathered: Gathered) -> dict[str, Tensor]:
    """The mean or maximum of each buffer, without the workers that have not taken a step, if others have."""
    by_name: dict[str, list[Tensor]] = {}
    any_stepped = any(steps for (_, steps, *_), _ in gathered.values())
    for (_, steps, *names), tensors in gathered.values():
        if steps or not any_stepped:
            for name, tensor in zip(names, tensors, strict=True):
                by_name.setdefault(name, []).append(tensor)
    return {
        name: torch.stack(ts).mean(0) if ts[0].is_floating_point() else torch.stack(ts).amax(0)
        for name, ts in by_name.items()
    }

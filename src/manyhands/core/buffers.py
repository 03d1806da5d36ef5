"""Buffers: the tensors of a model that are not trained, such as BatchNorm's statistics, merged over the workers.

Each worker updates its own copy. The lead gathers them, together with how far each worker has come, and merges them:

    running statistics     what the workers have measured (core/running_statistics.py)
    other floats           the mean, each worker with a share by the steps that it has taken
    integers               the maximum: they are counters

A worker that joins later begins with the present ones. It asks the others for theirs, and an activity beside their main
program answers, because they may be computing, or waiting:

    joins   ASK_BUFFERS ------------------->  all members
            <--------------------- BUFFERS    steps, values;  what it receives is merged as above
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.gather import Gathered, gather, need_all
from manyhands.core.port import Meta, Tag, recv
from manyhands.core.running_statistics import running_statistics, weighted_mean
from manyhands.core.strategy import Weights
from manyhands.core.worker import Worker

ASK_BUFFERS, BUFFERS = Tag("ask-buffers", carries="nothing"), Tag("buffers")


def note_statistics(w: Worker) -> None:
    """Note the running statistics that a run begins with, before it is trained or loaded; all workers have the same."""
    if not w.task.sizes_only:
        w.statistics = running_statistics(w.model)


# -- gather and merge --------------------------------------------------------------------------------


def _own(w: Worker) -> tuple[Meta, list[Tensor]]:
    """The buffers of what this worker trains; meta: its position in its data, the steps it has taken, the names."""
    trained = {id(buffer) for buffer in w.trained.buffers()}
    named = {name: buffer for name, buffer in w.model.named_buffers() if id(buffer) in trained}
    return (w.step, w.step - w.joined_at, *named), list(named.values())


def gather_buffers(w: Worker) -> Gathered | None:
    """The buffers of every worker, on the lead; None on the others."""
    return gather(w, *_own(w))


def average_buffers(w: Worker) -> Weights | None:
    """The merged buffers of the whole model, on the lead; None on the other workers."""
    if not _has_buffers(w):
        return {}
    gathered = gather_buffers(w)
    if gathered is None:
        return None
    if w.trained is not w.model:
        need_all(w, gathered)
    return merge_buffers(w, gathered)


def _has_buffers(w: Worker) -> bool:
    return any(True for _ in w.model.buffers()) and not w.task.sizes_only


@torch.no_grad()
def merge_buffers(w: Worker, gathered: Gathered) -> dict[str, Tensor]:
    """One value of each buffer, without the workers that have not taken a step, if others have."""
    parts = [(steps, dict(zip(names, tensors, strict=True))) for (_, steps, *names), tensors in gathered.values()]
    if any(steps for steps, _ in parts):
        parts = [(steps, values) for steps, values in parts if steps]
    else:
        parts = [(1, values) for _, values in parts]
    names = dict.fromkeys(name for _, values in parts for name in values)
    return {name: _merge(w, name, [(share, values) for share, values in parts if name in values]) for name in names}


def _merge(w: Worker, name: str, parts: Sequence[tuple[int, Weights]]) -> Tensor:
    """The value of one buffer, of the shares and buffers of the workers that have it."""
    shares, values = [share for share, _ in parts], [buffers[name] for _, buffers in parts]
    if not values[0].is_floating_point():
        return torch.stack(values).amax(0)
    statistic = w.statistics.get(name)
    if statistic is None:
        return weighted_mean(values, shares)
    return statistic.merge(values, shares, [int(buffers[statistic.counter]) for _, buffers in parts])


# -- a worker joins ----------------------------------------------------------------------------------


def offer_buffers(w: Worker) -> None:
    """Answer the workers that join later, until the run ends."""
    if w.transport.pending_ranks and _has_buffers(w):
        w.transport.spawn(lambda: _answer_joiners(w), daemon=True)


def _answer_joiners(w: Worker) -> None:
    while True:
        try:
            joiner = recv(w.transport, ASK_BUFFERS).frm
        except PeerLost:
            continue
        meta, tensors = _own(w)
        w.transport.send(joiner, BUFFERS, meta, [x.clone() for x in tensors])


@torch.no_grad()
def inherit_buffers(w: Worker) -> None:
    """Begin with the merged buffers of the workers that are present."""
    if not _has_buffers(w):
        return
    present, gathered = [rank for rank in w.transport.peers("worker") if rank in w.members], Gathered()
    for rank in present:
        w.transport.send(rank, ASK_BUFFERS)
    for rank in present:
        try:
            message = recv(w.transport, BUFFERS, frm=rank)
        except PeerLost:
            continue
        gathered[rank] = message.meta, message.keep()
    merged = merge_buffers(w, gathered)
    for name, buffer in w.model.named_buffers():
        buffer.copy_(merged.get(name, buffer))

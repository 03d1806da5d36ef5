"""Alike: every rank begins with the same model and ends with the same answer.

    begin   lead --- its model ---> all others     a script may have made another one on every rank
    end     lead --- the answer --> all others     its own model again, if nobody took a step

A lead that is lost on the way takes what it had with it: whoever waits for it hears of that, and nobody hangs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from manyhands.core.errors import PeerLost
from manyhands.core.gather import gather
from manyhands.core.protocols import Message, Tag, Weights, recv
from manyhands.core.worker import Worker

BEGINNING, OUTCOME = Tag("beginning"), Tag("outcome")


def begin_alike(w: Worker) -> None:
    """Give the lead's weights and buffers to every rank, servers too."""
    lead = w.lead
    if w.rank == lead:
        _send(w, BEGINNING, _copies(w.model))
    else:
        _load(w.model, recv(w.transport, BEGINNING, frm=lead))


def end_alike(w: Worker, lead: int, answer: Weights | None) -> bool:
    """Give the answer, which `lead` was to have, to every rank; says whether this is the rank that gave it."""
    gathered = None if w.transport.role == "server" else gather(w, (w.step,))
    if gathered is None:
        _load(w.model, _outcome(w, lead))
        return False
    if answer is None:
        raise PeerLost(lead, "it had the answer")
    if any(step for (step,), _ in gathered.values()):
        _place(w.model, answer)
    _send(w, OUTCOME, _copies(w.model))
    return True


def _outcome(w: Worker, lead: int) -> Message:
    """What the lead sends; if it is lost, one of the ranks between it and us may have followed it."""
    loss = PeerLost(lead, "it had the answer")
    for rank in range(lead, min(w.rank, len(w.workers))):
        try:
            return recv(w.transport, OUTCOME, frm=rank)
        except PeerLost as found:
            loss = loss if found.why == "left" else found
    raise loss


def _send(w: Worker, tag: Tag, tensors: Sequence[Tensor]) -> None:
    for rank in w.transport.peers():
        w.transport.send(rank, tag, (), tensors)


def _state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _copies(model: nn.Module) -> list[Tensor]:
    """A model's numbers, to lend: their owner goes on changing its own."""
    return [x.detach().clone(memory_format=torch.contiguous_format) for x in _state(model)]


@torch.no_grad()
def _load(model: nn.Module, message: Message) -> None:
    for mine, x in zip(_state(model), message.tensors, strict=True):
        mine.copy_(x)
    message.release()


@torch.no_grad()
def _place(model: nn.Module, answer: Weights) -> None:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, x in answer.items():
        state[name].copy_(x)


def set_free(model: nn.Module) -> None:
    """Make a model an ordinary one again: its weights in memory of their own, its gradients where torch puts them."""
    for p in model.parameters():
        p.data = p.data.clone()
        if p._post_accumulate_grad_hooks:
            p._post_accumulate_grad_hooks.clear()

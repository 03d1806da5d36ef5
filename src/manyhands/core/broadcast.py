"""Broadcast of whole models: all ranks begin with the lead's model, and end with the answer.

    begin   lead --- its model ---> all others     each rank of a user's script may have built a different one
    start   lead --- checkpoint --> all others     which one it has loaded, if any; servers get its weights with it
    end     lead --- the answer --> all others     the initial model again if no worker took a step

If the lead is lost before it has sent, the ranks that wait for it get `PeerLost`; no rank waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from manyhands.core.errors import PeerLost, Refused
from manyhands.core.flat import BUCKET_BYTES, unwatch
from manyhands.core.gather import gather
from manyhands.core.port import Message, Tag, recv
from manyhands.core.strategy import Weights
from manyhands.core.worker import Worker

INITIAL_MODEL, START, FINAL_MODEL = Tag("initial-model"), Tag("loop-start"), Tag("final-model")


def broadcast_model(w: Worker) -> None:
    """Send the lead's weights and buffers to all ranks, including servers.

    In pieces, because a link keeps the memory that it has received a message in.
    """
    lead = w.lead
    for piece in _pieces(_state(w.model)):
        if w.rank == lead:
            _send(w, INITIAL_MODEL, _copied(piece))
        else:
            _load(piece, recv(w.transport, INITIAL_MODEL, frm=lead))


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Some of them at a time, of about the size of a bucket."""
    piece: list[Tensor] = []
    for x in tensors:
        if piece and sum(one.nbytes for one in piece) + x.nbytes > BUCKET_BYTES:
            yield piece
            piece = []
        piece.append(x)
    yield piece


def broadcast_start(w: Worker, checkpoint: str) -> None:
    """Start together: refused if the lead has loaded another checkpoint than this worker; "" is none."""
    lead, roles = w.lead, w.transport.roles
    if w.rank == lead:
        for rank in w.transport.peers():
            loads = bool(checkpoint) and roles[rank] != "worker"
            w.transport.send(rank, START, (checkpoint,), _copied(_state(w.model)) if loads else ())
        return
    message = recv(w.transport, START, frm=lead)
    (theirs,) = message.meta
    if message.tensors:
        _load(_state(w.model), message)
    elif w.transport.role == "worker" and theirs != checkpoint:
        here, there = (repr(one) if one else "no checkpoint" for one in (checkpoint, theirs))
        raise Refused(f"rank {w.rank} has loaded {here}, but rank {lead} {there}: call hands.load on all ranks")


def broadcast_answer(w: Worker, lead: int, answer: Weights | None) -> bool:
    """Send the answer, gathered by `lead`, to all ranks and load it; whether this rank was the sender."""
    gathered = gather(w, (w.step,)) if w.transport.role == "worker" else None
    if gathered is None:
        _load(_state(w.model), _receive_answer(w, lead))
        return False
    if answer is None:
        raise PeerLost(lead, "it had the answer")
    is_whole = w.trained is w.model  # of a part the others were released
    if not is_whole or any(step for (step,), _ in gathered.values()):
        _load_named(w.model, answer)
    _send(w, FINAL_MODEL, _copied(_state(w.model)))
    return True


def _receive_answer(w: Worker, lead: int) -> Message:
    """The final model; if the lead is lost, a rank between it and this one may have become the lead and sent it."""
    loss = PeerLost(lead, "it had the answer")
    for rank in range(lead, min(w.rank, len(w.workers))):
        try:
            return recv(w.transport, FINAL_MODEL, frm=rank)
        except PeerLost as error:
            loss = loss if error.why == "left" else error
    raise loss


def _send(w: Worker, tag: Tag, tensors: Sequence[Tensor]) -> None:
    for rank in w.transport.peers():
        w.transport.send(rank, tag, (), tensors)


def _state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies to send: the model itself may change before the receiver has read them."""
    return [x.detach().clone(memory_format=torch.contiguous_format) for x in tensors]


@torch.no_grad()
def _load(tensors: Sequence[Tensor], message: Message) -> None:
    for own, x in zip(tensors, message.tensors, strict=True):
        _put(x, own)
    message.release()


@torch.no_grad()
def _load_named(model: nn.Module, answer: Weights) -> None:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, x in answer.items():
        _put(x, state[name])


def _put(x: Tensor, own: Tensor) -> None:
    """Copy a whole parameter or buffer into one of which this rank may have had a slice only."""
    if own.shape == x.shape:
        own.copy_(x)
    else:
        own.data = x.to(own.device, copy=True)


def release_model(model: nn.Module) -> None:
    """Undo the flat layout: parameters get memory of their own, and gradients go to `.grad` again."""
    for p in model.parameters():
        p.data = p.data.clone()
        unwatch(p)

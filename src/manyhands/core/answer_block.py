"""The answer in the middle of a run: every worker's model holds it for a while, then training continues.

    quiesce    the lead gathers the answer (the centre, the mean, all stages) and sends it to the other workers
    block      the model's parameters point to the answer; the memory that is trained in is not touched
    after      they point to that memory again; buffers, which the user's code may have changed, are as before

A method that can be read between two steps (`peek`) is not quiesced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from manyhands.core.barrier import barrier
from manyhands.core.buffers import gather_buffers, merge_buffers
from manyhands.core.port import Tag, recv
from manyhands.core.rank import RankRun

MID_RUN_ANSWER = Tag("mid-run-answer")


@contextmanager
def answer_block(run: RankRun) -> Iterator[nn.Module]:
    """The model with the answer, on every worker; all workers enter and leave it together."""
    with torch.no_grad():
        answer = _gathered(run)
        before = _show(run.worker.model, answer)
    try:
        yield run.worker.model
    finally:
        with torch.no_grad():
            _restore(run.worker.model, before)
    with torch.no_grad():
        barrier(run.worker)
        if not run.strategy.traits.peekable:
            run.strategy.resume(run.worker)


def _gathered(run: RankRun) -> dict[str, Tensor]:
    """The answer with merged buffers, by name; from the lead."""
    w, strategy = run.worker, run.strategy
    lead, peekable = w.lead, strategy.traits.peekable
    weights = None
    if not peekable:
        strategy.quiesce(w)
        weights = strategy.answer(w)
    gathered = gather_buffers(w)
    if gathered is None:
        message = recv(w.transport, MID_RUN_ANSWER, frm=lead)
        return dict(zip(message.meta, message.keep(), strict=True))
    found = strategy.peek(w) if peekable else weights
    assert found is not None
    answer = {**found, **merge_buffers(w, gathered)}
    for rank in gathered:
        if rank != w.rank:
            w.transport.send(rank, MID_RUN_ANSWER, tuple(answer), tuple(answer.values()))
    return answer


def _show(model: nn.Module, answer: dict[str, Tensor]) -> dict[str, Tensor]:
    """Let the parameters point to the answer, load the buffers; what was there before."""
    before: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        before[name], p.data = p.data, answer[name].to(p.device)
    for name, buffer in model.named_buffers():
        before[name] = buffer.clone()
        buffer.copy_(answer.get(name, buffer))
    return before


def _restore(model: nn.Module, before: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        p.data = before[name]
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])

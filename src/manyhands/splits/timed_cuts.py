"""Timed cuts: cuts of equal seconds, measured on one rank before training.

    lead      measures both passes between the candidates for cuts, and chooses
    CUTS      lead -> all other ranks, servers too: the names of the cuts, and the seconds of each stage

A forward pass is timed when the candidates are called, a backward pass when the gradients of their arguments are known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core.errors import Refused
from manyhands.core.port import Tag, recv
from manyhands.core.work_counter import copy_with_same_parameters
from manyhands.core.worker import Worker
from manyhands.splits.cuts import Cuts
from manyhands.splits.cutting import chosen_by
from manyhands.splits.placeholder import tensors_in
from manyhands.splits.recording import Candidate

CUTS = Tag("cuts", carries="nothing")
REPEATS = 5
"""Passes of which the shortest time counts; one more is not measured."""


def settle(cuts: Cuts, w: Worker, count: int, samples: int) -> tuple[Cuts, Mapping[str, Any]]:
    """The cuts that all ranks use, with names if they depend on a measurement, which is returned for the record.

    Args:
        cuts: what the user has chosen.
        w: this rank; all ranks of the run call it.
        count: the number of stages.
        samples: the size of a micro-batch.
    """
    if not cuts.are_timed(w.model) or count == 1:
        return cuts, {}
    if w.transport.is_simulated:
        raise Refused("balance is 'time', but must be work or parameters in virtual time, whose seconds follow work")
    lead = w.workers[0]
    if w.rank == lead:
        names, seconds = fastest(w.model, cuts.inputs(w.model), count, max(2, samples))
        for other in (*w.worker_ranks, *w.servers):
            if other != lead:
                w.transport.send(other, CUTS, (names, seconds))
    else:
        message = recv(w.transport, CUTS, frm=lead)
        names, seconds = message.meta
        message.release()
    return replace(cuts, at=names, balance="work"), {"cut": " ".join(names), "stage_seconds": list(seconds)}


def fastest(
    model: nn.Module, example: Sequence[Any], count: int, samples: int
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """The cuts with the shortest longest stage, and the seconds of all stages for so many samples."""
    inputs = [x[torch.arange(samples) % len(x)] if isinstance(x, Tensor) and x.dim() else x for x in example]
    chosen, sizes = chosen_by(model, example, count, partial(_seconds, copy_with_same_parameters(model), inputs))
    times, stages = [one.time for one in chosen], [0.0] * count
    for time, seconds in sizes:
        stages[bisect_right(times, time)] += seconds
    return tuple(one.name for one in chosen), tuple(stages)


def _seconds(model: nn.Module, inputs: Sequence[Any], candidates: Sequence[Candidate]) -> list[tuple[int, float]]:
    """When each candidate was called, and the seconds of both passes from there to the next one."""
    names = [one.name for one in candidates]
    passes = [_one_pass(model, inputs, names) for _ in range(1 + REPEATS)][1:]
    return list(zip([0, *(one.time for one in candidates)], map(min, zip(*passes, strict=True)), strict=True))


def _one_pass(model: nn.Module, inputs: Sequence[Any], names: Sequence[str]) -> list[float]:
    """The seconds in front of the first module, and from each module to the next one."""
    forward, backward = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    with ExitStack() as hooks:
        for name in names:
            hook = partial(_enter, name, forward, backward)
            hooks.callback(model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True).remove)
        began = perf_counter()
        squares = [x.square().sum() for x in tensors_in(model(*inputs)) if x.requires_grad]
        middle = perf_counter()
        torch.autograd.grad(squares, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
        ended = perf_counter()
    there = [b - a for a, b in pairwise([began, *forward.values(), middle])]
    back = [a - b for a, b in pairwise([ended, *(backward[name] or middle for name in names), middle])]
    return [one + max(0.0, other) for one, other in zip(there, back, strict=True)]


def _enter(name: str, forward: dict[str, float], backward: dict[str, float], _: nn.Module, *given: Any) -> None:
    """The module is called: note when, and when the gradient of its argument is known."""
    forward[name] = perf_counter()
    (x,) = tensors_in(given)
    x.register_hook(_noting(name, backward))  # type: ignore[no-untyped-call]


def _noting(name: str, backward: dict[str, float]) -> Callable[[Tensor], None]:
    def note(_: Tensor) -> None:
        backward[name] = perf_counter()

    return note

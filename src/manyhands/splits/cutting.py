"""Cutting: any module becomes pipeline stages, by running it. Nothing is traced, and the model remains as it is.

    stages = cut(model, example, 3)                    three stages of about equal work
    stages = cut(model, example, 3, at=["h.4", "h.8"])

    x = stages[0](fields, ())            what travels: the activation, then skip connections
    x = stages[1](fields, x)
    out = stages[2](fields, x)           what the model returns

Each stage refers to the whole model and runs its own segment of the forward pass (splits/cut_pass.py): any control
flow, any batch size, training or evaluation. A pass over an example shows where the model can be cut
(splits/recording.py); passes of all stages show which values travel. Outputs and gradients of the stages are compared
with those of the model before anything is trained.

Parameters that are used in several stages (tied weights) belong to each of them; their gradients are to be summed.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor, nn

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.work import owner, source_of, work_of
from manyhands.core.work_counter import copy_with_same_parameters
from manyhands.splits.cut_pass import CutPass, CutPlan
from manyhands.splits.cut_stage import Belongings, CutStage
from manyhands.splits.layers import balanced_cuts
from manyhands.splits.placeholder import PARAMETER, Key, Missing, tensors_in
from manyhands.splits.recording import Candidate, Recording

Balance = Literal["work", "time", "parameters"]
"""What the largest stage has little of: operations, measured seconds, or parameters."""
Sizes = list[tuple[int, float]]
"""At which times of a recording there is how much of it."""
WORTH_CARRYING = 1.1
"""How many times larger the largest stage may become so that only activations travel."""


def cut(
    model: nn.Module,
    example: Sequence[Any],
    count: int,
    at: Sequence[str] | None = None,
    balance: Balance = "work",
) -> list[CutStage]:
    """Cut a model into `count` stages.

    Args:
        model: any module.
        example: inputs of the model for a few samples.
        count: the number of stages.
        at: the names of the first modules of stages 1, 2, ...; None: chosen, so that the largest stage is small.
        balance: what is small: the operations of a stage, or its number of parameters; seconds are measured before
            (splits/timed_cuts.py), so that "time" is "work" here.
    """
    found, key = source_of(model).found, ("cut", count, None if at is None else tuple(at), balance)
    if key not in found:
        found[key] = _found(model, example, count, at, balance)
    plan, own = found[key]
    return [CutStage(model, plan, index, own) for index in range(count)]


def _found(
    model: nn.Module, example: Sequence[Any], count: int, at: Sequence[str] | None, balance: Balance
) -> tuple[CutPlan, Belongings]:
    """Where to cut, and what belongs to the stages; checked on the example."""
    has_numbers = not any(p.is_meta for p in model.parameters())
    with _undisturbed(), torch.enable_grad():
        drawn = random.getstate()
        recording = Recording(copy_with_same_parameters(model), example)
        if random.getstate() != drawn:
            raise Refused("the forward pass draws from Python's random, but its stages have only torch's in common")
        size = _sizes(recording, model) if balance == "parameters" else _work(recording, model)
        chosen = _chosen(recording, model, count, size) if at is None else _named(recording, at, count)
        plan = _complete(_plan(recording, chosen), copy_with_same_parameters(model), example)
        own = _belongings(recording, model, chosen)
        if has_numbers:
            copied = copy_with_same_parameters(model)
            _verify(copy_with_same_parameters(model), [CutStage(copied, plan, n, own) for n in range(count)], example)
    return plan, own


def chosen_by(
    model: nn.Module, example: Sequence[Any], count: int, measure: Callable[[Sequence[Candidate]], Sizes]
) -> tuple[list[Candidate], Sizes]:
    """The cuts with the smallest largest stage, if sizes are what `measure` returns for the candidates."""
    with _undisturbed(), torch.enable_grad():
        recording = Recording(copy_with_same_parameters(model), example)
        sizes = measure(recording.candidates())
        return _chosen(recording, model, count, sizes), sizes


def run(stages: Sequence[CutStage], fields: Sequence[Any]) -> Any:
    """Run all stages, one after the other; what the model returns."""
    received: Any = ()
    for stage in stages:
        received = stage(fields, received)
    return received


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore the random numbers."""
    state, own = torch.default_generator.get_state(), random.getstate()
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        random.setstate(own)


# -- where ---------------------------------------------------------------------------------------------


def _named(recording: Recording, names: Sequence[str], count: int) -> list[Candidate]:
    refuse_unless(len(names) == count - 1, "the number of names in cut", len(names), f"{count - 1} for {count} stages")
    chosen = sorted(map(recording.at, names))
    refuse_unless(len({one.time for one in chosen}) == len(names), "cut", list(names), "different modules")
    return chosen


def _chosen(recording: Recording, model: nn.Module, count: int, size: Sizes) -> list[Candidate]:
    """The cuts with the smallest largest stage; only activations travel, unless that makes it much larger."""
    every = _outermost(recording.candidates())
    trained = [recording.uses[name].read for name, p in model.named_parameters() if p.requires_grad]
    largest, chosen = _balanced(every, size, trained, count)
    if largest == inf:
        most = next((n for n in range(count - 1, 1, -1) if _balanced(every, size, trained, n)[0] < inf), 1)
        refuse_unless(False, "the number of stages", count, f"<= {most}, into which the model can be cut")
    bare, only = _balanced([one for one in every if not one.others], size, trained, count)
    return only if bare <= WORTH_CARRYING * largest else chosen


def _outermost(candidates: list[Candidate]) -> list[Candidate]:
    """Of modules that begin with the call of another candidate, only the outer one."""
    begins = {(one.time + 1, (*one.inside, one.name)) for one in candidates}
    return [one for one in candidates if (one.time, one.inside) not in begins]


def _balanced(
    candidates: list[Candidate], sizes: Sizes, trained: Sequence[set[int]], count: int
) -> tuple[float, list[Candidate]]:
    """The size of the largest stage and the cuts; infinity if there are too few candidates."""
    times = [one.time for one in candidates]
    between = [0.0] * (len(times) + 1)
    for time, size in sizes:
        between[bisect_right(times, time)] += size
    used = {bisect_right(times, time) for read in trained for time in read}
    largest, cuts = balanced_cuts(tuple(between), tuple(n in used for n in range(len(between))), count)
    return largest, [candidates[n - 1] for n in cuts]


def _work(recording: Recording, model: nn.Module) -> Sizes:
    """When a module was complete, and its operations."""
    return [(recording.left.get(name, 0), one.total) for name, one in work_of(model).modules.items()]


def _sizes(recording: Recording, model: nn.Module) -> Sizes:
    """When a parameter was first used, and its size."""
    return [(min(recording.uses[name].read, default=0), p.numel()) for name, p in model.named_parameters()]


# -- what travels --------------------------------------------------------------------------------------


def _plan(recording: Recording, chosen: Sequence[Candidate]) -> CutPlan:
    opened = frozenset({"", *(name for one in chosen for name in one.inside)})
    called = sorted({name for caller in opened for name in recording.callees.get(caller, ())})
    return CutPlan(tuple(one.name for one in chosen), opened, tuple(called), ((),) * len(chosen))


def _complete(plan: CutPlan, model: nn.Module, example: Sequence[Any]) -> CutPlan:
    """Run all stages until none needs a value that does not travel."""
    while True:
        entered: list[Key | None] = []
        written: set[tuple[int, int]] = set()
        received: Any = ()
        try:
            for stage in range(len(plan.cuts) + 1):
                given = [None if x is None else x.clone() for x in received]
                versions = [0 if x is None else x._version for x in given]
                one_pass = CutPass(model, plan, stage, {}, given)
                received = one_pass.run(example)
                entered.append(one_pass.entered)
                changed = (n for n, x in enumerate(given) if x is not None and x._version != versions[n])
                written.update((stage, n) for n in changed)
            return replace(plan, written=frozenset(written))
        except Missing as missing:
            plan = _with(plan, missing, entered)


def _with(plan: CutPlan, missing: Missing, entered: Sequence[Key | None]) -> CutPlan:
    """The value travels from the stage that computes it to the one that needs it, unless it is the activation."""
    key, stage, carried = missing.key, missing.stage, list(plan.carried)
    if key.source.startswith(PARAMETER):
        raise Refused(
            f"stage {stage} needs the numbers of {key} to decide what an earlier stage computes: cut elsewhere"
        )
    for number in range(missing.segment, stage):
        is_activation = number + 1 < stage and entered[number + 1] == key
        if not is_activation:
            carried[number] = (*carried[number], key)
    return replace(plan, carried=tuple(tuple(dict.fromkeys(keys)) for keys in carried))


def _verify(model: nn.Module, stages: Sequence[CutStage], example: Sequence[Any]) -> None:
    """Refuse stages that compute anything else than the model."""
    expected, found = _results(model, lambda: model(*example)), _results(stages[0].whole, lambda: run(stages, example))
    for name, value in expected.items():
        other = found.get(name)
        if other is None or not torch.allclose(value, other, rtol=1e-3, atol=1e-5, equal_nan=True):
            where = ", ".join(stages[0].plan.cuts)
            raise Refused(
                f"cut at {where}, the stages compute another {name} than the model: "
                "a value passes from one stage to another where it cannot be seen, such as in an attribute of a module"
            )


def _results(model: nn.Module, compute: Callable[[], Any]) -> dict[str, Tensor]:
    """The results of a forward pass, the gradients of their squares, and the buffers, by name."""
    torch.default_generator.manual_seed(0)
    outputs = tensors_in(compute())
    found = {f"result {n}": x.detach() for n, x in enumerate(outputs)}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    squares = [x.square().sum() for x in outputs if x.requires_grad]
    if squares:
        gradients = torch.autograd.grad(squares, list(trained.values()), allow_unused=True)
        named = zip(trained, gradients, strict=True)
        found.update({f"gradient of {name}": x.to_dense() for name, x in named if x is not None})
    return {**found, **{name: buffer.detach() for name, buffer in model.named_buffers()}}


# -- what belongs to a stage ---------------------------------------------------------------------------


def _belongings(recording: Recording, model: nn.Module, chosen: Sequence[Candidate]) -> Belongings:
    """A module that is not called belongs to the first stage, a tensor that is not used to the stage of its module."""
    times = [one.time for one in chosen]
    modules = {name: bisect_right(times, recording.left.get(name, 0)) for name, _ in model.named_modules()}
    users = {name: use.segments(times) or {modules[owner(name)]} for name, use in recording.uses.items()}
    return Belongings(modules, {name: frozenset(stages) for name, stages in users.items()})

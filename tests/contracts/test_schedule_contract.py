"""Every pipeline schedule and every version policy (EXAMPLES of manyhands/splits/schedules and .../versions).

Of a schedule without an end, what it does with the first M mini-batches is tested.
"""

import ast
import inspect
import re
from functools import partial

import pytest
import torch
from part_modules import check_module, classes_with, examples, modules, public_members
from torch import nn

from manyhands.core.errors import Refused
from manyhands.core.flat import Flat
from manyhands.core.vector_ops import UNCHARGED
from manyhands.rules import Sgd
from manyhands.splits import schedules, versions
from manyhands.splits.schedules import bubble, finite, in_flight, makespan, picture, staleness, timeline
from manyhands.splits.schedules.timeline import lasting
from manyhands.splits.versions import Copies, Double, Predicted, StageWeights, Versions

MODULES = modules(schedules)
VERSIONS = examples(versions)
TITLE = re.compile(r"(?:K|R) = (\d+) (?:stages|ranks), M = (\d+) micro-batches(?:, (\w+) = (.+))?\n((?: +s\d.*\n?)+)")


def defined(module):
    """The schedules that a module defines: public functions whose first argument is a number and that give rows."""
    own = [one for _, one in inspect.getmembers(module, inspect.isfunction) if one.__module__ == module.__name__]
    rows = [one for one in own if one.__annotations__.get("return") in ("Rows", "EndlessRows")]
    return [
        one for one in rows if "EndlessRows" not in list(one.__annotations__.values())[:-1] and one.__name__[0] != "_"
    ]


def of_two_arguments(schedule):
    """A schedule without an end as one of so many mini-batches."""
    flushes = len(inspect.signature(schedule).parameters) > 1 and "Endless" not in returns(schedule)
    return schedule if flushes else lambda ranks, micro_batches: finite(schedule(ranks), micro_batches)


def returns(schedule):
    return getattr(schedule, "func", schedule).__annotations__["return"]


ENDLESS = {name: schedule for name, schedule in examples(schedules).items() if returns(schedule) == "EndlessRows"}
SCHEDULES = {name: of_two_arguments(schedule) for name, schedule in examples(schedules).items()}

each = pytest.mark.parametrize("name", SCHEDULES)
sizes = pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (1, 5), (2, 1), (2, 4), (3, 5), (4, 4), (5, 9)])


@pytest.mark.parametrize("name", [name for name, module in MODULES.items() if defined(module)])
def test_a_module_with_a_schedule_has_examples_and_is_exported(name):
    module = MODULES[name]
    found = [getattr(example, "func", example) for example in getattr(module, "EXAMPLES", {}).values()]
    for schedule in defined(module):
        assert schedule in found, f"{module.__name__} has no example of {schedule.__name__}"
        assert getattr(schedules, schedule.__name__, None) is schedule and schedule.__name__ in schedules.__all__


@pytest.mark.parametrize("name", [name for name, module in MODULES.items() if defined(module)])
def test_the_picture_in_the_docstring_is_the_schedule(name):
    drawn = TITLE.findall(MODULES[name].__doc__)
    assert drawn, f"{name} has no picture: a line 'K = 4 stages, M = 4 micro-batches', then picture(...) below it"
    schedule = next(iter(MODULES[name].EXAMPLES.values()))
    for stages, micro_batches, knob, value, lines in drawn:
        drawn_one = partial(schedule, **{knob: ast.literal_eval(value)}) if knob else schedule
        expected = picture(of_two_arguments(drawn_one)(int(stages), int(micro_batches)))
        assert inspect.cleandoc(" \n" + lines).splitlines() == expected.splitlines()


def rows_of(name, ranks, micro_batches):
    """The rows of an example; a schedule may take micro-batches in groups."""
    try:
        return SCHEDULES[name](ranks, micro_batches)
    except Refused:
        return SCHEDULES[name](ranks, -(-micro_batches // ranks) * ranks)


@each
@sizes
def test_every_micro_batch_has_one_forward_and_one_backward_pass_on_every_stage(name, ranks, micro_batches):
    rows = rows_of(name, ranks, micro_batches)
    found = [action for row in rows for action in row]
    stages, batches = (1 + max(action[field] for action in found) for field in (2, 1))
    passes = [action for action in found if action.op != "U"]
    assert len(rows) == ranks and len(set(passes)) == len(passes)
    if stages >= ranks:
        assert all(action.stage % ranks == rank for rank, row in enumerate(rows) for action in row)
    for m in range(batches):
        for s in range(stages):
            ops = "".join(sorted(action.op for action in found if action[1:] == (m, s) and action.op in "FBIW"))
            assert ops in ("BF", "FIW")
            row = next(row for row in rows if ("F", m, s) in row)
            places = [row.index((op, m, s)) for op in ("F", "B" if ops == "BF" else "I", "W") if (op, m, s) in row]
            assert places == sorted(places)


def above(end, m, s):
    """When the next stage has computed its error."""
    return [end[one, m, s + 1] for one in "BI" if (one, m, s + 1) in end]


@each
@sizes
@pytest.mark.parametrize("backward", [1, 2])
def test_no_rank_waits_forever_and_no_pass_begins_before_its_inputs(name, ranks, micro_batches, backward):
    rows, seconds = rows_of(name, ranks, micro_batches), lasting(1, backward)
    timed = timeline(rows, seconds)
    assert len(timed) == sum(map(len, rows))  # replicas of a stage share updates
    start = {one.action: one.start for one in timed}
    end = {action: begin + seconds(action) for action, begin in start.items()}
    for op, m, s in start:
        if op == "F" and s:
            assert start[op, m, s] >= end["F", m, s - 1]
        if op in "BI":
            is_predicted = ("L", m, s) in start
            assert start[op, m, s] >= max([end["F", m, s], *([] if is_predicted else above(end, m, s))])
        if op == "L":
            assert start[op, m, s] >= max([end["B", m, s], *above(end, m, s)])
        if op == "W":
            assert start[op, m, s] >= end["I", m, s]
        if op == "T":
            assert start[op, m, s] >= end["U", m, max(action.stage for action in start)]


@each
@sizes
def test_the_bubble_is_the_idle_share_and_no_rank_stores_more_than_all(name, ranks, micro_batches):
    rows = rows_of(name, ranks, micro_batches)
    busy = sum(lasting()(action) for row in rows for action in row) / ranks
    assert 0 <= bubble(rows) < 1
    assert bubble(rows) == pytest.approx(1 - busy / makespan(rows))
    for row in rows:
        begun = sum(action.op == "F" for action in row)
        assert min(1, begun) <= in_flight(row) <= begun
    batches = 1 + max(action.m for row in rows for action in row)
    assert all(0 <= stale < batches for row in rows for stale in staleness(row))


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_row_without_an_end_has_the_same_beginning_however_many_mini_batches_are_taken(name, stages):
    """Draining after M runs what is left of these, in the same order; an update or signal follows its own passes."""
    whole = finite(ENDLESS[name](stages), 23)
    for micro_batches in range(1, 20):
        for row, part in zip(whole, finite(ENDLESS[name](stages), micro_batches), strict=True):
            assert part == [action for action in row if action.m < micro_batches]
            done = set()
            for action in part:
                done.add(action)
                if action.op == "U":  # of a replica without the first mini-batch of a round, another has it
                    backward = action._replace(op="B")
                    assert backward in (done if backward in part else {one for other in whole for one in other})


@pytest.mark.parametrize("name", ENDLESS)
def test_every_mini_batch_is_in_one_update(name):
    rows = finite(ENDLESS[name](3), 40)
    for stage in {row[0].stage for row in rows}:
        updated, waiting = [], []
        for row in (row for row in rows if row[0].stage == stage):
            waiting = []
            for action in row:
                waiting += [action.m] if action.op == "B" else []
                if action.op == "U":
                    updated, waiting = updated + waiting, []
            assert len(waiting) < 2
        assert sorted(updated + waiting) == list(range(40))


def test_replicas_have_the_same_updates():
    for micro_batches in range(1, 12):
        for replicas in ((2, 1), (1, 2), (3, 2)):
            rows = finite(schedules.round_robin(sum(replicas), replicas), micro_batches)
            by_stage = {}
            for row in rows:
                by_stage.setdefault(row[0].stage, []).append([action.m for action in row if action.op == "U"])
            for stage, updates in by_stage.items():
                assert updates == [list(range(0, micro_batches, replicas[stage]))] * replicas[stage]


# -- which weights the passes use -----------------------------------------------------------------------

VERSION_MODULES = modules(versions)


@pytest.mark.parametrize(
    "name", [name for name, module in VERSION_MODULES.items() if name not in ("policy", "derived")]
)
def test_a_module_with_a_version_policy_has_examples_and_is_exported(name):
    module = VERSION_MODULES[name]
    kinds = [one for one in classes_with(module, "forward", "done") if issubclass(one, Versions)]
    made = {key: make(stage_weights()) for key, make in getattr(module, "EXAMPLES", {}).items()}
    check_module(versions, type("Module", (), {"EXAMPLES": made, "__name__": name}), kinds)
    assert kinds


def stage_weights(index=0, stages=1, every=1):
    """A stage with one weight, which counts updates: its gradients are -1."""
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(layer.weight)
    flat = Flat(dict(layer.named_parameters()))
    return StageWeights(flat, [layer.weight], Sgd(1.0), UNCHARGED, index, stages, every)


@pytest.mark.parametrize("policy", VERSIONS)
def test_every_policy_has_no_public_member_that_is_never_called(policy):
    own = {"copied", "keep_from", "ahead", "count"}
    assert public_members(type(VERSIONS[policy](stage_weights()))) <= public_members(Versions) | own


def schedules_for(policy, version):
    """Copies need the order of their rounds; two versions are enough for updates of several mini-batches."""
    if isinstance(version, Copies):
        return ["rounds", "rounds of two"]
    return ["alternating, an update of two"] if isinstance(version, Double) else ["alternating", "figure5", "decoupled"]


CASES = [
    (policy, name, stages)
    for policy, make in VERSIONS.items()
    for name in schedules_for(policy, make(stage_weights()))
    for stages in (1, 3)
]


@pytest.mark.parametrize(("policy", "name", "stages"), CASES)
def test_the_weights_of_a_pass_are_as_old_as_the_policy_says(policy, name, stages):
    """Weights count updates: what a pass sees is the number of updates, and the lag is what it is behind."""
    every = 2 if "two" in name and "rounds" not in name else 1
    chosen = {}
    for index, row in enumerate(finite(ENDLESS[name](stages), 24)):
        version, leaf, given, updates = VERSIONS[policy](stage_weights(index, stages, every)), {}, {}, {}
        for op, m, _ in row:
            copy = m % version.count if isinstance(version, Copies) else 0
            if op == "F":
                (leaf[m],), travels = version.forward(m, None if index == 0 else chosen.get(m))
                chosen[m] = travels
                given[m] = leaf[m].item()
            elif op == "B":
                version.backward(m)
                seen, now = leaf[m].item(), updates.get(copy, 0)
                if version.rewrites:
                    assert seen == now + (
                        version.ahead("B", index, stages) if isinstance(version, Predicted) and now else 0
                    )
                elif not isinstance(version, Copies):
                    assert seen == given[m]
            elif op == "U":
                first = m - every + 1
                behind = [version.done(one) for one in range(first, m + 1)]
                if not isinstance(version, Predicted | Copies):
                    assert behind == [updates.get(copy, 0) - given[one] for one in range(first, m + 1)]
                if isinstance(version, Copies):
                    assert behind == [0] and leaf[m].item() == given[m]
                for weight_slice in version.moves(m):
                    weight_slice.weights += 1
                version.updated(m)
                updates[copy] = updates.get(copy, 0) + 1
            elif op == "A":
                version.settle()
            assert version.kept >= 1

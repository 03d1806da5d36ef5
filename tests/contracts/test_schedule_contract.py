"""Every pipeline schedule and every version policy (EXAMPLES of manyhands/splits/schedules and .../versions)."""

import inspect
import re

import pytest
import torch
from part_modules import check_module, classes_with, examples, members_of, modules, public_members

from manyhands.core.errors import Refused
from manyhands.core.vector_ops import UNCHARGED
from manyhands.splits import schedules, versions
from manyhands.splits.schedules import bubble, in_flight, makespan, picture, staleness, timeline
from manyhands.splits.schedules.timeline import seconds_of
from manyhands.splits.versions.latest import Latest

MODULES = modules(schedules)
SCHEDULES = examples(schedules)
VERSIONS = examples(versions)
TITLE = re.compile(r"K = (\d+) stages, M = (\d+) micro-batches\n((?: +s\d.*\n)+)")

each = pytest.mark.parametrize("name", SCHEDULES)
sizes = pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (1, 5), (2, 1), (2, 4), (3, 5), (4, 4), (5, 9)])


def defined(module):
    """The schedules that a module defines: public functions whose result is Rows."""
    own = [one for _, one in inspect.getmembers(module, inspect.isfunction) if one.__module__ == module.__name__]
    return [one for one in own if one.__annotations__.get("return") == "Rows" and not one.__name__.startswith("_")]


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
    for stages, micro_batches, lines in drawn:
        expected = picture(schedule(int(stages), int(micro_batches)))
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
    assert len(rows) == ranks and len(set(found)) == len(found)
    assert all(action.stage % ranks == rank for rank, row in enumerate(rows) for action in row)
    for m in range(batches):
        for s in range(stages):
            ops = "".join(sorted(action.op for action in found if action[1:] == (m, s)))
            assert ops in ("BF", "FIW")
            row = rows[s % ranks]
            places = [row.index((op, m, s)) for op in ("F", "B" if ops == "BF" else "I", "W") if (op, m, s) in row]
            assert places == sorted(places)


@each
@sizes
@pytest.mark.parametrize("backward", [1, 2])
def test_no_rank_waits_forever_and_no_pass_begins_before_its_inputs(name, ranks, micro_batches, backward):
    rows, seconds = rows_of(name, ranks, micro_batches), seconds_of(1, backward)
    timed = timeline(rows, seconds)
    assert len(timed) == sum(map(len, rows))
    start = {one.action: one.start for one in timed}
    end = {action: begin + seconds[action.op] for action, begin in start.items()}
    for op, m, s in start:
        if op == "F" and s:
            assert start[op, m, s] >= end["F", m, s - 1]
        if op in "BI":
            above = [end[one, m, s + 1] for one in "BI" if (one, m, s + 1) in end]
            assert start[op, m, s] >= max([end["F", m, s], *above])
        if op == "W":
            assert start[op, m, s] >= end["I", m, s]


@each
@sizes
def test_the_bubble_is_the_idle_share_and_no_rank_stores_more_than_all(name, ranks, micro_batches):
    rows = rows_of(name, ranks, micro_batches)
    busy = sum(seconds_of()[action.op] for action in rows[0])
    assert 0 <= bubble(rows) < 1
    assert bubble(rows) == pytest.approx(1 - busy / makespan(rows))
    assert all(1 <= in_flight(row) <= sum(action.op == "F" for action in row) for row in rows)
    batches = 1 + max(action.m for action in rows[0])
    assert all(0 <= stale < batches for row in rows for stale in staleness(row))


# -- which weights a backward pass uses -----------------------------------------------------------------

VERSION_MODULES = modules(versions)


@pytest.mark.parametrize("name", VERSION_MODULES)
def test_a_module_with_a_version_policy_has_examples_and_is_exported(name):
    kinds = classes_with(VERSION_MODULES[name], "forward", "done")
    made = {key: make() for key, make in getattr(VERSION_MODULES[name], "EXAMPLES", {}).items()}
    check_module(versions, type("Module", (), {"EXAMPLES": made, "__name__": name}), kinds)
    assert kinds


@pytest.mark.parametrize("policy", VERSIONS)
def test_every_policy_has_the_members_of_the_simplest_one(policy):
    assert members_of(Latest) <= public_members(type(VERSIONS[policy]()))


@pytest.mark.parametrize("policy", VERSIONS)
@pytest.mark.parametrize("name", [name for name in SCHEDULES if "B" in {a.op for a in SCHEDULES[name](1, 1)[0]}])
@pytest.mark.parametrize("stages", [1, 3])
def test_the_weights_of_a_backward_pass_are_as_old_as_the_policy_says(policy, name, stages):
    """Live weights count updates: the number is how many updates the weights of B(m) were behind."""
    for row in SCHEDULES[name](stages, 6):
        version, live, given = VERSIONS[policy](), [torch.zeros(1, requires_grad=True)], {}
        for op, *m in row:
            m = tuple(m)
            if op == "F":
                given[m] = version.forward(m, live, UNCHARGED)
            else:
                behind = live[0].item() - given[m][0].item()
                assert version.done(m) == behind
                with torch.no_grad():
                    live[0] += 1
                version.updated()

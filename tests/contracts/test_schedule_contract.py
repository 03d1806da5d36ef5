"""Every pipeline schedule and every version policy (EXAMPLES of manyhands/splits/schedules and .../versions)."""

import inspect
import re

import pytest
import torch
from part_modules import check_module, classes_with, examples, members_of, modules, public_members

from manyhands.core.vector_ops import UNCHARGED
from manyhands.splits import schedules, versions
from manyhands.splits.schedules import bubble, in_flight, makespan, picture, staleness, timeline
from manyhands.splits.versions.latest import Latest

MODULES = modules(schedules)
SCHEDULES = examples(schedules)
VERSIONS = examples(versions)
TITLE = re.compile(r"K = (\d+) stages, M = (\d+) micro-batches\n((?: +s\d.*\n)+)")

each = pytest.mark.parametrize("name", SCHEDULES)
sizes = pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 5), (2, 1), (2, 4), (3, 5), (4, 4), (5, 9)])


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


@each
@sizes
def test_every_micro_batch_has_one_forward_and_one_backward_pass_on_every_stage(name, stages, micro_batches):
    rows = SCHEDULES[name](stages, micro_batches)
    assert len(rows) == stages
    for row in rows:
        assert sorted(row) == sorted((op, m) for op in "FB" for m in range(micro_batches))
        assert all(row.index(("F", m)) < row.index(("B", m)) for m in range(micro_batches))


@each
@sizes
@pytest.mark.parametrize("backward", [1, 2])
def test_no_stage_waits_forever_and_no_action_begins_before_its_inputs(name, stages, micro_batches, backward):
    timed = timeline(SCHEDULES[name](stages, micro_batches), 1, backward)
    assert len(timed) == 2 * stages * micro_batches
    start = {(one.op, one.stage, one.m): one.start for one in timed}
    for op, s, m in start:
        if op == "F" and s:
            assert start["F", s, m] >= start["F", s - 1, m] + 1
        if op == "B":
            assert start["B", s, m] >= start["F", s, m] + 1
            assert s == stages - 1 or start["B", s, m] >= start["B", s + 1, m] + backward


@each
@sizes
def test_the_bubble_is_the_idle_share_and_no_stage_stores_more_than_all(name, stages, micro_batches):
    rows = SCHEDULES[name](stages, micro_batches)
    assert 0 <= bubble(rows) < 1
    assert bubble(rows) == pytest.approx(1 - 2 * micro_batches / makespan(rows))
    assert all(1 <= in_flight(row) <= micro_batches for row in rows)
    assert all(0 <= stale < micro_batches for row in rows for stale in staleness(row))


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
@each
@pytest.mark.parametrize("stages", [1, 3])
def test_the_weights_of_a_backward_pass_are_as_old_as_the_policy_says(policy, name, stages):
    """Live weights count updates: the number is how many updates the weights of B(m) were behind."""
    for row in SCHEDULES[name](stages, 6):
        version, live, given = VERSIONS[policy](), [torch.zeros(1, requires_grad=True)], {}
        for op, m in row:
            if op == "F":
                given[m] = version.forward(m, live, UNCHARGED)
            else:
                behind = live[0].item() - given[m][0].item()
                assert version.done(m) == behind
                with torch.no_grad():
                    live[0] += 1
                version.updated()

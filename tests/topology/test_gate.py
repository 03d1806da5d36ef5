"""A gate lets nobody through before all are there, whether they look or sleep, and tells nobody what it knows."""

import os
import time
from functools import partial

import pytest
import torch

from manyhands.runtime.launch import launch
from manyhands.topology.collectives import gate as gates
from manyhands.topology.collectives.gate import CELLS, Gate, gate, kernels
from manyhands.virtual.world import on_ranks

PLACES = 3
pytestmark = pytest.mark.skipif(kernels() is None, reason="the kernels are not compiled here")


class Cells:
    """The memory of a gate with three places."""

    def __init__(self):
        self.memory = torch.zeros(CELLS * PLACES, dtype=torch.int64)
        self.kernels = kernels()

    def arrive(self, me, number):
        sleepers = torch.zeros(PLACES, dtype=torch.int64)
        told = self.kernels[0](self.memory.data_ptr(), me, PLACES, number, sleepers.data_ptr())
        return sleepers[:told].tolist()

    def find(self, me, other, number, patience=0):
        return self.kernels[1](self.memory.data_ptr(), me, other, PLACES, number, patience)


def test_who_is_there_is_found_at_once():
    cells = Cells()
    assert cells.arrive(0, 1) == []
    assert cells.find(1, 0, 1, patience=10**12)
    assert not cells.find(1, 0, 2), "that was the meeting before"
    assert cells.arrive(0, 2) == [1]
    assert cells.find(2, 0, 1), "who is ahead has been there"


def test_who_sleeps_is_told_once_and_by_whom_it_sleeps_for():
    cells = Cells()
    assert not cells.find(1, 0, 1)
    assert not cells.find(2, 1, 1)
    assert cells.arrive(2, 1) == []
    assert cells.arrive(0, 1) == [1]
    assert cells.arrive(0, 1) == []
    assert cells.arrive(1, 1) == [2]


def test_looking_ends_after_a_while():
    cells, began = Cells(), time.monotonic()
    assert not cells.find(0, 1, 1, patience=20_000_000)
    assert time.monotonic() - began >= 0.02


def pass_often(patience, meetings, t):
    """Every rank notes where it is; whoever is through must see all others there, and none further than one ahead."""
    gates.PATIENCE, os.sched_getaffinity = patience, lambda _: range(t.size)
    meet, seen = gate(t, range(t.size), "often"), t.shared("seen", t.size, torch.int64)
    for number in range(1, meetings + 1):
        if number % 7 == t.rank:
            time.sleep(1e-4)
        seen[t.rank] = number
        meet()
        assert all(number <= one <= number + 1 for one in seen.tolist())
    return isinstance(meet.__self__, Gate), t.waited() > 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("patience", [0, 1000, 300_000], ids=["sleep", "both", "look"])
def test_nobody_passes_before_all_are_there(patience):
    program = partial(pass_often, patience, 1000)
    assert launch(program, workers=2, context="forkserver").results == [(True, True)] * 2


def pass_with_cores(t):
    """Rank 0 sees two cores, the others one."""
    os.sched_getaffinity = lambda _: range(2 - min(t.rank, 1))
    meet = gate(t, range(t.size), "cores")
    for _ in range(50):
        meet()
    return meet.__self__._patience > 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [2, 3])
def test_who_has_too_few_cores_does_not_look_and_meets_the_others_all_the_same(workers):
    looks = launch(pass_with_cores, workers=workers, context="forkserver").results
    assert looks == [workers == 2, *[False] * (workers - 1)]


def test_in_virtual_time_all_are_told_by_messages():
    def program(t):
        meet = gate(t, range(3), "virtual")
        t.spend(float(t.rank))
        meet()
        return isinstance(meet.__self__, Gate), t.now() >= 2.0

    assert on_ranks(3, program).results == [(False, True)] * 3

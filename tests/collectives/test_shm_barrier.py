"""No rank passes a barrier before all have reached it, whether they poll or sleep; only sleeping ranks are woken."""

import os
import time
from functools import partial

import pytest
import torch

from manyhands.collectives import shm_barrier as module
from manyhands.collectives.group import RankGroup
from manyhands.collectives.shm_barrier import CELLS, SharedMemoryBarrier, kernels, shm_barrier
from manyhands.runtime.launch.launch import launch
from manyhands.virtual.world import on_ranks

RANKS = 3
pytestmark = pytest.mark.skipif(kernels() is None, reason="the kernels are not compiled here")


def barrier_of(t, name):
    """The barrier of all ranks, by messages where memory will not do."""
    return shm_barrier(t, range(t.size), name, RankGroup(t, range(t.size), name).barrier)


class Cells:
    """The memory of a barrier of three ranks."""

    def __init__(self):
        self.memory = torch.zeros(CELLS * RANKS, dtype=torch.int64)
        self.kernels = kernels()

    def arrive(self, me, number):
        sleepers = torch.zeros(RANKS, dtype=torch.int64)
        asleep = self.kernels[0](self.memory.data_ptr(), me, RANKS, number, sleepers.data_ptr())
        return sleepers[:asleep].tolist()

    def find(self, me, other, number, patience=0):
        return self.kernels[1](self.memory.data_ptr(), me, other, RANKS, number, patience)


def test_a_rank_that_has_arrived_is_found_at_once():
    cells = Cells()
    assert cells.arrive(0, 1) == []
    assert cells.find(1, 0, 1, patience=10**12)
    assert not cells.find(1, 0, 2), "that was the barrier before"
    assert cells.arrive(0, 2) == [1]
    assert cells.find(2, 0, 1), "a rank that is ahead has been there"


def test_a_sleeping_rank_is_woken_once_by_the_rank_it_waits_for():
    cells = Cells()
    assert not cells.find(1, 0, 1)
    assert not cells.find(2, 1, 1)
    assert cells.arrive(2, 1) == []
    assert cells.arrive(0, 1) == [1]
    assert cells.arrive(0, 1) == []
    assert cells.arrive(1, 1) == [2]


def test_polling_ends_after_its_time():
    cells, began = Cells(), time.monotonic()
    assert not cells.find(0, 1, 1, patience=20_000_000)
    assert time.monotonic() - began >= 0.02


def pass_often(patience, calls, t):
    """Every rank records its call; behind a barrier it sees all others there, and none further than one ahead."""
    module.PATIENCE, os.sched_getaffinity = patience, lambda _: range(t.size)
    barrier, seen = barrier_of(t, "often"), t.shared("seen", t.size, torch.int64)
    for number in range(1, calls + 1):
        if number % 7 == t.rank:
            time.sleep(1e-4)
        seen[t.rank] = number
        barrier()
        assert all(number <= one <= number + 1 for one in seen.tolist())
    return isinstance(barrier.__self__, SharedMemoryBarrier), t.waited() > 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("patience", [0, 1000, 300_000], ids=["sleep", "both", "poll"])
def test_no_rank_passes_before_all_have_arrived(patience):
    program = partial(pass_often, patience, 1000)
    assert launch(program, workers=2, context="forkserver").results == [(True, True)] * 2


def pass_with_cores(t):
    """Rank 0 sees two cores, the others one."""
    os.sched_getaffinity = lambda _: range(2 - min(t.rank, 1))
    barrier = barrier_of(t, "cores")
    for _ in range(50):
        barrier()
    return barrier.__self__._patience > 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [2, 3])
def test_a_rank_with_too_few_cores_does_not_poll_and_the_barrier_is_the_same(workers):
    polls = launch(pass_with_cores, workers=workers, context="forkserver").results
    assert polls == [workers == 2, *[False] * (workers - 1)]


def test_in_virtual_time_the_barrier_is_by_messages():
    def program(t):
        barrier = barrier_of(t, "virtual")
        t.charge_compute(float(t.rank))
        barrier()
        return isinstance(barrier.__self__, SharedMemoryBarrier), t.now() >= 2.0

    assert on_ranks(3, program).results == [(False, True)] * 3

"""Workers that quiesce and join again: clocks begin equal, and no gradient is counted twice."""

from manyhands.consistency import Bulk, Stale
from manyhands.servers.clock_table import ClockTable


def clocks(*clocks):
    found = ClockTable(len(clocks), 0)
    for i, clock in enumerate(clocks):
        for _ in range(clock):
            found.tick(i)
    return found


def test_clocks_begin_equal_again_once_all_have_quiesced():
    found = clocks(3, 1, 2)
    for i in range(3):
        found.leave(i)
    assert found.alive == 0
    for i in (2, 0, 1):
        found.join(i)
    assert found.alive == 3 and found.slowest == 0 and list(found.clock) == [0, 0, 0]
    assert [found.tick(i) for i in range(3)] == [False, False, True], "the last one moves the slowest clock"


def test_a_worker_that_joins_others_at_work_begins_at_the_slowest_clock():
    found = clocks(3, 1, 2)
    found.leave(0)
    found.join(0)
    assert list(found.clock) == [1, 1, 2] and found.slowest == 1 and found.alive == 3
    assert [found.tick(0), found.tick(1)] == [False, True] and found.slowest == 2


def test_a_worker_that_never_left_cannot_join():
    found = clocks(3, 1)
    found.join(0)
    assert list(found.clock) == [3, 1] and found.alive == 2


def test_a_gradient_left_behind_is_expected_once_also_when_its_worker_is_back():
    found = clocks(0, 0)
    found.add_pending(0)
    found.leave(0)
    assert found.expected == 2
    found.join(0)
    assert found.expected == 2
    found.add_pending(1)
    assert Bulk().ready(found.pending, found.expected) and Stale(0).ready(found.pending, found.expected)

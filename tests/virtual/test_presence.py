"""Presence: the sorted present ranks, as ranks join and leave."""

from manyhands.virtual.presence import Presence

ROLES = ["worker"] * 5 + ["server"] * 2


def test_others_are_in_order_and_without_the_rank_itself():
    present = Presence(ROLES, pending_ranks=[4])
    assert present.others(None, 2) == [0, 1, 3, 5, 6]
    assert present.others("worker", 2) == [0, 1, 3]
    assert present.others("worker", 5) == [0, 1, 2, 3]
    assert present.others("server", 6) == [5]
    assert present.others("cook", 0) == []


def test_ranks_that_join_and_leave():
    present = Presence(ROLES, pending_ranks=[4])
    present.join(4)
    present.leave(0)
    present.leave(0)
    present.leave(5)
    assert present.others(None, 1) == [2, 3, 4, 6]
    assert present.others("worker", 0) == [1, 2, 3, 4]
    assert present.others("server", 5) == [6]


def test_a_list_is_ones_own():
    present = Presence(ROLES, pending_ranks=())
    present.others("worker", 6).clear()
    assert present.others("worker", 6) == [0, 1, 2, 3, 4]

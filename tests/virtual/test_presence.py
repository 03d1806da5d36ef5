"""Presence: who is there, in order, whoever comes and goes."""

from manyhands.virtual.presence import Presence

ROLES = ["worker"] * 5 + ["server"] * 2


def test_others_are_in_order_and_without_whoever_asks():
    here = Presence(ROLES, late=[4])
    assert here.others(None, 2) == [0, 1, 3, 5, 6]
    assert here.others("worker", 2) == [0, 1, 3]
    assert here.others("worker", 5) == [0, 1, 2, 3]
    assert here.others("server", 6) == [5]
    assert here.others("cook", 0) == []


def test_who_comes_and_goes():
    here = Presence(ROLES, late=[4])
    here.come(4)
    here.go(0)
    here.go(0)
    here.go(5)
    assert here.others(None, 1) == [2, 3, 4, 6]
    assert here.others("worker", 0) == [1, 2, 3, 4]
    assert here.others("server", 5) == [6]


def test_a_list_is_ones_own():
    here = Presence(ROLES, late=())
    here.others("worker", 6).clear()
    assert here.others("worker", 6) == [0, 1, 2, 3, 4]

"""The roll of a job, without any process: what it wants said when something happens."""

from manyhands.runtime.roll import Roll

FIRST, SECOND = {"kind": "error", "text": "first"}, {"kind": "error", "text": "second"}


def test_the_first_failure_is_the_cause_for_all_also_for_those_who_come_later():
    said = []
    roll = Roll(3, lambda to, kind, fields: said.append((list(to), kind, fields)))
    for rank in (0, 1):
        roll.heard(rank, "hello", {"address": ""})
    roll.heard(0, "failed", {"error": FIRST})
    roll.heard(1, "failed", {"error": SECOND})
    roll.heard(2, "hello", {"address": ""})
    assert said == [([1, 2], "abort", {"error": FIRST}), ([2], "abort", {"error": FIRST})]


def test_deaths_that_follow_from_the_end_are_no_losses():
    said = []
    roll = Roll(2, lambda to, kind, fields: said.append(kind))
    roll.abort(FIRST)
    roll.gone(0, "it was killed by SIGKILL", -9)
    assert said == ["abort"]

"""The membership of a job, without any process: the messages it sends when something happens."""

from manyhands.runtime.membership.membership import Membership

FIRST, SECOND = {"kind": "error", "text": "first"}, {"kind": "error", "text": "second"}


def test_the_first_failure_is_the_cause_for_all_also_for_ranks_that_join_later():
    sent = []
    membership = Membership(3, lambda to, kind, fields: sent.append((list(to), kind, fields)))
    for rank in (0, 1):
        membership.on_message(rank, "hello", {"address": ""})
    membership.on_message(0, "failed", {"error": FIRST})
    membership.on_message(1, "failed", {"error": SECOND})
    membership.on_message(2, "hello", {"address": ""})
    assert sent == [([1, 2], "abort", {"error": FIRST}), ([2], "abort", {"error": FIRST})]


def test_deaths_that_follow_from_the_end_are_no_losses():
    sent = []
    membership = Membership(2, lambda to, kind, fields: sent.append(kind))
    membership.abort(FIRST)
    membership.on_exit(0, "it was killed by SIGKILL", -9)
    assert sent == ["abort"]

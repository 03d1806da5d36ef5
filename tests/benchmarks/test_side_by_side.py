"""Sides take fair turns, ratios are taken within a round, and no process outlives a benchmark."""

import os

import _ranks
import pytest
import sides
from _ranks import Pair, Side, free_ports
from _side_by_side import WARM_UP, measure, order, slowness, speed, take_turns

from manyhands.core.errors import ManyhandsError


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def started(monkeypatch):
    """Every process that a test starts; none is left when it ends."""
    pids = []
    real = _ranks.subprocess.Popen

    def remembered(*args, **kwargs):
        process = real(*args, **kwargs)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(_ranks.subprocess, "Popen", remembered)
    yield pids
    assert pids and not any(map(alive, pids))


def test_every_worker_goes_first_and_follows_every_neighbour():
    picture = ["abc", "bca", "cab", "cba", "acb", "bac", "abc"]
    assert ["".join(order(list("abc"), turn)) for turn in range(7)] == picture


def test_turns_are_taken_in_that_order_and_seconds_are_per_step(capsys):
    log = []

    def side(name, seconds):
        return lambda steps: log.append((name, steps)) or seconds

    seconds = take_turns({"a": side("a", 8.0), "b": side("b", 2.0)}, steps=4, rounds=3)
    assert seconds == {"a": [2.0] * 3, "b": [0.5] * 3}
    assert log == [(name, 4) for name in "abbaba"]
    told = capsys.readouterr()
    assert told.out == "" and "3 of 3  a 2000.000 ms  b 500.000 ms" in told.err


def test_the_median_is_of_ratios_within_a_round(capsys):
    ours, peer = [1.0, 2.0, 30.0, 4.0, 5.0], [1.0, 1.0, 10.0, 1.0, 1.0]  # ratios 1, 2, 3, 4, 5; medians 4 and 1
    result = slowness("n", ours, peer, "<= 2")
    expected = {"value": 3.0, "quartiles": [2.0, 4.0], "ours_ms": 4000.0, "peer_ms": 1000.0, "goal": "<= 2"}
    assert result == {"name": "n", **expected}
    told = capsys.readouterr()
    assert told.out == "" and "quartiles 2.0 to 4.0" in told.err


def test_speed_is_the_other_way_round_and_a_goal_is_optional():
    result = speed("n", [1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    assert result["value"] == 2.0 and result["ours_ms"] == 1000.0 and result["peer_ms"] == 2000.0
    assert "goal" not in result


def test_a_side_takes_as_long_as_its_slower_rank(started):
    seconds = measure("m", [Side("x", sides.told), Side("y", sides.told)], steps=2, rounds=3)
    assert seconds == {"x": [10.5] * 3, "y": [10.5] * 3}
    assert len(started) == 4


def test_every_rank_has_one_thread_and_knows_who_it_is(started, tmp_path):
    measure("m", [Side("x", sides.surroundings, (str(tmp_path),))], steps=2, rounds=3)
    zero, one = ((tmp_path / rank).read_text().split() for rank in "01")
    port, steps = zero[6], 2 * (WARM_UP + 3)
    assert zero == ["1", "0", "2", "0", "1", "lo", port, str(steps)]
    assert one == ["1", "1", "2", "1", "1", "lo", port, str(steps)]


def test_a_failure_is_shown_and_ends_all_sides(started):
    with pytest.raises(ManyhandsError, match=r"(?s)'bad' has failed.*bad, rank 1: exit code 1.*the gradient fell over"):
        measure("m", [Side("good", sides.told), Side("bad", sides.broken)], steps=1, rounds=3)
    assert len(started) == 4


def test_a_rank_that_dies_without_a_word_is_named(started):
    with pytest.raises(ManyhandsError, match="rank 0: exit code -9"), Pair(Side("x", sides.killed), 4321) as pair:
        pair.run(1)


def test_a_hung_side_is_ended(started, monkeypatch):
    monkeypatch.setattr(_ranks, "REPORT_DEADLINE", 0.2)
    with pytest.raises(ManyhandsError, match="'x' has not reported"), Pair(Side("x", sides.silent), 4321) as pair:
        pair.run(1)


def test_a_side_that_ends_badly_is_an_error(started):
    with pytest.raises(ManyhandsError, match=r"(?s)did not end well.*exit code 5.*could not let go"):
        measure("m", [Side("x", sides.ends_badly)], steps=1, rounds=2)


def test_ranks_stop_together(started, tmp_path, monkeypatch):
    monkeypatch.setattr(_ranks, "END_DEADLINE", 60.0)
    measure("m", [Side("x", sides.needs_the_other, (str(tmp_path),))], steps=1, rounds=2)


def test_an_interrupt_ends_all_ranks(started):
    with pytest.raises(KeyboardInterrupt), Pair(Side("x", sides.silent), 4321):
        raise KeyboardInterrupt


def test_ports_are_free_and_different():
    assert len(set(free_ports(5))) == 5

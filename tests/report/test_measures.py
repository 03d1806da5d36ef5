"""Measures of a run that is written down line by line: every number can be worked out by hand."""

import numpy as np
import pytest

from manyhands.core.errors import Refused
from manyhands.report.measures import Measures, Target, parse_target, totals
from manyhands.report.ranking import ranking
from manyhands.report.reading import of_lines
from report.written import end, evaluated, header, paused, step


def two_ranks(bounded=True, servers=0):
    """Rank 0 steps in 1 s, rank 1 in 2 s; both pause once, from 2 s or 4 s to 10 s."""
    return [
        header(workers=2, bounded=bounded, servers=servers),
        step(0, 1, 0.0, 1.0, loss=4.0, bytes=100),
        step(0, 2, 1.0, 2.0, loss=3.0, bytes=200),
        step(1, 1, 0.0, 4.0, loss=2.0, bytes=100, lag=3),
        evaluated(2, 9.0, 0.5),
        paused(0, 2.0, 10.0, 40),
        paused(1, 4.0, 10.5, 10),
        step(0, 3, 10.0, 11.0, loss=1.0, bytes=340),
        step(1, 2, 10.5, 14.5, loss=0.0, bytes=210, lag=1),
        end(0.9, bytes_sent=1090),
    ]


def test_in_lock_step_a_rest_begins_when_the_last_one_rests():
    m = Measures(of_lines(two_ranks()))
    assert m.pauses == [(4.0, 10.0)]
    assert m.clock(np.array([0.0, 3.0, 4.0, 7.0, 10.0, 14.5])).tolist() == [0, 3, 4, 4, 4, 8.5]
    assert m.seconds == 8.5


def test_else_it_begins_when_the_average_of_the_work_rests():
    m = Measures(of_lines(two_ranks(bounded=False)))
    begin = (3 * 2.0 + 2 * 4.0) / 5  # rank 0 has taken three of the five steps
    assert m.pauses == [(begin, 10.0)]
    assert m.seconds == 14.5 - (10.0 - begin)


def test_several_rests_are_each_left_out_once():
    lines = [
        header(workers=1),
        *(step(0, n, n * 1.0, n + 1.0) for n in (0, 2, 4)),
        paused(0, 1.0, 2.0),
        paused(0, 3.0, 4.0),
        end(),
    ]
    assert Measures(of_lines(lines)).clock(np.array([1.0, 2.0, 3.0, 4.0, 5.0])).tolist() == [1, 1, 2, 2, 3]


def test_samples_and_bytes_add_up_over_ranks_without_what_evaluations_sent():
    m = Measures(of_lines(two_ranks()))
    assert m.samples == 5 * 32 and m.bytes == (340 - 40) + (210 - 10)
    assert m.accuracy.seconds.tolist() == [4.0, 8.5]
    assert m.accuracy.samples.tolist() == [3 * 32, 5 * 32]
    assert m.accuracy.bytes.tolist() == [300, 500]
    assert m.accuracy.values.tolist() == [0.5, 0.9]


def test_what_servers_sent_is_spread_over_the_workers_bytes():
    m = Measures(of_lines(two_ranks(servers=1)))
    assert m.bytes == pytest.approx(1090 - 50), "all that was sent, but for the evaluation"
    assert m.accuracy.bytes.tolist() == pytest.approx([300 * 1040 / 500, 1040])


def test_ranks_of_one_replica_consume_the_same_samples():
    lines = [header(workers=2, replicas=1), *(step(rank, 1, 0.0, 1.0) for rank in (0, 1)), end()]
    assert Measures(of_lines(lines)).samples == 32


def test_the_loss_is_averaged_over_a_twentieth_of_the_run():
    lines = [header(), *(step(0, n, n, n + 1, loss=float(n)) for n in range(40)), end()]
    curve = Measures(of_lines(lines)).loss
    assert curve.values[[0, 1, 2, 39]].tolist() == [0, 0.5, 1.5, 38.5]


def test_stages_without_a_loss_do_not_count_in_it():
    lines = [header(workers=2), step(0, 1, 0, 1, loss=None), step(1, 1, 0, 2, loss=3.0), end()]
    curve = Measures(of_lines(lines)).loss
    assert curve.values.tolist() == [3.0] and curve.seconds.tolist() == [2.0]


def test_where_time_went_adds_up_to_the_steps():
    lines = [header(), step(0, 1, 0.0, 10.0, compute=4.0, encode=1.0, wait=2.0, send=0.5), end()]
    m = Measures(of_lines(lines))
    assert m.spent() == {0: {"compute": 4.0, "encode": 1.0, "wait": 2.0, "send": 0.5, "other": 2.5}}
    assert m.waiting() == 0.2


def test_a_straggler_is_measured_by_its_median_over_that_of_the_group():
    rows = [step(rank, n, 0.0, 9.0, compute=seconds) for rank, seconds in enumerate((1.0, 1.0, 4.0)) for n in (1, 2)]
    assert Measures(of_lines([header(workers=3), *rows, end()])).stragglers() == {0: 1.0, 1: 1.0, 2: 4.0}


def test_the_target_is_reached_where_it_was_first_seen():
    run = of_lines(two_ranks())
    m = Measures(run)
    assert m.to_target(Target("accuracy", 0.5)) == {"seconds": 4.0, "samples": 96.0, "bytes": 300.0}
    assert m.to_target(Target("accuracy", 0.6))["seconds"] == 8.5
    assert m.to_target(Target("accuracy", 0.95)) is None
    assert m.to_target(Target("loss", 1.0))["seconds"] == 5.0
    row = totals(run, Target("accuracy", 0.5))
    assert row["seconds_to_target"] == 4.0 and row["max_lag"] == 3 and row["failure"] is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("speed=3", "known are accuracy, loss"),
        ("accuracy", "target is 'accuracy', but must be accuracy=VALUE"),
        ("accuracy=much", "accuracy of the target is 'much', but must be a number"),
        ("accuracy=95", "accuracy of the target is 95, but must be > 0 and <= 1"),
        ("loss=nan", "loss of the target is nan, but must be > 0 and finite"),
    ],
)
def test_a_target_that_means_nothing_is_refused(text, words):
    with pytest.raises(Refused, match=words):
        parse_target(text)


def test_targets_are_read_as_they_are_written():
    assert parse_target(" accuracy = 0.95 ") == Target("accuracy", 0.95) and str(Target("loss", 0.1)) == "loss 0.1"


# -- ranking ----------------------------------------------------------------------------------------


def run_of(method, seed, reached_at, accuracy=0.99, error=None):
    """It takes a step a second, and sees the target after so many."""
    rows = [step(0, n + 1, n, n + 1.0) for n in range(10)]
    looks = [evaluated(n, n + 0.5, 1.0 if reached_at is not None and n >= reached_at else 0.1) for n in range(1, 10)]
    last = (
        end(accuracy)
        if error is None
        else {"kind": "end", "end": True, "error": error, "error_kind": "Diverged", "lost": []}
    )
    return of_lines([header(method=method, seed=seed), *rows, *looks, last])


def test_methods_are_ranked_by_the_median_time_to_target():
    runs = [run_of("slow", seed, at) for seed, at in enumerate((4, 6, 8))]
    runs += [run_of("fast", seed, at) for seed, at in enumerate((2, 9, 3))]
    first, second = ranking(runs, Target("accuracy", 0.95))
    assert (first["method"], first["rank"], first["seconds_to_target"], first["spread"]) == ("fast", 1, 3.5, (2.5, 9.5))
    assert (second["method"], second["seconds_to_target"], second["seeds"]) == ("slow", 6.5, 3)
    assert first["samples_to_target"] == 3 * 32 and first["samples_per_second"] == 32


def test_who_reached_it_seldom_or_never_or_failed_comes_later():
    runs = [
        *(run_of("often", seed, 8) for seed in range(2)),
        run_of("once", 0, 1),
        run_of("once", 1, None, accuracy=0.2),
        run_of("never", 0, None, accuracy=0.5),
        run_of("worse", 0, None, accuracy=0.4),
        run_of("failed", 0, None, error="the loss is nan"),
    ]
    rows = ranking(runs, Target("accuracy", 0.95))
    assert [row["method"] for row in rows] == ["often", "once", "never", "worse", "failed"]
    assert rows[-1]["failure"] == "the loss is nan" and rows[-1]["failed"] == 1


def test_without_a_target_the_best_comes_first():
    runs = [run_of("good", 0, None, 0.9), run_of("better", 0, None, 0.95), run_of("failed", 0, None, error="no")]
    assert [row["method"] for row in ranking(runs)] == ["better", "good", "failed"]

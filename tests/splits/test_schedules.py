"""Schedules: the picture is the test."""

import pytest

from manyhands.splits import schedules

GPIPE = """
s0 F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3
s1 .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .
s2 .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .  .
s3 .  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .  .
"""
ONE_F_ONE_B = """
s0 F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
s1 .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
s2 .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
s3 .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .
"""
BUBBLES = {(4, 4): 0.4286, (4, 8): 0.2727, (2, 4): 0.2, (4, 1): 0.75, (3, 5): 0.2857}


@pytest.mark.parametrize(("schedule", "drawn"), [(schedules.gpipe, GPIPE), (schedules.one_f_one_b, ONE_F_ONE_B)])
def test_the_picture(schedule, drawn):
    assert schedules.picture(schedule(4, 4)) == drawn.strip()


@pytest.mark.parametrize("schedule", [schedules.gpipe, schedules.one_f_one_b])
@pytest.mark.parametrize(("stages", "micro_batches"), BUBBLES)
@pytest.mark.parametrize("backward", [1, 2])
def test_the_bubble(schedule, stages, micro_batches, backward):
    rows = schedule(stages, micro_batches)
    assert schedules.bubble(rows, 1, backward) == pytest.approx(BUBBLES[stages, micro_batches], abs=5e-5)
    assert schedules.bubble(rows, 1, backward) == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert schedules.makespan(rows, 1, backward) == (micro_batches + stages - 1) * (1 + backward)


@pytest.mark.parametrize(("stages", "micro_batches"), BUBBLES)
def test_how_much_is_in_flight(stages, micro_batches):
    assert [schedules.in_flight(row) for row in schedules.gpipe(stages, micro_batches)] == [micro_batches] * stages
    wanted = [min(micro_batches, stages - s) for s in range(stages)]
    assert [schedules.in_flight(row) for row in schedules.one_f_one_b(stages, micro_batches)] == wanted


def test_weights_are_stale_by_the_distance_to_the_end_after_a_ramp():
    for s, row in enumerate(schedules.one_f_one_b(4, 10)):
        assert schedules.staleness(row) == [min(m, 3 - s) for m in range(10)]


@pytest.mark.parametrize("schedule", [schedules.gpipe, schedules.one_f_one_b])
@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 9])
def test_every_micro_batch_goes_once_each_way(schedule, stages, micro_batches):
    for row in schedule(stages, micro_batches):
        assert sorted(row) == sorted([(op, m) for op in "FB" for m in range(micro_batches)])

"""GPipe and 1F1B: bubbles, activations and staleness. Their pictures are tested by the schedule contract."""

import pytest

from manyhands.splits import schedules

BUBBLES = {(4, 4): 0.4286, (4, 8): 0.2727, (2, 4): 0.2, (4, 1): 0.75, (3, 5): 0.2857}


@pytest.mark.parametrize("schedule", [schedules.gpipe, schedules.one_f_one_b])
@pytest.mark.parametrize(("stages", "micro_batches"), BUBBLES)
@pytest.mark.parametrize("backward", [1, 2])
def test_the_bubble(schedule, stages, micro_batches, backward):
    rows = schedule(stages, micro_batches)
    assert schedules.bubble(rows, 1, backward) == pytest.approx(BUBBLES[stages, micro_batches], abs=5e-5)
    assert schedules.bubble(rows, 1, backward) == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert schedules.makespan(rows, 1, backward) == (micro_batches + stages - 1) * (1 + backward)


@pytest.mark.parametrize(("stages", "micro_batches"), BUBBLES)
def test_how_many_micro_batches_are_in_flight(stages, micro_batches):
    assert [schedules.in_flight(row) for row in schedules.gpipe(stages, micro_batches)] == [micro_batches] * stages
    wanted = [min(micro_batches, stages - s) for s in range(stages)]
    assert [schedules.in_flight(row) for row in schedules.one_f_one_b(stages, micro_batches)] == wanted


def test_weights_are_stale_by_the_distance_to_the_end_after_a_ramp():
    for s, row in enumerate(schedules.one_f_one_b(4, 10)):
        assert schedules.staleness(row) == [min(m, 3 - s) for m in range(10)]

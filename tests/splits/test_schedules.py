"""GPipe and 1F1B: bubbles, activations and staleness. Their pictures are tested by the schedule contract."""

import pytest

from manyhands.core.errors import Refused
from manyhands.splits import schedules
from manyhands.splits.schedules.timeline import lasting

BUBBLES = {(4, 4): 0.4286, (4, 8): 0.2727, (2, 4): 0.2, (4, 1): 0.75, (3, 5): 0.2857}


@pytest.mark.parametrize("schedule", [schedules.gpipe, schedules.one_f_one_b])
@pytest.mark.parametrize(("stages", "micro_batches"), BUBBLES)
@pytest.mark.parametrize("backward", [1, 2])
def test_the_bubble(schedule, stages, micro_batches, backward):
    rows = schedule(stages, micro_batches)
    assert schedules.bubble(rows, 1, backward) == pytest.approx(BUBBLES[stages, micro_batches], abs=5e-5)
    assert schedules.bubble(rows, 1, backward) == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert schedules.makespan(rows, 1, backward) == (micro_batches + stages - 1) * (1 + backward)


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "forward", "share", "seconds"),
    [
        (schedules.interleaved, 8, 0.5, 0.1579, 28.5),
        (schedules.interleaved, 16, 0.5, 0.0857, 52.5),
        (schedules.zero_bubble, 8, 1, 0.1111, 27),
        (schedules.zero_bubble, 16, 1, 0.0588, 51),
    ],
)
def test_the_bubble_of_modern_schedules(schedule, micro_batches, forward, share, seconds):
    """Four ranks, tF = tI = tW = 1 for all stages of a rank together."""
    rows = schedule(4, micro_batches)
    assert schedules.bubble(rows, forward, 2 * forward) == pytest.approx(share, abs=5e-5)
    assert schedules.makespan(rows, forward, 2 * forward) == seconds


def test_zero_bubble_stores_as_many_activations_everywhere_as_its_first_stage():
    assert [schedules.in_flight(row) for row in schedules.zero_bubble(4, 8)] == [4, 4, 4, 4]


def test_interleaved_takes_micro_batches_in_groups():
    with pytest.raises(Refused, match="micro_batches is 6, but must be divisible by 4, the ranks of the pipeline"):
        schedules.interleaved(4, 6)


@pytest.mark.parametrize(("stages", "micro_batches"), BUBBLES)
def test_how_many_micro_batches_are_in_flight(stages, micro_batches):
    assert [schedules.in_flight(row) for row in schedules.gpipe(stages, micro_batches)] == [micro_batches] * stages
    wanted = [min(micro_batches, stages - s) for s in range(stages)]
    assert [schedules.in_flight(row) for row in schedules.one_f_one_b(stages, micro_batches)] == wanted


def test_weights_are_stale_by_the_distance_to_the_end_after_a_ramp():
    for s, row in enumerate(schedules.one_f_one_b(4, 10)):
        assert schedules.staleness(row) == [min(m, 3 - s) for m in range(10)]


def test_a_wide_picture_is_continued_below():
    rows = schedules.one_f_one_b(3, 12)
    whole, narrow = schedules.picture(rows), schedules.picture(rows, 40)
    assert max(map(len, narrow.splitlines())) <= 40 < max(map(len, whole.splitlines()))
    blocks = [block.splitlines() for block in narrow.split("\n\n")]
    for rank, line in enumerate(whole.splitlines()):
        assert line.split()[1:] == [cell for block in blocks for cell in block[rank].split()[1:]]


@pytest.mark.parametrize(("name", "seconds"), [("alternating", 3), ("figure5", 3), ("decoupled", 4 + 2)])
def test_a_mini_batch_of_a_full_stream(name, seconds):
    def rows(count):
        return schedules.finite(getattr(schedules, name)(4), count)

    assert schedules.steady_seconds(rows, 4, lasting(backward=2)) == seconds

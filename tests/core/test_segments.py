"""A run is divided into segments at the multiples of a number of steps, at whatever step it begins."""

import pytest

from manyhands.core.budget import FixedSteps, segments


def cuts(start, steps, every):
    lengths = []

    def budget(length):
        lengths.append(length)
        return FixedSteps(length)

    return [segment.stop for segment in segments(start, steps, every, budget)], lengths


@pytest.mark.parametrize(
    ("start", "steps", "every", "stops", "lengths"),
    [
        (0, 10, None, [10], [10]),
        (0, 10, 4, [4, 8, 10], [4, 4, 2]),
        (0, 8, 4, [4, 8], [4, 4]),
        (4, 10, 4, [8, 10], [4, 2]),
        (5, 12, 4, [8, 12], [3, 4]),
        (5, 12, None, [12], [7]),
        (0, 3, 100, [3], [3]),
        (9, 10, 1, [10], [1]),
    ],
)
def test_a_run_is_cut_at_multiples_and_ends_where_it_should(start, steps, every, stops, lengths):
    assert cuts(start, steps, every) == (stops, lengths)

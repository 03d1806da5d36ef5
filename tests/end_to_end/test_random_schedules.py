"""Random schedules with faults: each run ends as its method promises, and every gradient is accounted for.

There are a thousand of them; `make test` runs every seventh fifty, `make soak` all.
Whatever fails says what it was; `verify` with its number does it again.
"""

import pytest

import manyhands as mh
from manyhands import catalog
from repeats import every

from . import laws
from .schedules import METHODS, draw, with_faults
from .witness import Witness

SCHEDULES, GROUP = 1000, 50


@pytest.fixture(scope="module")
def seen():
    """A witness of all runs of this file."""
    with pytest.MonkeyPatch.context() as patch:
        yield Witness(patch)


def verify(seen, number):
    """A schedule without faults, then with them; and of some again, which must give the same."""
    quiet = draw(number)
    schedule = quiet
    try:
        usual = attend(seen, quiet)
        schedule = with_faults(quiet, usual.seconds)
        outcome = attend(seen, schedule)
        if number % 50 == 0:
            assert told(attend(seen, schedule)) == told(outcome)
    except BaseException as error:
        error.add_note(f"in schedule {number}: {schedule}")
        raise
    return schedule, outcome


def attend(seen, schedule):
    """What came of it: a result under the laws of its method, or the loss of somebody who cannot be spared."""
    seen.begin(schedule.aggregators)
    doomed, spared = schedule.doomed, schedule.spared
    try:
        result = schedule.run()
    except mh.PeerLost as loss:
        nobody_left = doomed.keys() >= set(range(schedule.workers))
        assert doomed.get(loss.rank) == loss.why
        assert nobody_left or loss.rank not in spared or took_the_answer_along(schedule, seen, loss)
        return loss
    laws.check(schedule, seen, result)
    return result


def took_the_answer_along(schedule, seen, loss):
    """Whether the one who had read the outcome was lost when all was done: no other rank ended with an error."""
    computed = sum(map(len, seen.gradients.values()))
    return not hasattr(loss, "__notes__") and computed >= schedule.steps * schedule.workers - len(schedule.doomed)


def told(outcome):
    """All that a run says, but how long it really took."""
    if isinstance(outcome, mh.PeerLost):
        return str(outcome)
    lines = [{**one, "made": None} for one in outcome.records if "end" not in one]
    return outcome.weights_sha256, outcome.seconds, outcome.lost, lines


def test_every_method_that_divides_data_has_its_random_knobs():
    """Except for those that send less than they have, whose losses tests/collectives/test_compressed_sums.py counts."""
    divided = {*catalog.pipelines.__all__, *catalog.slices.__all__, "fully_sharded"}
    assert set(METHODS) == {*catalog.__all__} - divided - {*catalog.compressed.__all__}


@pytest.mark.parametrize("first", every(7, range(0, SCHEDULES, GROUP)))
def test_random_schedules_end_as_promised_and_nothing_is_lost_or_counted_twice(first, seen):
    ended = [verify(seen, number) for number in range(first, first + GROUP)]
    assert {schedule.method for schedule, _ in ended} == set(METHODS)
    assert any(isinstance(outcome, mh.PeerLost) for _, outcome in ended)
    assert any(schedule.doomed and not isinstance(outcome, mh.PeerLost) for schedule, outcome in ended)

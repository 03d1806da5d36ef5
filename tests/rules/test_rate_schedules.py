"""Schedules are functions of samples; they fit in each other, into rules, and on the command line."""

import math
import pickle

import pytest

from manyhands.core.errors import Refused
from manyhands.core.part_text import read
from manyhands.rules import Cosine, Sgd, StepDecay, WarmUp


def values(schedule, *samples):
    return [pytest.approx(schedule(n), abs=1e-15) for n in samples]


def test_a_gradual_warm_up_is_a_straight_line():
    assert values(WarmUp(0.4, 100), 0, 25, 50, 99, 100, 1000) == [0, 0.1, 0.2, 0.396, 0.4, 0.4]
    assert values(WarmUp(0.4, 100, low=0.2), 0, 50, 100) == [0.2, 0.3, 0.4]


def test_a_constant_warm_up_stays_low():
    assert values(WarmUp(0.4, 100, low=0.1, gradual=False), 0, 99, 100) == [0.1, 0.1, 0.4]


def test_steps():
    assert values(StepDecay(0.8, 100, 0.5), 0, 99, 100, 199, 200, 350) == [0.8, 0.8, 0.4, 0.4, 0.2, 0.1]


def test_the_cosine_ends_low_and_stays_there():
    assert values(Cosine(0.4, 100), 0, 50, 100, 200) == [0.4, 0.2, 0, 0]
    assert values(Cosine(0.4, 100, low=0.1), 0, 50, 100, 200) == [0.4, 0.25, 0.1, 0.1]
    assert Cosine(1.0, 100)(25) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_they_fit_in_each_other_and_travel():
    schedule = WarmUp(Cosine(0.4, 100), 50)
    assert values(schedule, 0, 25, 50) == [0, 0.5 * Cosine(0.4, 100)(25), 0.2]
    assert pickle.loads(pickle.dumps(Sgd(schedule))) == Sgd(schedule)


def test_the_command_line_can_name_them():
    assert read("sgd(lr=warmup(cosine(0.4, 1e5, low=0.01), 500))", "Rule").build() == Sgd(
        WarmUp(Cosine(0.4, 1e5, low=0.01), 500)
    )
    assert read("adagrad(stepdecay(0.1, every=1000))", "Rule").build().lr == StepDecay(0.1, 1000)
    with pytest.raises(Refused, match=r"'cosine.0.4, 100.' is no rule: there are adagrad, .*"):
        read("cosine(0.4, 100)", "Rule")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WarmUp(0, 100), "lr is 0, but must be > 0"),
        (lambda: WarmUp(0.1, 0), "samples is 0, but must be > 0"),
        (lambda: WarmUp(0.1, 1, low=-1), "low is -1, but must be >= 0 and finite"),
        (lambda: WarmUp(0.1, 1, gradual=False), "low is 0.0, but must be > 0 unless gradual"),
        (lambda: StepDecay(0.1, 0), "every is 0, but must be > 0"),
        (lambda: StepDecay(0.1, 1, 2), "factor is 2, but must be > 0 and <= 1"),
        (lambda: Cosine(-1, 1), "lr is -1, but must be > 0"),
        (lambda: Cosine(0.1, -1), "samples is -1, but must be > 0"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(Refused, match=message):
        make()

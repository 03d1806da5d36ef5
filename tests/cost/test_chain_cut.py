"""Stages of a chain: no other cuts of the same bound on work send fewer bytes."""

import random
from itertools import combinations, pairwise

import pytest

import manyhands as mh
from manyhands.cost.chain_cut import chain_cut


def all_cuts(work, activations, trained, stages):
    """Every choice of cuts: the work of the largest stage, the bytes, the cuts."""
    layers = len(work)
    for cuts in combinations(range(1, layers), stages - 1):
        spans = list(pairwise([0, *cuts, layers]))
        if all(any(trained[start:stop]) for start, stop in spans):
            yield max(sum(work[start:stop]) for start, stop in spans), sum(activations[cut - 1] for cut in cuts), cuts


@pytest.mark.parametrize("case", range(100))
def test_no_other_cuts_of_that_work_send_less(case):
    draw = random.Random(case)
    layers, slack = draw.randint(2, 8), draw.choice([1.0, 1.1, 1.5])
    work, activations = ([draw.randint(1, 20) for _ in range(layers)] for _ in range(2))
    trained = [draw.random() < 0.8 for _ in range(layers)]
    trained[0] = True
    stages = draw.randint(1, sum(trained))
    every = list(all_cuts(work, activations, trained, stages))
    bound = slack * min(largest for largest, *_ in every)
    fewest = min(sent for largest, sent, _ in every if largest <= bound)
    found = chain_cut(work, activations, trained, stages, slack)
    assert found.bytes == fewest and (found.largest, found.bytes, found.cuts) in every and found.largest <= bound


def test_a_small_activation_is_worth_a_little_imbalance():
    work, activations = [10, 9, 10, 11], [7, 5, 1, 0]
    assert chain_cut(work, activations, [True] * 4, 2, slack=1.0) == ((2,), 21, 5)
    assert chain_cut(work, activations, [True] * 4, 2, slack=1.5) == ((3,), 29, 1)


def test_every_stage_has_something_to_train():
    assert chain_cut([5, 0, 5], [1, 0, 0], [True, False, True], 2).cuts == (2,)
    with pytest.raises(mh.Refused, match="the number of stages is 3, but must be 1 to 2, the layers with parameters"):
        chain_cut([5, 0, 5], [1, 0, 0], [True, False, True], 3)


def test_one_stage_sends_nothing():
    assert chain_cut([5, 4], [9, 9], [True, True], 1) == ((), 9, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (([1, 2], [1], [True, True], 1), "the number of activations is 1, but must be 2"),
        (([1, 2], [1, 1], [True], 1), "the number of trained is 1, but must be 2"),
        (([1], [1], [True], 1, 0.9), "slack is 0.9, but must be >= 1"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(mh.Refused, match=message):
        chain_cut(*settings)

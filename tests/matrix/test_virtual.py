"""Every method in a virtual cluster of eight is as good as plain SGD, and a straggler does not make it worse."""

import functools

import pytest

import manyhands as mh
from every_method import (
    BATCH_SIZE,
    EVERY,
    EVERY_METHOD,
    GOOD,
    SAMPLES,
    accepts_joiners,
    repeats,
    replicas,
    workers_up_to,
)
from real.tools import taken_by

POINTS = 0.02
"""How much less accurate than plain SGD a method may be."""


def trained(name, workers=8, stragglers=(), **knobs):
    strategy = EVERY[name]()
    cluster = mh.Cluster(workers=workers_up_to(strategy, workers), stragglers=stragglers)
    return mh.train("digits", strategy, cluster=cluster, **knobs)


usual = functools.lru_cache(1)(trained)
"""Without stragglers, the last one remembered."""


@functools.cache
def plain(samples):
    """The accuracy of one worker with SGD that has seen as many samples, with the same seed."""
    alone = mh.Cluster(workers=1)
    return mh.train("digits", mh.bsp(), cluster=alone, steps=samples // BATCH_SIZE).test_accuracy


@EVERY_METHOD
def test_eight_workers_are_as_good_as_plain_sgd(name):
    result = usual(name)
    goal = plain(result.samples) - POINTS
    assert result.test_accuracy >= goal, f"{result.test_accuracy:.4f} instead of {goal:.4f}"
    step = BATCH_SIZE * replicas(EVERY[name](), result.workers)
    assert 40 - step / SAMPLES < result.samples / SAMPLES <= 40, "one step more would be too many"


@EVERY_METHOD
def test_so_they_are_if_the_first_is_five_times_slower(name):
    slow = trained(name, stragglers=mh.Slow([0], 5))
    assert (slow.lost, slow.samples) == ([], usual(name).samples)
    assert slow.test_accuracy >= plain(slow.samples) - POINTS
    if repeats(EVERY[name]()):
        assert slow.weights_sha256 == usual(name).weights_sha256, "in lock step a straggler costs time and nothing else"


@EVERY_METHOD
def test_four_workers_learn_with_another_seed(name):
    assert trained(name, workers=4, seed=1).test_accuracy >= GOOD


@pytest.mark.parametrize("name", [name for name in EVERY if accepts_joiners(EVERY[name]())])
def test_a_joining_worker_learns_with_the_others(name):
    """The eighth comes after a quarter of the time that seven would take."""
    strategy = EVERY[name]()
    alone = trained(name, workers=7)
    cluster = mh.Cluster(workers=7, hosts=1 if strategy.traits.one_host else None, newcomers=[alone.seconds / 4])
    result = mh.train("digits", strategy, cluster=cluster)
    assert (result.lost, result.samples) == ([], alone.samples)
    assert taken_by(result)[7] > result.steps // 2
    assert result.test_accuracy >= GOOD

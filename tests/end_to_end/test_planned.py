"""Planned replicas: a run whose stages and replicas the partitioner chooses is the run with these given by hand."""

from functools import partial

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.run.methods import strategy_of
from manyhands.tasks import load

from . import small
from .test_own_loop import Joined

SLOW = "pipedream:replicas=planned,bandwidth=1Gbit"
RUNS = {
    "1Gbit": ("6", [1, 2], "pipedream:replicas=1 2,cut=6"),
    "10Gbit": ("2 4", [1, 1, 1], "pipedream:cut=2 4"),
    "inf": ("", [3], "pipedream:replicas=3"),
}
"""By bandwidth the plan for three workers on digits, and the method that has it by hand."""


def plans(result):
    """The plans in a record, by rank."""
    return {line["rank"]: (line["cut"], line["stage_replicas"]) for line in result.records if "stage_replicas" in line}


@pytest.mark.parametrize("bandwidth", RUNS)
def test_a_planned_run_is_the_run_with_the_same_stages_by_hand(bandwidth):
    cut, replicas, by_hand = RUNS[bandwidth]
    run = partial(mh.train, "digits", cluster=mh.Cluster(3), steps=8)
    planned = run(mh.pipedream(replicas="planned", bandwidth=bandwidth))
    assert plans(planned) == {rank: (cut, replicas) for rank in range(3)}
    assert planned.weights_sha256 == run(strategy_of(by_hand)).weights_sha256


def test_the_text_of_a_method_and_the_bandwidth_are_in_force():
    run = partial(mh.train, "digits", cluster=mh.Cluster(3), steps=6)
    slow, usual = (run(strategy_of(text)) for text in (SLOW, "pipedream:replicas=planned"))
    assert [plans(one)[0] for one in (slow, usual)] == [tuple(RUNS[name][:2]) for name in ("1Gbit", "10Gbit")]
    assert slow.weights_sha256 != usual.weights_sha256


def test_one_strategy_is_planned_anew_for_each_run():
    strategy = mh.pipedream(replicas="planned")
    found = [plans(mh.train("digits", strategy, cluster=mh.Cluster(count), steps=2))[0] for count in (3, 2, 1)]
    assert found == [("2 4", [1, 1, 1]), ("4", [1, 1]), ("", [1])]


def test_a_task_of_sizes_only_is_planned():
    strategy = mh.pipedream(replicas="planned", bandwidth="100Mbit")
    cluster = mh.Cluster(4, bandwidth="100Mbit")
    result = mh.train("vgg16", strategy, cluster=cluster, steps=5)
    by_hand = mh.train("vgg16", mh.pipedream(replicas=(3, 1), cut="21"), cluster=cluster, steps=5)
    assert plans(result)[3] == ("21", [3, 1])
    assert result.seconds == by_hand.seconds < mh.train("vgg16", mh.bsp(), cluster=cluster, steps=5).seconds


def test_a_planned_run_is_resumed_with_another_plan(tmp_path):
    run = partial(mh.train, "digits", cluster=mh.Cluster(3), checkpoint_every=4)
    whole = run(strategy_of(SLOW), steps=9, out=tmp_path / "whole")
    run(strategy_of(SLOW), steps=4, out=tmp_path / "part")
    again = run(strategy_of(SLOW), steps=9, resume=tmp_path / "part", out=tmp_path / "again")
    assert again.weights_sha256 == whole.weights_sha256
    other = run(mh.pipedream(replicas="planned"), steps=9, resume=tmp_path / "part", out=tmp_path / "other")
    assert other.steps == 9 and plans(other)[0] == ("2 4", [1, 1, 1])


def test_a_loop_of_ones_own_gives_an_example():
    def program(hands, losses):
        x, y = small.task().data.tensors
        losses.extend(hands.step(x[:8], y[:8]) for _ in range(5))

    strategy = mh.pipedream(replicas="planned", bandwidth="inf")
    joined = Joined(strategy, program, mh.Cluster(2), example=(small.task().data.tensors[0][:1],))
    replicated = Joined(mh.pipedream(replicas=(2,)), program, mh.Cluster(2))
    weights = [list(one.models[0].parameters()) for one in (joined, replicated)]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    with pytest.raises(mh.Refused, match=r"mh.join\(example=\(x,\)\), or the numbers, such as replicas='2,1'"):
        Joined(strategy, program, mh.Cluster(2))


def test_parameters_that_stages_would_share_are_refused():
    def tied():
        first, last = nn.Linear(64, 64), nn.Linear(64, 64)
        last.weight = first.weight
        return nn.Sequential(nn.Flatten(), first, nn.Tanh(), last, nn.Linear(64, 10))

    digits = load("digits")
    task = mh.Task(tied, digits.data, digits.loss)
    with pytest.raises(mh.Refused, match="one parameter of several stages"):
        mh.train(task, mh.pipedream(replicas="planned", bandwidth="1Gbit"), cluster=mh.Cluster(2), steps=2)


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"bandwidth": "1Gbit"}, "bandwidth is 1Gbit, but must be left out, unless replicas is 'planned'"),
        ({"bandwidth": 1e9, "replicas": "2,1"}, "bandwidth is 1000000000.0, but must be left out, unless replicas is"),
        ({"replicas": "planned", "cut": "4"}, "cut is 4, but must be left out: replicas is 'planned', which chooses"),
        ({"replicas": "planned", "balance": "time"}, "balance is time, but must be left out: replicas is 'planned'"),
        ({"replicas": "planned", "bandwidth": "fast"}, "bandwidth is 'fast', but must be a rate such as 10Gbit"),
        ({"replicas": "planned", "bandwidth": 0}, "bandwidth is 0, but must be > 0"),
        ({"replicas": "planned", "vertical_sync": True}, "vertical_sync is True, but versions of replicated stages"),
        ({"replicas": "plan"}, "replicas is 'plan', but must be whole numbers, such as '2,1', or 'planned'"),
    ],
)
def test_knobs_that_contradict_a_plan_are_refused(knobs, why):
    with pytest.raises(mh.Refused, match=why):
        mh.pipedream(**knobs)


def test_models_that_are_no_chain_are_refused_before_the_run():
    with pytest.raises(mh.Refused, match=r"plans are made for the layers of an nn\.Sequential"):
        mh.train("resnet-small", mh.pipedream(replicas="planned"), cluster=mh.Cluster(2), steps=2)

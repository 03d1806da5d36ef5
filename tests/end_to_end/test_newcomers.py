"""Workers that come when the others are under way: they take part from then on, and hold nobody up."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh

from .small import METHODS, ONE_HOST, task

PLACES = {"apart": {}, "servers": {"servers": 2}, "one host": {"hosts": 1}}
WELCOMING = [name for name, recipe in METHODS.items() if recipe().traits.joiners]
WHERE = [(name, place) for name in WELCOMING for place in (["one host"] if name in ONE_HOST else PLACES)]


class Counter(nn.Module):
    """Its gradient is -1: with SGD of rate 1 it counts the mini-batches of all updates, wherever they are applied."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))

    def forward(self, sample):
        return -self.w.sum() + 0 * sample.mean()


def counting(work=50e6):
    """A step takes a millisecond."""
    return mh.Task(Counter, TensorDataset(torch.zeros(24, 1)), batch_size=1, work=work)


def steps_by_rank(result):
    ranks = [line["rank"] for line in result.records if "loss" in line]
    return {rank: ranks.count(rank) for rank in sorted(set(ranks))}


@pytest.mark.parametrize(("method", "place"), WHERE)
def test_a_joining_worker_takes_part_from_then_on(method, place):
    few = mh.Cluster(workers=3, **PLACES[place])
    alone = mh.train(counting(), METHODS[method](lr=0.01), cluster=few, steps=20)
    more = mh.Cluster(workers=3, newcomers=[alone.seconds / 3], **PLACES[place])
    result = mh.train(counting(), METHODS[method](lr=0.01), cluster=more, steps=20)
    steps = steps_by_rank(result)
    assert sum(steps.values()) == 60 == sum(steps_by_rank(alone).values())
    assert steps[3] >= 5, "a fifth of the time was left for four"
    assert result.seconds < alone.seconds
    assert result.lost == []


@pytest.mark.parametrize("place", PLACES)
def test_no_update_is_lost_or_counted_twice_whenever_it_comes(place):
    """At any moment of the run, among them its first and its last."""
    alone = mh.train(counting(), mh.ssp(lr=1.0), cluster=mh.Cluster(workers=2, **PLACES[place]), steps=12)
    took_part = 0
    for part in range(0, 110, 2):
        cluster = mh.Cluster(workers=2, newcomers=[alone.seconds * part / 100], **PLACES[place])
        result = mh.train(counting(), mh.ssp(lr=1.0, staleness=2), cluster=cluster, steps=12)
        assert result.weights["w"].tolist() == [24.0] * 4
        assert result.max_ahead <= 2
        took_part += steps_by_rank(result).get(2, 0) > 0
    assert took_part > 40


def test_it_begins_at_the_slowest_clock_and_no_worker_waits_for_it():
    """From clock 0 it would hold up everyone for as many steps as they have taken."""
    cluster = mh.Cluster(workers=2, hosts=1, newcomers=["50ms"])
    result = mh.train(counting(), mh.ssp(lr=1.0, staleness=1), cluster=cluster, steps=100)
    steps = steps_by_rank(result)
    assert sum(steps.values()) == 200
    assert min(steps[0], steps[1]) - steps[2] < 60
    assert result.waited_seconds < 0.05 * result.seconds


@pytest.mark.parametrize("place", PLACES)
def test_who_comes_too_late_changes_nothing(place):
    alone = mh.Cluster(workers=2, **PLACES[place])
    late = mh.Cluster(workers=2, newcomers=[1000.0], **PLACES[place])
    one, other = (mh.train(task(), mh.ssp(lr=0.01), cluster=cluster, steps=8) for cluster in (alone, late))
    assert one.weights_sha256 == other.weights_sha256
    assert one.seconds == other.seconds


@pytest.mark.parametrize("place", ["servers", "one host"])
def test_a_joining_worker_may_die_at_any_moment(place):
    alone = mh.train(counting(), mh.ssp(lr=1.0), cluster=mh.Cluster(workers=2, **PLACES[place]), steps=12)
    comes = alone.seconds / 4
    for part in range(25, 105, 4):
        dies = mh.Die(2, alone.seconds * part / 100)
        cluster = mh.Cluster(workers=2, newcomers=[comes], faults=[dies], **PLACES[place])
        result = mh.train(counting(), mh.ssp(lr=1.0), cluster=cluster, steps=12)
        counted = result.weights["w"].tolist()
        assert all(22 <= number <= 24 for number in counted), "what it was sending and computing, nothing else"


@pytest.mark.parametrize("place", ["servers", "one host"])
def test_it_replaces_a_lost_worker(place):
    alone = mh.train(counting(), mh.ssp(lr=1.0), cluster=mh.Cluster(workers=2, **PLACES[place]), steps=30)
    comes = alone.seconds / 2
    cluster = mh.Cluster(workers=2, newcomers=[comes], faults=[mh.Die(1, comes)], **PLACES[place])
    result = mh.train(counting(), mh.ssp(lr=1.0), cluster=cluster, steps=30)
    assert result.lost == [(1, "it died")]
    assert steps_by_rank(result)[2] >= 10
    assert result.seconds < 1.2 * alone.seconds


def test_several_may_come_and_the_first_of_all_may_go():
    """Then a newcomer leads: it gathers and answers."""
    faults = [mh.Die(0, "30ms"), mh.Die(1, "31ms")]
    cluster = mh.Cluster(workers=2, hosts=1, newcomers=["10ms", "20ms"], faults=faults)
    result = mh.train(counting(), mh.ssp(lr=1.0), cluster=cluster, steps=50)
    assert [rank for rank, _ in result.lost] == [0, 1]
    assert 98 <= result.weights["w"].tolist()[0] <= 100


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("method", ["ssp", "easgd"])
def test_checkpoints_are_taken_with_the_workers_that_are_present(method, place, tmp_path):
    strategy = mh.ssp(lr=1.0) if method == "ssp" else mh.easgd(lr=0.01, asynchronous=True)
    alone = mh.train(counting(), strategy, cluster=mh.Cluster(workers=2, **PLACES[place]), steps=12)
    for part in range(0, 100, 10):
        cluster = mh.Cluster(workers=2, newcomers=[alone.seconds * part / 100], **PLACES[place])
        out = tmp_path / str(part)
        result = mh.train(counting(), strategy, cluster=cluster, steps=12, out=out, checkpoint_every=3)
        assert sum(steps_by_rank(result).values()) == 24
        if method == "ssp":
            assert result.weights["w"].tolist() == [24.0] * 4
            assert mh.load_checkpoint(out / "checkpoints").weights["w"].tolist() == [24.0] * 4


def test_a_run_that_a_worker_joined_can_be_resumed(tmp_path):
    cluster = mh.Cluster(workers=2, hosts=1, newcomers=["5ms"])
    mh.train(counting(), mh.ssp(lr=1.0), cluster=cluster, steps=12, out=tmp_path, checkpoint_every=6)
    again = mh.Cluster(workers=2, hosts=1, newcomers=["5ms"])
    result = mh.train(counting(), mh.ssp(lr=1.0), cluster=again, steps=24, out=tmp_path, resume=tmp_path)
    assert result.weights["w"].tolist() == [48.0] * 4


def test_a_joining_worker_learns_as_the_others_do():
    cluster = mh.Cluster(workers=3, newcomers=["20ms"])
    for strategy in (mh.ssp(), mh.easgd(asynchronous=True)):
        result = mh.train("digits", strategy, cluster=cluster, epochs=20)
        assert result.test_accuracy > 0.93
        assert steps_by_rank(result)[3] > 50


@pytest.mark.parametrize("name", [name for name in METHODS if name not in WELCOMING])
def test_other_methods_take_no_joining_worker(name):
    with pytest.raises(
        mh.Refused, match="the number of joining workers is 1, but must be 0: no worker can join a run of"
    ):
        mh.train(task(), METHODS[name](), cluster=mh.Cluster(workers=2, newcomers=["1ms"]), steps=2)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(mh.Refused, match="newcomers"):
        mh.Cluster(workers=2, newcomers=["1ms"], order=[0, 1])
    with pytest.raises(mh.Refused, match="spares is 1, but must be 0 in a virtual cluster"):
        mh.train(task(), mh.ssp(), cluster=mh.Cluster(workers=2), steps=2, spares=1)

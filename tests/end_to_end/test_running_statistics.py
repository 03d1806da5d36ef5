"""BatchNorm on inputs far from 0: what is evaluated does not depend on how many steps each worker has taken."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.tasks.digits import digits

METHODS = {
    "downpour": mh.downpour,
    "ad-psgd": mh.ad_psgd,
    "easgd asynchronous": functools.partial(mh.easgd, asynchronous=True),
    "dc-asgd": mh.dc_asgd,
    "ssp": mh.ssp,
}
STEPS, CLOSE = 150, 0.02


def model():
    return nn.Sequential(
        nn.BatchNorm1d(64), nn.Linear(64, 32), nn.BatchNorm1d(32, momentum=None), nn.ReLU(), nn.Linear(32, 10)
    )


@functools.cache
def far_digits():
    """Digits with a mean of about 100: statistics that are a little wrong make the answers very wrong."""
    task = digits()

    def far(data):
        x, y = data.tensors
        return TensorDataset(100 + 4 * x, y)

    return mh.Task(
        model, far(task.data), cross_entropy, test=far(task.test), metric=task.metric, batch_size=8, work=50e6
    )


def trained(name, steps=STEPS, settings=None, **cluster):
    return mh.train(far_digits(), METHODS[name](), cluster=mh.Cluster(4, **cluster), steps=steps, **(settings or {}))


@functools.cache
def even(name):
    return trained(name)


@pytest.mark.parametrize("name", METHODS)
def test_a_straggler_does_not_spoil_the_statistics(name):
    slow = trained(name, stragglers=mh.Slow([3], 5))
    assert even(name).test_accuracy > 0.9
    assert abs(slow.test_accuracy - even(name).test_accuracy) <= CLOSE


@pytest.mark.parametrize("when", [0.5, 0.97])
@pytest.mark.parametrize("name", [name for name, recipe in METHODS.items() if recipe().traits.joiners])
def test_a_worker_that_joins_begins_with_the_statistics_of_the_others(name, when):
    joined = trained(name, newcomers=[when * even(name).seconds])
    assert any(line.get("rank") == 4 for line in joined.records)
    assert abs(joined.test_accuracy - even(name).test_accuracy) <= CLOSE


def test_a_worker_that_joins_has_them_before_its_first_step():
    """It receives what the others have, and takes over their count."""
    seen = {}

    def begin(strategy, w):
        seen[w.rank] = {name: x.clone() for name, x in w.model.named_buffers()}

    strategy = mh.ssp()
    kind = type(strategy)

    class Seen(kind):
        def join_running(self, w):
            begin(self, w)
            kind.join_running(self, w)

    strategy.__class__ = Seen
    cluster = mh.Cluster(4, newcomers=[0.5 * even("ssp").seconds])
    mh.train(far_digits(), strategy, cluster=cluster, steps=STEPS)
    found = seen[4]
    assert 0.4 * STEPS < found["0.num_batches_tracked"] < 0.6 * STEPS
    assert (found["0.running_mean"] - far_digits().data.tensors[0].mean(0)).abs().max() < 1


def test_all_who_were_there_at_first_may_be_lost():
    """The statistics that are left are those of the worker that has joined."""
    seconds = even("ssp").seconds
    faults = [mh.Die(rank, 0.6 * seconds) for rank in range(4)]
    joined = trained("ssp", newcomers=[0.4 * seconds], faults=faults, hosts=1)
    assert [rank for rank, _ in joined.lost] == [0, 1, 2, 3]
    assert joined.test_accuracy > 0.85


def test_an_evaluation_sees_the_same_as_the_end():
    settings = {"evaluate_every": STEPS // 3}
    slow = trained("ssp", settings=settings, stragglers=mh.Slow([3], 5))
    found = [line["accuracy"] for line in slow.records if "accuracy" in line]
    assert len(found) == 2 and found[-1] > 0.85


@pytest.mark.parametrize("name", ["ssp", "ad-psgd"])
def test_a_resumed_run_has_the_statistics_of_one_that_continued(name, tmp_path):
    slow = {"stragglers": mh.Slow([3], 5)}
    once = trained(name, 60, {"out": tmp_path / "a", "checkpoint_every": 30}, **slow)
    trained(name, 30, {"out": tmp_path / "b", "checkpoint_every": 30}, **slow)
    again = trained(name, 60, {"out": tmp_path / "b", "checkpoint_every": 30, "resume": tmp_path / "b"}, **slow)
    taken = torch.tensor([int(x) for key, x in once.buffers.items() if key.endswith("tracked")])
    assert (taken > 60).all(), "the others have taken more steps than the slow one"
    for key, x in once.buffers.items():
        assert torch.isfinite(x).all()
        torch.testing.assert_close(again.buffers[key], x, rtol=0.05, atol=0.05)

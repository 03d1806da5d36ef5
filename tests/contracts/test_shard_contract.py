"""Remote shards and shards in shared memory pass the same tests."""

import random

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.rules import Adam, Momentum, Sgd

WAYS = {"server ranks": {"servers": 2}, "co-located": {}, "shared memory": {"hosts": 1, "cores": 4}}
WAY = pytest.mark.parametrize("way", WAYS)


def linear(samples=64):
    """A small regression in double precision: two layers, so that there is something to cut."""
    noise = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 6, generator=noise, dtype=torch.float64)
    y = x @ torch.randn(6, 2, generator=noise, dtype=torch.float64)

    def model():
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()

    return mh.Task(model, TensorDataset(x, y), nn.functional.mse_loss, batch_size=4)


def cluster(way, seed, workers=4):
    dice = random.Random(seed)
    speeds = [dice.choice([0.3, 1, 2, 5]) for _ in range(workers)]
    return mh.Cluster(workers=workers, speeds=speeds, jitter=0.5, **WAYS[way])


@WAY
@pytest.mark.parametrize("rule", [Sgd(0.05), Momentum(0.05), Adam(0.01)], ids=lambda rule: type(rule).__name__)
def test_bulk_is_the_same_to_the_last_bit(way, rule):
    reference = mh.train(linear(), mh.bsp_server(rule=rule), cluster=mh.Cluster(workers=4, servers=1), steps=12)
    result = mh.train(linear(), mh.bsp_server(rule=rule), cluster=cluster(way, 0), steps=12)
    assert result.weights_sha256 == reference.weights_sha256


@WAY
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_worker_is_ahead_by_more_than_the_bound_and_the_budget_is_used_up(way, seed, staleness):
    result = mh.train(linear(), mh.ssp(staleness=staleness, lr=0.01), cluster=cluster(way, seed), steps=15, seed=seed)
    steps = [line for line in result.records if "loss" in line]
    assert max(line["ahead"] for line in steps) <= staleness
    assert len(steps) == 15 * 4
    assert result.samples == 15 * 4 * 4


@WAY
@pytest.mark.parametrize("method", [mh.ssp, mh.downpour])
def test_every_pushed_gradient_is_applied_once(way, method):
    """With plain SGD at the shards the weights move by the sum of all gradients, in any order of arrival."""
    total, start = [], torch.cat([p.detach().reshape(-1) for p in linear().build(0).parameters()])
    strategy = method(rule=Sgd(1e-3))
    kind = type(strategy)

    class Noted(kind):
        def _push(self, w):
            total.append(w.flat.groups[0].grad.clone())
            super()._push(w)

    strategy.__class__ = Noted
    result = mh.train(linear(), strategy, cluster=cluster(way, 1), steps=10)
    moved = torch.cat([w.reshape(-1) for w in result.weights.values()]) - start
    assert len(total) == 40
    assert torch.allclose(moved, -1e-3 * torch.stack(total).sum(0), rtol=0, atol=1e-12)


def deadly(way):
    """Worker 2 dies after a quarter of the run."""
    calm = mh.train(linear(), mh.ssp(staleness=1, lr=0.01), cluster=mh.Cluster(workers=4, **WAYS[way]), steps=20)
    return mh.Cluster(workers=4, faults=[mh.Die(2, at=calm.seconds / 4)], **WAYS[way])


def test_a_co_located_shard_dies_with_its_worker():
    with pytest.raises(mh.PeerLost, match="rank 2 is lost: it died"):
        mh.train(linear(), mh.ssp(staleness=1, lr=0.01), cluster=deadly("co-located"), steps=20)


@pytest.mark.parametrize("way", ["server ranks", "shared memory"])
def test_a_dead_worker_does_not_hold_up_the_stale(way):
    result = mh.train(linear(), mh.ssp(staleness=1, lr=0.01), cluster=deadly(way), steps=20)
    assert [rank for rank, _ in result.lost] == [2]
    assert result.samples >= 20 * 4 * 4 - 4, "the others do its work, except its last mini-batch"


def test_parameters_that_no_worker_touched_are_skipped_by_the_rule():
    """Momentum and decay must not move them, as in torch; on both ways, and when merged."""

    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))

        def forward(self, x):
            return ((self.used * x).sum(-1) ** 2).mean()

    task = mh.Task(Partly, TensorDataset(torch.ones(8, 3, dtype=torch.float64)), batch_size=1)
    for way in WAYS.values():
        for method in (mh.ssp, mh.bsp_server):
            strategy = method(rule=Momentum(0.01, weight_decay=0.1))
            result = mh.train(task, strategy, cluster=mh.Cluster(workers=2, **way), steps=3)
            assert torch.equal(result.weights["unused"], torch.ones(3, dtype=torch.float64))
            assert not torch.equal(result.weights["used"], torch.ones(3, dtype=torch.float64))


def test_a_push_that_reads_gives_the_same_weights_as_a_pull():
    """On one host a push may also read the new weights; that saves time, and changes no bit."""
    alone = mh.Cluster(workers=1, hosts=1)
    reference = mh.train(linear(), mh.ssp(lr=0.01), cluster=mh.Cluster(workers=1, servers=1), steps=12)
    result = mh.train(linear(), mh.ssp(lr=0.01), cluster=alone, steps=12)
    assert result.weights_sha256 == reference.weights_sha256

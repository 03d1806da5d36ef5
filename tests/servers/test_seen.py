"""A rule that needs them gets the weights that its gradient was computed at, and its staleness, at every shard."""

import random
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.codecs import Raw
from manyhands.consistency import Bulk, Free, Stale
from manyhands.rules import Sgd
from manyhands.servers.shard import Shard
from manyhands.strategies.server import Server

WAYS = {
    "one server": {"servers": 1},
    "three servers": {"servers": 3},
    "co-located": {},
    "shared memory": {"hosts": 1, "cores": 3},
}
WAY = pytest.mark.parametrize("way", WAYS)
WORKERS = 3
SHAPES = [(7,), (5, 3), (2,)]


class Itself(nn.Module):
    """A model whose gradient is its weights: half the sum of their squares."""

    def __init__(self, always=True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in SHAPES)
        self.always = always
        for layer, shape in zip(self.layers, SHAPES, strict=True):
            layer.w = nn.Parameter(torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape))

    def forward(self, x):
        used = self.layers if self.always or x[0, 0] > 0 else self.layers[:2]
        return sum(0.5 * layer.w.square().sum() for layer in used)


def sometimes():
    """The last layer is not touched by every mini-batch."""
    return Itself(always=False)


class Witness:
    """Every update adds 1, and every gradient is what its worker had read: so all can be checked at each update."""

    elementwise, needs = True, frozenset({"seen"})
    lags: ClassVar[list] = []

    def init(self, weights):
        return {}

    def __call__(self, g, at):
        assert g.shape == at.weights.shape == at.seen.shape
        assert torch.equal(g, at.seen)
        self.checks(at)
        self.lags.append((at.rank, at.lag))
        return torch.ones_like(g)

    def checks(self, at):
        assert torch.equal(at.weights - at.seen, torch.full_like(at.weights, at.lag))


class WholeWitness(Witness):
    """One that takes whole tensors only."""

    elementwise = False

    def __call__(self, g, at):
        assert tuple(g.shape) in SHAPES
        return super().__call__(g, at)


class Forgetful(Witness):
    """One for weights that are not all moved by every update."""

    def checks(self, at):
        """Nothing: the number of updates of a coordinate is not the version."""


@pytest.fixture
def lags(monkeypatch):
    monkeypatch.setattr(Witness, "lags", [])
    return Witness.lags


def task(model=Itself, samples=48):
    x = torch.randn(samples, 2, generator=torch.Generator().manual_seed(3))
    return mh.Task(model, TensorDataset(x), batch_size=1)


def run(way, strategy, seed=0, steps=12, workers=WORKERS, data=None, faults=(), **train):
    dice = random.Random(seed)
    speeds = [dice.choice([0.3, 1, 2, 5]) for _ in range(workers)]
    cluster = mh.Cluster(workers=workers, speeds=speeds, jitter=0.5, faults=faults, **WAYS[way])
    return mh.train(data or task(), strategy, cluster=cluster, steps=steps, seed=seed, **train)


@WAY
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("when", [Free(), Stale(0), Stale(2)], ids=repr)
def test_every_gradient_meets_what_it_was_computed_at(way, when, prefetch, lags):
    for seed in range(3):
        run(way, Server(when, Witness(), prefetch=prefetch), seed)
    assert {lag for _, lag in lags} >= {0, 1}, "or this test would say little"


@WAY
@pytest.mark.parametrize("when", [Free(), Stale(1)], ids=repr)
def test_so_do_gradients_of_several_steps(way, when, lags):
    """The weights do not move between two fetches, since the local steps are of length 0."""
    run(way, Server(when, Divided(), fetch_every=3, push_every=3, phase="end"))
    assert {lag for _, lag in lags} >= {0, 1}


class Divided(Witness):
    """One for sums of equal gradients."""

    def __call__(self, g, at):
        count = (g / at.seen).nan_to_num(0).max().round()
        return super().__call__(g / max(count, 1), at)


@WAY
def test_so_do_rules_that_need_whole_tensors(way, lags):
    run(way, Server(Free(), WholeWitness()))
    assert {lag for _, lag in lags} >= {0, 1}


@WAY
def test_so_do_models_of_which_a_step_touches_only_some(way):
    run(way, Server(Free(), Forgetful()), data=task(sometimes))
    run(way, Server(Stale(0), Forgetful()), data=task(sometimes))


@WAY
def test_resting_and_resuming_change_nothing_of_that(way, lags, tmp_path):
    strategy = Server(Free(), Witness(), prefetch=True)
    run(way, strategy, out=tmp_path, checkpoint_every=3, steps=9)
    lags.clear()
    for workers in (2, 5):
        run(way, strategy, workers=workers, steps=30, resume=tmp_path)
        assert {rank for rank, _ in lags} == set(range(workers))


@pytest.mark.parametrize("way", ["three servers", "shared memory"])
def test_neither_does_a_loss(way, lags):
    usual = run(way, Server(Free(), Witness()))
    lags.clear()
    result = run(way, Server(Free(), Witness()), faults=[mh.Die(1, usual.seconds / 3)])
    assert result.lost == [(1, "it died")] and {rank for rank, _ in lags} >= {0, 2}


@WAY
def test_of_several_gradients_that_are_applied_one_by_one_each_is_staler_than_the_last(way, lags):
    run(way, Server(Stale(0), Witness()), steps=4, per_worker=True)
    shards = len(lags) // (4 * WORKERS)
    assert sorted(lags) == sorted([(i, i) for i in range(WORKERS)] * 4 * shards), "0 for the first, 1, 2"


@WAY
def test_only_rules_that_need_it_pay_for_it(way, monkeypatch):
    kept, init = [], Shard.__init__

    def noted(shard, *arguments):
        init(shard, *arguments)
        kept.append(shard.seen)

    monkeypatch.setattr(Shard, "__init__", noted)
    plain = run(way, Server(Free(), Sgd(0.001), prefetch=True))
    assert kept and not any(kept)
    kept.clear()
    seen = run(way, Server(Free(), Witness(), prefetch=True))
    assert all(len(one) == WORKERS for one in kept)
    assert seen.bytes_sent == plain.bytes_sent


REFUSED = {
    "bsp": lambda rule: mh.bsp(rule=rule),
    "easgd": lambda rule: mh.easgd(rule=rule),
    "easgd asynchronous": lambda rule: mh.easgd(rule=rule, asynchronous=True),
    "ad-psgd": lambda rule: mh.ad_psgd(rule=rule),
    "hogwild": lambda rule: mh.hogwild(rule=rule),
}


@pytest.mark.parametrize("method", REFUSED)
@pytest.mark.parametrize("hosts", [None, 1])
def test_where_these_weights_are_not_kept_such_a_rule_is_refused(method, hosts):
    hosts = 1 if method == "hogwild" else hosts
    with pytest.raises(
        mh.Refused, match="needs the weights that each gradient was computed at, but only parameter ser"
    ):
        mh.train(task(), REFUSED[method](Witness()), cluster=mh.Cluster(workers=2, hosts=hosts), steps=2)


def test_a_mean_of_gradients_was_not_computed_at_one_place():
    with pytest.raises(
        mh.Refused,
        match=r"each gradient was computed at when it is applied, but Bulk\(\) makes one gradient of several",
    ):
        Server(Bulk(), Witness(), Raw())

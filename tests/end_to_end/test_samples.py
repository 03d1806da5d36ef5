"""At which sample a rule is asked for its rate: the number that was consumed before, the same for every method."""

import inspect
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands import catalog
from manyhands.consistency import Rounds
from manyhands.rules import Sgd
from manyhands.strategies.local_steps import LocalSteps

WORKERS, BATCH, STEPS = 3, 4, 4
DRAW = torch.Generator().manual_seed(0)
DATA = TensorDataset(*(torch.randn(36, size, generator=DRAW, dtype=torch.float64) for size in (4, 2)))
PLACES = {"apart": {}, "one host": {"hosts": 1}, "servers": {"servers": 2}}

WITH_RULE = [name for name in sorted(catalog.__all__) if "rule" in inspect.signature(getattr(mh, name)).parameters]
CASES = [
    (name, place) for name in WITH_RULE for place in PLACES if place != "servers" or getattr(mh, name)().traits.servers
]
ONE_GRADIENT = ["dc_asgd", "downpour", "dyn_sgd", "k_async", "k_batch_async", "ssp", "staleness_aware"]
"""Methods whose servers apply each gradient by itself."""
NARROW = {
    "interleaved": {"stages": 1},  # three would have to divide the micro-batches of four samples
    "filter_split": {"ranks": 1},  # there are no convolutions
    "channel_split": {"ranks": 1},
}
ONE_MODEL = [name for name in (*catalog.pipelines.__all__, *catalog.slices.__all__) if name not in NARROW]
ONE_MODEL.remove("mesh")
KNOBS = {
    "agn": {"period": 2},
    "adag": {"period": 2},
    "bmuf": {"period": 2},
    "diloco": {"period": 2},
    "asysvrg": {"full_steps": 1, "inner_steps": 3},
    **NARROW,
}
EXPECTED = {
    "agn": [0, 8, 16, 24, 32, 40],  # a push is of two mini-batches
    "adag": [0, 8, 16, 24, 32, 40],
    "adaptive_batch": [0, 12, 24],  # the last one is of two mini-batches of each worker
    "asysvrg": [12, 24, 36],  # the first samples of an epoch make mu
    "small_batch_pipeline": [0, 2, 4, 6, 8, 10, 12, 14],  # pieces of two samples
}


def model():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()


TASK = mh.Task(model, DATA, mse_loss, batch_size=BATCH, work=5e6)


def asked(name, **place):
    """Where the rule was asked, with repetitions: for every part of the weights, and every worker that has its own."""
    seen = []

    def rate(samples):
        seen.append(samples)
        return 0.01

    strategy = getattr(mh, name)(**KNOBS.get(name, {}), rule=Sgd(rate))
    mh.train(TASK, strategy, cluster=mh.Cluster(WORKERS, **place), steps=STEPS)
    return seen


def samples_before(name):
    """Before every update of a run."""
    if name in EXPECTED:
        return EXPECTED[name]
    end = STEPS * BATCH * (1 if name in ONE_MODEL else WORKERS)
    return list(range(0, end, BATCH if name in ONE_GRADIENT + ONE_MODEL else BATCH * WORKERS))


@pytest.mark.parametrize(("name", "place"), CASES)
def test_a_rule_is_asked_at_the_samples_consumed_before_its_update(name, place):
    assert sorted(set(asked(name, **PLACES[place]))) == samples_before(name)


def test_an_outer_rule_is_asked_at_the_beginning_of_its_round():
    """An incomplete round at the end too."""
    seen = []

    def rate(samples):
        seen.append(samples)
        return 0.5

    mh.train(TASK, LocalSteps(Sgd(0.01), Rounds(3), Sgd(rate), warmup=2), cluster=mh.Cluster(WORKERS), steps=10)
    assert sorted(set(seen)) == [one * WORKERS * BATCH for one in (2, 5, 8)]


def test_the_cache_of_a_worker_is_updated_at_the_same_rate_as_the_server():
    """Of one worker: no other pushes in between."""
    seen = []

    def rate(samples):
        seen.append(samples)
        return 0.01

    strategy = mh.ssp(cache=True, rule=Sgd(rate))
    mh.train(TASK, strategy, cluster=mh.Cluster(1, servers=1), steps=4)
    assert Counter(seen) == Counter([0, 4, 8, 12] * 2)


@pytest.mark.parametrize("name", ["backup_workers", "k_sync"])
def test_shards_agree_on_the_samples_although_gradients_are_dropped(name):
    """What one server drops may not have arrived at the other."""
    where = {"servers": 2, "stragglers": mh.Slow([2], 2.3), "jitter": 0.3}
    seen = Counter(asked(name, **where))
    assert set(seen.values()) == {2}, "each shard once"
    dropped = [after - before - 2 * BATCH for before, after in zip(sorted(seen), sorted(seen)[1:], strict=False)]
    assert min(dropped) == 0 and max(dropped) > 0


@pytest.mark.parametrize("place", PLACES)
def test_with_a_schedule_servers_that_wait_for_all_are_bulk_synchronous(place):
    def rate(samples):
        return 0.4 / (1 + samples / 30)

    methods = [mh.bsp_server(rule=Sgd(rate)), mh.k_async(k=WORKERS, rule=Sgd(rate))]
    methods += [mh.hierarchical_server(groups=2, rule=Sgd(rate))]
    expected = mh.train(TASK, mh.bsp(rule=Sgd(rate)), cluster=mh.Cluster(WORKERS), steps=6).weights
    for method in methods:
        found = mh.train(TASK, method, cluster=mh.Cluster(WORKERS, **PLACES[place]), steps=6).weights
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-12)

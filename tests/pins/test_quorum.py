"""Cards 8 and 17: updates of some workers' gradients, pinned on toy T wherever its weights are kept."""

from dataclasses import replace

import pytest
import torch
from toys import COPIES, PLACES, SCHEDULE_A, WHERE, parabolas, toy_t

import manyhands as mh
from manyhands.codecs import Feedback, TopK
from manyhands.core.errors import Refused
from manyhands.rules import DelayCompensation, Sgd, chain
from manyhands.servers.shard import Shard
from manyhands.servers.shard_server import ShardServer


@pytest.fixture
def groups(monkeypatch):
    """For every span and update: the value after it, and the workers and lags of its gradients."""
    found, update = {}, Shard._update

    def noted(shard, group, read):
        version = shard.clocks.version
        update(shard, group, read)
        for weight_slice in shard.slices:
            made_of = tuple((one.worker, version - one.seen) for one in group)
            found.setdefault(weight_slice.span, []).append((weight_slice.weights.flatten()[0].item(), made_of))

    monkeypatch.setattr(Shard, "_update", noted)
    return found


@pytest.fixture
def updates(groups):
    """The same values everywhere, for two workers in a prescribed order."""

    def run(strategy, where="co-located", order=SCHEDULE_A):
        groups.clear()
        cluster = mh.Cluster(workers=2, order=order, **PLACES[where])
        mh.train(toy_t(copies=COPIES), strategy, cluster=cluster)
        first, *others = groups.values()
        assert all(other == first for other in others), "shards may not differ"
        return [value for value, _ in first]

    return run


def own_share(strategy):
    """The same method with a share of the data for every worker, so that its samples are known."""
    return replace(strategy, draws_from_all=False)


def close(*values):
    return pytest.approx(list(values), abs=1e-9)


# -- pinned values --------------------------------------------------------------------------------


@WHERE
def test_with_one_backup_of_two_the_first_worker_makes_every_update(where, updates):
    strategy = own_share(mh.backup_workers(backups=1, lr=0.1))
    assert updates(strategy, where, [0, 1, 0]) == close(0.1, 0.19)


@WHERE
def test_k_batch_async_takes_two_gradients_of_a_fast_worker(where, updates):
    assert updates(mh.k_batch_async(k=2, lr=0.1), where, [0, 0, 1, 0]) == close(0.1, 0.445)


@WHERE
def test_k_async_takes_one_of_each(where, updates):
    assert updates(mh.k_async(k=2, lr=0.1), where) == close(0.35, 0.6475)


@WHERE
def test_one_softsync_divides_each_gradient_by_its_own_staleness(where, updates):
    assert updates(mh.softsync(splitting=1, lr=0.1), where) == close(0.35, 0.665)


@WHERE
def test_two_softsync_of_two_workers_is_asynchronous(where, updates):
    assert updates(mh.softsync(splitting=2, lr=0.1), where) == close(0.1, 0.7, 0.79, 1.25)


def test_of_several_gradients_each_is_divided_by_its_own_staleness(updates):
    """In the last update tau is 2 for worker 0 and 0 for worker 1: -1/2 and 2 (w - 3)."""
    order = [1, 1, 1, 1, 0, 1]
    values = updates(mh.softsync(splitting=1, lr=0.1), "one server", order)
    first = 0.1 * 6
    second = first + 0.1 * 2 * (3 - first)
    assert values == close(first, second, second + 0.1 * (1 / 2 + 2 * (3 - second)) / 2)


def test_a_step_ends_when_the_last_of_those_that_are_needed_has_come(monkeypatch):
    times, answer = {}, ShardServer._answer

    def noted(server, admitted):
        times.setdefault(server._shard.clocks.version, server._t.now())
        answer(server, admitted)

    monkeypatch.setattr(ShardServer, "_answer", noted)
    seconds = [10, 11, 9, 1000, 12, 13]
    machines = {"speeds": [1 / one for one in seconds], "latency": 0, "bandwidth": "inf"}
    cluster = mh.Cluster(workers=6, servers=1, **machines)
    mh.train(parabolas(*[(1, 1)] * 6, seconds=1), mh.backup_workers(backups=2), cluster=cluster, steps=1)
    assert times[1] == pytest.approx(12, abs=1e-6)


# -- identities -----------------------------------------------------------------------------------

UNEVEN = {
    "two servers": mh.Cluster(workers=4, servers=2, speeds=[1, 0.7, 2, 1.3], latency="3ms", bandwidth="200Mbit"),
    "co-located": mh.Cluster(workers=4, speeds=[1, 0.7, 2, 1.3], latency="3ms"),
    "shared": mh.Cluster(workers=4, hosts=1, cores=2, speeds=[1, 0.7, 2, 1.3]),
}
CLUSTERS = pytest.mark.parametrize("cluster", UNEVEN.values(), ids=UNEVEN)
WHOLE = {
    "backup workers without backups": own_share(mh.backup_workers(backups=0, lr=0.3)),
    "k-sync of all": own_share(mh.k_sync(k=4, lr=0.3)),
    "k-async of all": mh.k_async(k=4, lr=0.3),
}


@CLUSTERS
@pytest.mark.parametrize("strategy", WHOLE.values(), ids=WHOLE)
def test_if_all_are_needed_it_is_bulk_synchronous(strategy, cluster, digits64):
    knobs = {"cluster": cluster, "steps": 6, "per_worker": True}
    bulk = mh.train(digits64, mh.bsp_server(), **knobs)
    assert mh.train(digits64, strategy, **knobs).weights_sha256 == bulk.weights_sha256


ONE = {
    "k-async of one": mh.k_async(k=1, lr=0.1),
    "k-batch-async of one": mh.k_batch_async(k=1, lr=0.1),
    "softsync of one, not modulated": mh.softsync(splitting=2, lr=0.1, modulated=False),
}


@WHERE
@pytest.mark.parametrize("strategy", ONE.values(), ids=ONE)
def test_if_one_is_enough_it_is_asynchronous_sgd(strategy, where, updates):
    assert updates(strategy, where) == updates(mh.downpour(rule=Sgd(0.1)), where)


def test_softsync_without_modulation_is_k_batch_async(digits64):
    knobs = {"cluster": UNEVEN["two servers"], "steps": 6}
    soft, batch = mh.softsync(splitting=2, lr=0.1, modulated=False), mh.k_batch_async(k=2, lr=0.1)
    assert mh.train(digits64, soft, **knobs).weights_sha256 == mh.train(digits64, batch, **knobs).weights_sha256


# -- who takes part ---------------------------------------------------------------------------------


def train_unevenly(task, strategy, cluster, **knobs):
    uneven = replace(cluster, speeds=[1, 0.7, 5, 1.3], jitter=0.5, latency="10us", bandwidth="100Gbit")
    return mh.train(task, strategy, cluster=uneven, **({"steps": 12} | knobs))


@CLUSTERS
@pytest.mark.parametrize("distinct", [True, False], ids=["distinct", "any"])
def test_what_backup_workers_apply_is_fresh_and_the_same_everywhere(distinct, cluster, groups, digits64):
    train_unevenly(digits64, mh.backup_workers(backups=2, distinct=distinct), cluster)
    first, *others = [[made_of for _, made_of in one] for one in groups.values()]
    assert all(other == first for other in others)
    full = [made_of for made_of in first if len(made_of) == 2]
    assert len(full) > 5
    assert all(lag == 0 for made_of in first for _, lag in made_of)
    twice = [made_of for made_of in full if made_of[0][0] == made_of[1][0]]
    assert not twice if distinct else twice


@CLUSTERS
def test_what_k_async_applies_is_of_distinct_workers_and_the_same_everywhere(cluster, groups, digits64):
    train_unevenly(digits64, mh.k_async(k=2), cluster)
    first, *others = [[[worker for worker, _ in made_of] for _, made_of in one] for one in groups.values()]
    assert all(other == first for other in others)
    assert all(len(set(workers)) == len(workers) for workers in first)
    assert sum(len(workers) for workers in first) == 4 * 12, "no gradient is lost"


@CLUSTERS
def test_k_batch_async_loses_nothing(cluster, groups, digits64):
    train_unevenly(digits64, mh.k_batch_async(k=3), cluster)
    for one in groups.values():
        assert sum(len(made_of) for _, made_of in one) == 4 * 12


@WHERE
def test_what_was_dropped_stays_in_the_codecs_memory(where, updates):
    """Worker 1 is late with -6 and sends it again with -5.8, its next gradient."""
    strategy = own_share(mh.backup_workers(backups=1, lr=0.1, codec=Feedback(TopK(1.0))))
    assert updates(strategy, where, [0, 1, 1]) == close(0.1, 0.1 + 0.1 * (6 + 5.8))


def test_workers_of_which_some_are_dropped_may_see_any_sample():
    seen = {0: set(), 1: set()}

    class Noting(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            return torch.tensor([float(i)]), torch.tensor([0.0])

    strategy = mh.k_sync(k=1)
    kind = type(strategy)

    def step(self, w, batch):
        seen[w.rank] |= set(batch[0].flatten().tolist())
        return kind.step(self, w, batch)

    strategy.__class__ = type("Looking", (kind,), {"step": step})
    task = mh.Task(lambda: torch.nn.Linear(1, 1), Noting(), torch.nn.functional.mse_loss, batch_size=2)
    mh.train(task, strategy, cluster=mh.Cluster(workers=2), steps=4, per_worker=True)
    assert seen == {0: set(range(8)), 1: set(range(8))}


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: mh.k_sync(k=3), "k is 3, but must be <= 2, the number of workers"),
        (lambda: mh.backup_workers(backups=2), "the number of backup workers is 2, but must be < 2"),
        (lambda: mh.k_async(k=0), "k is 0, but must be >= 1"),
        (lambda: mh.softsync(splitting=0), "parts is 0, but must be >= 1"),
        (lambda: mh.backup_workers(backups=-1), "backup workers is -1, but must be >= 0"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(Refused, match=words):
        mh.train(toy_t(), make(), cluster=mh.Cluster(workers=2), steps=1)


def test_delay_compensation_needs_workers_that_wait():
    rule = chain(DelayCompensation(), Sgd(0.1))
    mh.train(toy_t(), mh.k_async(k=2, rule=rule), cluster=mh.Cluster(workers=2), steps=3)
    with pytest.raises(Refused, match="lets its worker continue before that"):
        mh.k_batch_async(k=2, rule=rule)

"""Cards 12 and 16, Downpour and SSP: pinned values on toy T, read rules, identities."""

from itertools import pairwise

import pytest
import torch
from toys import number, probed, toy_t

import manyhands as mh
from manyhands.codecs import Feedback, TopK
from manyhands.core.errors import Refused
from manyhands.rules import Momentum, Sgd
from manyhands.servers.shard import Shard
from manyhands.strategies.server import Server

WHERE = pytest.mark.parametrize("where", [{"servers": 1}, {}, {"hosts": 1}], ids=["server", "co-located", "shared"])
SCHEDULE_A = [0, 1, 0, 1]


@pytest.fixture
def server_values(monkeypatch):
    """What the server held after each update."""
    values, update = [], Shard._update

    def noted(shard, group, read):
        update(shard, group, read)
        values.append(shard.slices[0].weights.item())

    monkeypatch.setattr(Shard, "_update", noted)
    return values


# -- Downpour -------------------------------------------------------------------------------------


@WHERE
def test_downpour_schedule_a_with_a_fixed_rate(where, server_values):
    cluster = mh.Cluster(workers=2, order=SCHEDULE_A, **where)
    result = mh.train(toy_t(), mh.downpour(rule=Sgd(0.1)), cluster=cluster)
    assert server_values == pytest.approx([0.1, 0.7, 0.79, 1.25], abs=1e-9)
    assert number(result) == pytest.approx(1.25, abs=1e-9)
    steps = [line for line in result.records if "loss" in line]
    assert [line["lag"] for line in sorted(steps, key=lambda line: line["time"])] == [0, 1, 1, 1]


@WHERE
def test_downpour_schedule_a_with_adagrad(where, server_values):
    mh.train(toy_t(), mh.downpour(lr=0.1), cluster=mh.Cluster(workers=2, order=SCHEDULE_A, **where))
    assert server_values == pytest.approx([0.1, 0.1986393924, 0.2132759576, 0.2806270189], abs=1e-9)


@pytest.mark.parametrize(
    ("phase", "pushed", "left"),
    [("start", [0.1, 0.68], {0: -0.9, 1: -4.64}), ("end", [0.19, 1.2016], {0: None, 1: None})],
)
def test_downpour_with_periods_of_two(phase, pushed, left, server_values):
    unpushed = {}

    def before_the_end(s, w):
        unpushed[w.rank] = None if s.accrued is None else s.accrued[0].item()

    strategy = mh.downpour(rule=Sgd(0.1), n_fetch=2, n_push=2, prefetch=False, phase=phase, local_lr=0.1)
    mh.train(
        toy_t(), probed(strategy, step=before_the_end), cluster=mh.Cluster(workers=2, servers=1, turns=[0, 0, 1, 1])
    )
    assert server_values[:2] == pytest.approx(pushed, abs=1e-9)
    assert unpushed == {k: v if v is None else pytest.approx(v, abs=1e-9) for k, v in left.items()}
    flushed = sum(v is not None for v in left.values())
    assert len(server_values) == 2 + flushed, "what was left is pushed at the end"


def test_adagrads_first_step_is_the_rate(server_values):
    mh.train(toy_t(), mh.downpour(lr=0.25), cluster=mh.Cluster(workers=2, order=[1]))
    assert server_values == pytest.approx([0.25], abs=1e-12)


@pytest.mark.parametrize("how", ["size", "layer", "round-robin"])
def test_the_number_of_shards_does_not_matter_when_pushes_are_atomic(digits64, how):
    order = [0, 1, 1, 0, 0, 1]
    runs = [
        mh.train(digits64, mh.downpour(shard=how), cluster=mh.Cluster(workers=2, servers=servers, order=order))
        for servers in (1, 3)
    ]
    assert runs[0].weights_sha256 == runs[1].weights_sha256


# -- SSP ------------------------------------------------------------------------------------------


@WHERE
@pytest.mark.parametrize("cache", [False, True], ids=["", "cache"])
def test_ssp_reads_and_blocks_as_the_card_says(where, cache):
    reads = []
    strategy = mh.ssp(staleness=1, lr=0.1, cache=cache)
    probed(strategy, pull=lambda s, w: reads.append((w.rank, w.transport.now(), w.flat.groups[0].weights.item())))
    cluster = mh.Cluster(workers=2, speeds=[1, 0.4], latency="1us", **where)
    result = mh.train(toy_t(seconds=1), strategy, cluster=cluster, steps=2)
    first = [w for rank, _, w in reads if rank == 0]
    assert first == pytest.approx([0, 0.1, 0.79], abs=1e-9)
    assert [w for rank, _, w in reads if rank == 1] == pytest.approx([0], abs=1e-9)
    blocked_until = [time for rank, time, _ in reads if rank == 0][2]
    assert blocked_until == pytest.approx(2.5, abs=1e-3), "worker 1 waits for worker 2's first clock"
    assert number(result) == pytest.approx(0.811, abs=1e-9)


@WHERE
@pytest.mark.parametrize(("steps", "w"), [(1, 0.7), (2, 1.19)])
@pytest.mark.parametrize("speeds", [[1, 1], [1, 0.1], [0.1, 1]])
def test_ssp_without_staleness_is_bsp_with_summed_updates(where, steps, w, speeds):
    slow = mh.SlowLink(0, factor=1e4)
    cluster = mh.Cluster(workers=2, speeds=speeds, faults=[slow], **where)
    result = mh.train(toy_t(), mh.ssp(staleness=0, lr=0.1), cluster=cluster, steps=steps, per_worker=True)
    assert number(result) == pytest.approx(w, abs=1e-9)


def test_ssp_without_staleness_equals_bsp_on_digits(digits64):
    cluster = mh.Cluster(workers=4, speeds=[1, 0.3, 2, 0.7])
    ssp = mh.train(digits64, mh.ssp(staleness=0, lr=0.05), cluster=cluster, steps=8, per_worker=True)
    bsp = mh.train(digits64, mh.bsp(lr=0.2), cluster=cluster, steps=8)
    for name, w in bsp.weights.items():
        assert torch.allclose(ssp.weights[name], w, rtol=0, atol=1e-12)


def test_reading_ones_own_writes():
    """With any staleness one worker is sequential SGD."""
    for staleness in (0, 1, 100):
        strategy = mh.ssp(staleness=staleness, lr=0.1)
        result = mh.train(toy_t(), strategy, cluster=mh.Cluster(workers=1, servers=1), steps=4)
        w = 0.0
        steps = [line for line in result.records if "loss" in line]
        assert [(line["lag"], line["ahead"]) for line in steps] == [(None, 0), (0, 0), (0, 0), (0, 0)]
        rows = {True: (1, 1), False: (2, 3)}
        losses = [line["loss"] for line in result.records if "loss" in line]
        for loss in losses:
            a, b = rows[loss == pytest.approx(0.5 * (w - 1) ** 2, abs=1e-12)]
            assert loss == pytest.approx(a / 2 * (w - b) ** 2, abs=1e-12)
            w -= 0.1 * a * (w - b)
        assert number(result) == pytest.approx(w, abs=1e-12)


@WHERE
def test_a_worker_with_a_cache_asks_only_when_it_must_and_sees_its_own_updates(where, digits64, monkeypatch):
    """Of 12 steps with s = 3 a worker that is never ahead reads at clocks 4, 8, 12; between, its own updates add up."""
    reads, seen = [], []
    pull = Server._pull
    monkeypatch.setattr(Server, "_pull", lambda s, w: (reads.append(getattr(s, "clock", None)), pull(s, w))[1])

    def note(s, w):
        seen.append((s.clock - s.read_at, w.flat.groups[0].weights.clone(), w.flat.groups[0].grad.clone()))

    strategy = probed(mh.ssp(staleness=3, lr=0.1, cache=True), step=note)
    result = mh.train(digits64, strategy, cluster=mh.Cluster(workers=1, **{**where, "hosts": 1}), steps=12)
    assert reads == [4, 8]
    for (_, w, _), (age, after, _) in pairwise(seen):
        assert age <= 4
        assert not torch.equal(w, after)
    whole = mh.train(digits64, mh.ssp(staleness=3, lr=0.1), cluster=mh.Cluster(workers=1), steps=12)
    assert whole.weights_sha256 == result.weights_sha256, "alone it is sequential SGD, read or not"


@pytest.mark.parametrize(("speeds", "at_most"), [([1, 1, 1, 1], 0.65), ([1, 0.2, 3, 1], 0.9)])
def test_a_cache_keeps_the_bound_and_reads_less(speeds, at_most, digits64):
    """Of equal workers about every fifth step reads; fast workers that wait at the bound read in every step anyway."""
    cluster = mh.Cluster(workers=4, servers=2, speeds=speeds, jitter=0.3)
    runs = [mh.train(digits64, mh.ssp(staleness=4, cache=cache), cluster=cluster, steps=20) for cache in (False, True)]
    assert runs[1].max_ahead == 4
    assert runs[1].bytes_sent < at_most * runs[0].bytes_sent


def test_a_cache_needs_updates_that_add_up():
    with pytest.raises(Refused, match="has a memory"):
        mh.ssp(cache=True, rule=Momentum(0.1))


# -- warm start -----------------------------------------------------------------------------------


@WHERE
@pytest.mark.parametrize("every", [None, 3], ids=["", "checkpoints"])
def test_in_a_warm_start_the_first_worker_steps_alone(where, every, digits64, tmp_path):
    saves = {} if every is None else {"checkpoint_every": every, "out": tmp_path}
    result = mh.train(digits64, mh.downpour(warm_start=5), cluster=mh.Cluster(workers=3, **where), steps=8, **saves)
    taken = [line["rank"] for line in sorted(result.records, key=lambda line: line.get("time", 0)) if "loss" in line]
    assert len(taken) == 3 * 8
    assert taken[:5] == [0] * 5
    assert {1, 2} <= set(taken[7:])


@WHERE
def test_a_warm_start_ends_with_the_first_worker(where, digits64):
    """However long it should have been: whether the worker has finished or died."""
    knobs = {"steps": 4, "per_worker": True}
    result = mh.train(digits64, mh.downpour(warm_start=100), cluster=mh.Cluster(workers=3, **where), **knobs)
    assert sum("loss" in line for line in result.records) == 3 * 4
    if where:
        dies = mh.Cluster(workers=3, faults=[mh.Die(0, at=result.seconds / 4)], **where)
        survived = mh.train(digits64, mh.downpour(warm_start=100), cluster=dies, steps=8)
        assert [rank for rank, _ in survived.lost] == [0]
        assert {line["rank"] for line in survived.records if "loss" in line} == {0, 1, 2}


# -- codecs and shards compose ----------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("how", ["size", "layer", "round-robin"])
def test_error_feedback_composes_with_sharding(digits64, how, servers):
    """Whatever the shards: all that was pushed plus all that is remembered is all that was computed."""
    computed, memory = {}, {}

    def add(s, w):
        computed[w.rank] = computed.get(w.rank, 0) + w.flat.groups[0].grad.clone()
        memory[w.rank] = s.encoder.memory[0].clone()

    strategy = mh.ssp(rule=Sgd(1e-3), codec=Feedback(TopK(0.02)), shard=how)
    cluster = mh.Cluster(workers=2, servers=servers)
    start = torch.cat([p.detach().reshape(-1) for p in digits64.build(0).parameters()])
    result = mh.train(digits64, probed(strategy, push=add), cluster=cluster, steps=5)
    end = torch.cat([w.reshape(-1) for w in result.weights.values()])
    applied = (start - end) / 1e-3
    assert torch.allclose(applied + sum(memory.values()), sum(computed.values()), rtol=0, atol=1e-9)
    assert result.bytes_sent < 0.6 * mh.train(digits64, mh.ssp(), cluster=cluster, steps=5).bytes_sent


def test_top_k_of_everything_is_dense(digits64):
    cluster = mh.Cluster(workers=2, servers=2)
    dense = mh.train(digits64, mh.bsp_server(), cluster=cluster, steps=4)
    full = mh.train(digits64, mh.bsp_server(codec=Feedback(TopK(1.0))), cluster=cluster, steps=4)
    assert dense.weights_sha256 == full.weights_sha256


@pytest.mark.parametrize("servers", [1, 2, 4])
@pytest.mark.parametrize("how", ["size", "layer", "round-robin"])
def test_bulk_results_do_not_depend_on_the_sharding(digits64, how, servers):
    one = mh.train(digits64, mh.bsp_server(), cluster=mh.Cluster(workers=3), steps=3)
    cut = mh.train(digits64, mh.bsp_server(shard=how), cluster=mh.Cluster(workers=3, servers=servers), steps=3)
    assert cut.weights_sha256 == one.weights_sha256

"""Cards 12 and 16, Downpour and SSP: pinned values on toy T, read rules, identities."""

import pytest
import torch
from toys import number, probed, toy_t

import manyhands as mh
from manyhands.codecs import Feedback, TopK
from manyhands.rules import Sgd
from manyhands.topology.servers.shard import Shard

WHERE = pytest.mark.parametrize("where", [{"servers": 1}, {}, {"hosts": 1}], ids=["server", "co-located", "shared"])
SCHEDULE_A = [0, 1, 0, 1]


@pytest.fixture
def server_values(monkeypatch):
    """What the server held after each update."""
    values, update = [], Shard._update

    def noted(shard, group):
        update(shard, group)
        values.append(shard.holdings[0].weights.item())

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


@pytest.mark.parametrize("how", ["size", "layer"])
def test_the_number_of_shards_does_not_matter_when_pushes_are_atomic(digits64, how):
    order = [0, 1, 1, 0, 0, 1]
    runs = [
        mh.train(digits64, mh.downpour(shard=how), cluster=mh.Cluster(workers=2, servers=servers, order=order))
        for servers in (1, 3)
    ]
    assert runs[0].weights_sha256 == runs[1].weights_sha256


# -- SSP ------------------------------------------------------------------------------------------


@WHERE
def test_ssp_reads_and_blocks_as_the_card_says(where):
    reads = []
    strategy = mh.ssp(staleness=1, lr=0.1)
    probed(strategy, pull=lambda s, w: reads.append((w.rank, w.transport.now(), w.flat.parts[0].weights.item())))
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
        for line in (line for line in result.records if "loss" in line):
            assert line["lag"] == 0
        rows = {True: (1, 1), False: (2, 3)}
        losses = [line["loss"] for line in result.records if "loss" in line]
        for loss in losses:
            a, b = rows[loss == pytest.approx(0.5 * (w - 1) ** 2, abs=1e-12)]
            assert loss == pytest.approx(a / 2 * (w - b) ** 2, abs=1e-12)
            w -= 0.1 * a * (w - b)
        assert number(result) == pytest.approx(w, abs=1e-12)


# -- codecs and shards compose ----------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("how", ["size", "layer"])
def test_error_feedback_composes_with_sharding(digits64, how, servers):
    """Whatever the shards: all that was pushed plus all that is remembered is all that was computed."""
    computed, memory = {}, {}

    def add(s, w):
        computed[w.rank] = computed.get(w.rank, 0) + w.flat.parts[0].grad.clone()
        memory[w.rank] = s.memory[0].clone()

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
@pytest.mark.parametrize("how", ["size", "layer"])
def test_bulk_results_do_not_depend_on_the_sharding(digits64, how, servers):
    one = mh.train(digits64, mh.bsp_server(), cluster=mh.Cluster(workers=3), steps=3)
    cut = mh.train(digits64, mh.bsp_server(shard=how), cluster=mh.Cluster(workers=3, servers=servers), steps=3)
    assert cut.weights_sha256 == one.weights_sha256

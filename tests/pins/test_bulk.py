"""BSP: pinned values on toy T, and its identities."""

import pytest
import torch
from toys import number, probed, toy_t

import manyhands as mh
from manyhands.collectives import ALGORITHMS
from manyhands.core.work import work_of
from manyhands.splits.data import Share
from manyhands.tasks import load

FORMS = {
    **{name: (mh.bsp(lr=0.1, collective=name), {"hosts": 1} if name == "shared" else {}) for name in ALGORITHMS},
    "a server": (mh.bsp_server(lr=0.1), {"servers": 1}),
    "co-located shards": (mh.bsp_server(lr=0.1), {}),
    "shared shards": (mh.bsp_server(lr=0.1), {"hosts": 1}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("steps", "w"), [(1, 0.35), (2, 0.6475), (3, 0.900375)])
def test_toy_t(form, steps, w):
    strategy, where = FORMS[form]
    result = mh.train(toy_t(), strategy, cluster=mh.Cluster(workers=2, **where), steps=steps)
    assert number(result) == pytest.approx(w, abs=1e-9)


def test_a_superstep_lasts_as_long_as_the_slowest_worker():
    cluster = mh.Cluster(workers=2, speeds=[1, 0.25], latency=0, bandwidth="inf")
    result = mh.train(toy_t(seconds=1), mh.bsp(), cluster=cluster, steps=3)
    assert result.seconds == pytest.approx(12, abs=1e-6)
    assert result.waited_seconds == pytest.approx(9, abs=1e-6)


def test_all_replicas_end_with_the_same_bits(digits64):
    ends = {}
    strategy = probed(mh.bsp(), finish=lambda s, w: ends.setdefault(w.rank, w.flat.groups[0].weights.clone()))
    mh.train(digits64, strategy, cluster=mh.Cluster(workers=3), steps=5)
    assert len(ends) == 3
    assert all(torch.equal(ends[0], end) for end in ends.values())


@pytest.mark.parametrize("strategy", [mh.bsp(lr=0.1), mh.bsp_server(lr=0.1)], ids=["collective", "server"])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_equals_one_process_with_the_union_of_the_batches(digits64, plain_sgd, strategy, workers):
    shares = [Share(digits64.data, rank, workers, 32, seed=0) for rank in range(workers)]
    unions = []
    for _ in range(6):
        batches = [share.next_batch() for share in shares]
        unions.append(tuple(torch.cat(fields) for fields in zip(*batches, strict=True)))
    reference = plain_sgd(digits64, unions, lr=0.1)
    result = mh.train(digits64, strategy, cluster=mh.Cluster(workers=workers), steps=6)
    for name, w in reference.items():
        assert torch.allclose(result.weights[name], w, rtol=0, atol=1e-12)


# -- buckets that leave while the backward pass is running ------------------------------------------


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr("manyhands.core.flat.Flat.buckets.__defaults__", (20_000,))


def test_buckets_leave_early_and_change_nothing(digits64, small_buckets):
    early = mh.train(digits64, mh.bsp(), cluster=mh.Cluster(workers=3), steps=4)
    at_once = mh.train(digits64, mh.bsp(collective="native"), cluster=mh.Cluster(workers=3, hosts=1), steps=4)
    for name, w in at_once.weights.items():
        assert torch.allclose(early.weights[name], w, rtol=0, atol=1e-12)


def test_buckets_hide_communication_behind_the_backward_pass():
    """On the sizes of VGG-16 a step with buckets is shorter than computing and summing one after the other."""
    task, cluster = load("vgg16"), mh.Cluster(workers=2, bandwidth="10Gbit", latency=0)
    result = mh.train(task, mh.bsp(collective="ring"), cluster=cluster, steps=1)
    model_bytes = 138_357_544 * 4
    computing = 32 * work_of(task.build(0)).total / 50e9
    summing = model_bytes / 1.25e9  # 2 (P - 1) / P of the model, each way at once
    assert computing < result.seconds < computing + 0.5 * summing

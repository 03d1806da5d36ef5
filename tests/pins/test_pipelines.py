"""Cards 2.0, GPipe and PipeDream: the toy's rows, one process, and delayed weights worked out by hand."""

import pytest
import torch
from toys import chain, probed

import manyhands as mh
from manyhands.core.team import team_size
from manyhands.core.worker import Worker
from manyhands.splits.data import Share
from manyhands.splits.layers import stages
from manyhands.virtual.world import simulate

SEQUENTIAL = {2: [1, 0.9, 0.8271, 0.770519, 0.724773], 3: [1, 0.9, 0.840951, 0.798893, 0.766351]}
PIPEDREAM = {
    2: [[1, 0.9, 0.819, 0.759951, 0.714569], [1, 0.9, 0.81, 0.74439, 0.694459]],
    3: [
        [1, 0.9, 0.819, 0.765856, 0.732405, 0.708966],
        [1, 0.9, 0.819, 0.759951, 0.723191, 0.697932],
        [1, 0.9, 0.81, 0.74439, 0.703946, 0.676676],
    ],
}


def weights_by_update(strategy, stages, steps, update="update"):
    """Every stage's weight after 0, 1, 2, ... updates."""
    seen = {}

    def note(s, w):
        seen.setdefault(w.rank, []).append(w.flat.groups[0].weights.item())

    looks = {"setup": note, update: note}
    mh.train(chain(stages), probed(strategy, **looks), cluster=mh.Cluster(workers=stages), steps=steps)
    return [seen[rank] for rank in sorted(seen)]


@pytest.mark.parametrize("stages", [2, 3])
def test_the_sequential_row(stages):
    rows = weights_by_update(mh.gpipe(lr=0.1, micro_batches=1), stages, len(SEQUENTIAL[stages]) - 1, update="step")
    assert rows == [pytest.approx(SEQUENTIAL[stages], abs=5e-7)] * stages


@pytest.mark.parametrize("stages", [2, 3])
def test_the_pipedream_rows(stages):
    rows = weights_by_update(mh.pipedream(lr=0.1), stages, len(PIPEDREAM[stages][0]) - 1)
    assert rows == [pytest.approx(row, abs=5e-7) for row in PIPEDREAM[stages]]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_gpipe_is_one_process(digits64, plain_sgd, workers, micro_batches):
    share = Share(digits64.data, 0, 1, 32, seed=0)
    reference = plain_sgd(digits64, [share.next_batch() for _ in range(4)], 0.1)
    strategy = mh.gpipe(lr=0.1, micro_batches=micro_batches)
    result = mh.train(digits64, strategy, cluster=mh.Cluster(workers=workers), steps=4)
    for name, w in reference.items():
        assert torch.allclose(result.weights[name], w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("workers", [3, 4])
def test_pipedream_is_sgd_with_delayed_weights(digits64, workers):
    """w_s(t+1) = w_s(t) - lr grad_s f(w_1(t-K+1), ..., w_K(t)), versions before the start being the start."""
    steps, lr = 8, 0.1
    share = Share(digits64.data, 0, 1, 32, seed=0)
    model = digits64.build(0)
    cut = stages(model, workers)
    history = [[[p.detach().clone() for p in stage.parameters()] for stage in cut]]
    for t in range(steps):
        for s, stage in enumerate(cut):
            version = history[max(0, t - (workers - 1 - s))][s]
            for p, w in zip(stage.parameters(), version, strict=True):
                p.data.copy_(w)
        model.zero_grad()
        digits64.loss_of(model, share.next_batch()).backward()
        newest = history[-1]
        history.append(
            [
                [w - lr * p.grad for p, w in zip(stage.parameters(), newest[s], strict=True)]
                for s, stage in enumerate(cut)
            ]
        )
    result = mh.train(digits64, mh.pipedream(lr=lr), cluster=mh.Cluster(workers=workers), steps=steps)
    expected = [w for stage in history[-1] for w in stage]
    for got, want in zip(result.weights.values(), expected, strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-12)


def test_a_stage_keeps_no_more_versions_than_it_must(digits64):
    kept = {}

    def note(s, w):
        kept[w.rank] = max(kept.get(w.rank, 0), s.weights.kept)

    mh.train(digits64, probed(mh.pipedream(), backward=note), cluster=mh.Cluster(workers=4), steps=12)
    assert kept == {0: 4, 1: 3, 2: 2, 3: 1}


def test_gpipe_lasts_as_long_as_its_picture(digits64):
    """(M + K - 1) tF + (M + K - 2) tB + tB' if links cost nothing; tB = 2 tF, and tB' = tF is that of stage 0."""
    task = chain(4)
    task = mh.Task(task.model, task.data, task.loss, batch_size=4, work=50e9)
    cluster = mh.Cluster(workers=4, latency=0, bandwidth="inf")
    result = mh.train(task, mh.gpipe(micro_batches=4), cluster=cluster, steps=1)
    tF = 1 / (4 * 1 + 3 * 2 + 1)  # seconds for one of four samples, which take a second at all stages together
    assert result.seconds == pytest.approx((4 + 4 - 1) * tF + (4 + 4 - 2) * 2 * tF + tF, rel=1e-6)


@pytest.mark.parametrize("make", [mh.gpipe, mh.pipedream])
def test_a_resumed_run_that_is_stopped_before_its_first_step_has_nothing_to_drain(make):
    task = chain(2)

    def program(transport):
        strategy = make()
        size = team_size(strategy, transport)
        w = Worker(transport, task, task.build(0), seed=0, steps=12, batch_size=task.batch_size, team_size=size)
        w.step = 8
        strategy.setup(w)
        strategy.quiesce(w)
        strategy.finish(w)
        return w.flat.groups[0].weights.item()

    assert simulate(mh.Cluster(workers=2), program).results == [1, 1]

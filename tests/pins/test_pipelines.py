"""Cards 2.0, GPipe and PipeDream: the toy's rows, one process, and delayed weights worked out by hand."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset
from toys import chain, probed

import manyhands as mh
from manyhands.core.team import team_size
from manyhands.core.work import work_of
from manyhands.core.worker import Worker
from manyhands.splits import schedules
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


@pytest.mark.parametrize("make", [mh.gpipe, mh.one_f_one_b, mh.zero_bubble], ids=lambda make: make.__name__)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_a_pipeline_that_flushes_is_one_process(digits64, plain_sgd, make, workers, micro_batches):
    share = Share(digits64.data, 0, 1, 32, seed=0)
    reference = plain_sgd(digits64, [share.next_batch() for _ in range(4)], 0.1)
    strategy = make(lr=0.1, micro_batches=micro_batches)
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


FLUSHING = {
    "gpipe": mh.gpipe(replay=False),
    "gpipe with replay": mh.gpipe(),
    "1f1b": mh.one_f_one_b(),
    "1f1b, 8": mh.one_f_one_b(micro_batches=8),
    "interleaved": mh.interleaved(),
    "interleaved, 8": mh.interleaved(micro_batches=8),
    "zero bubble": mh.zero_bubble(),
    "zero bubble, 8": mh.zero_bubble(micro_batches=8),
}


def unequal(stages, micro_batches):
    """Linear layers of different widths; a micro-batch of one sample takes a second on all of them together."""
    generator = torch.Generator().manual_seed(0)
    widths = [2, *(8, 3, 16, 5, 9, 2, 7)[: stages - 1], 4]
    x, y = (torch.randn(8, n, generator=generator) for n in (widths[0], widths[-1]))
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)]
    return mh.Task(
        lambda: copy.deepcopy(nn.Sequential(*layers)),
        TensorDataset(x, y),
        mse_loss,
        batch_size=micro_batches,
        work=50e9,
    )


def length(rows, seconds):
    """When the last pass ends, if each begins as soon as its rank is free and its input is there."""
    ends = {}
    last = max(s for row in rows for _, _, s in row)
    left = [list(row) for row in rows]
    free = [0.0] * len(rows)
    while any(left):
        for rank, row in enumerate(left):
            while row:
                op, m, s = row[0]
                above = [("I" if (op == "I") else "B", m, s + 1)] if s < last else []
                needs = {"F": [("F", m, s - 1)] if s else [], "W": [("I", m, s)]}.get(op, [("F", m, s), *above])
                if not all(need in ends for need in needs):
                    break
                begin = max([free[rank], *(ends[need] for need in needs)])
                ends[op, m, s] = free[rank] = begin + seconds(op, s)
                row.pop(0)
    return max(ends.values())


@pytest.mark.parametrize("name", FLUSHING)
@pytest.mark.parametrize("workers", [2, 4])
def test_a_pipeline_lasts_as_long_as_its_picture_with_unequal_stages_too(name, workers):
    """Links cost nothing, and the channels of as many messages as are in flight are no limit."""
    strategy = FLUSHING[name]
    team = strategy.team
    count = workers * (team.chunks if team.schedule == "interleaved" else 1)
    task = unequal(count, team.micro_batches)
    counted = work_of(task.build(0))
    layers = [counted.of(str(s)) for s in range(count)]
    replays = name == "gpipe with replay"

    def seconds(op, s):
        one = layers[s]
        parts = {"F": one.forward, "B": one.backward + replays * one.forward, "I": one.to_input, "W": one.to_weights}
        return parts[op] / 50e9

    schedule = getattr(schedules, team.schedule.replace("-", "_"))
    cluster = mh.Cluster(workers=workers, latency=0, bandwidth="inf")
    result = mh.train(task, strategy, cluster=cluster, steps=1)
    assert layers[0].to_input == 0 and len({layer.forward for layer in layers}) > 1
    assert result.seconds == pytest.approx(length(schedule(workers, team.micro_batches), seconds), rel=1e-6)


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

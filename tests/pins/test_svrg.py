"""Card 11, AsySVRG: pinned values, identities, and what must be the same for both gradients of a step."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from toys import SECOND, Parabola, noisy, parabolas, probed, toy_t

import manyhands as mh
from manyhands.rules import Sgd
from manyhands.runtime.checkpoint import load_checkpoint
from manyhands.splits.data import Share

LR = 0.1


def test_three_updates_by_hand():
    """mu = -3.5. Worker 1 takes 1.75 times as long as worker 0: u^ = 0, 0 and 0.35 are read, for i = 1, 2 and 1."""
    us = []
    strategy = probed(mh.asysvrg(lr=LR), descend=lambda s, w: us.append((w.rank, s.u[0].item())))
    mh.train(toy_t(), strategy, cluster=mh.Cluster(workers=2, speeds=[1, 1 / 1.75]), steps=3)
    assert [rank for rank, _ in us][:3] == [0, 1, 0]
    assert [u for _, u in us][:3] == pytest.approx([0.35, 0.70, 1.015], abs=1e-9)


def gradient(task, model, batch):
    return torch.autograd.grad(task.loss_of(model, batch), list(model.parameters()))


@torch.no_grad()
def move(model, step, lr=LR):
    for p, v in zip(model.parameters(), step, strict=True):
        p -= lr * v


def close(result, model):
    for name, p in model.named_parameters():
        torch.testing.assert_close(result.weights[name], p.detach(), rtol=0, atol=1e-12)


def test_one_worker_is_svrg():
    task = noisy()
    result = mh.train(task, mh.asysvrg(lr=LR), cluster=mh.Cluster(workers=1), steps=2 * 24 + 10)
    model, origin, share = task.build(0), task.build(0), Share(task.data, 0, 1, 3, seed=0)
    for step in range(2 * 24 + 10):
        batch = share.next_batch()
        if step % 24 == 0:
            origin.load_state_dict(model.state_dict())
            mu = gradient(task, origin, task.data.tensors)
        if step % 24 >= 8:
            now, then = gradient(task, model, batch), gradient(task, origin, batch)
            move(model, [g - g0 + m for g, g0, m in zip(now, then, mu, strict=True)])
    close(result, model)
    assert result.samples == (2 * 3 * 24) + 30, "an epoch consumes 3 n samples"


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_first_inner_step_has_no_noise(workers):
    """At u^ = u0 it is v = mu whatever the mini-batch: workers of one speed all read u0: P steps of GD."""
    task = replace(noisy(), work=SECOND)
    result = mh.train(task, mh.asysvrg(lr=LR), cluster=mh.Cluster(workers=workers), steps=8 // workers + 1)
    model = task.build(0)
    move(model, gradient(task, model, task.data.tensors), workers * LR)
    close(result, model)


def test_with_one_sample_it_is_gradient_descent():
    result = mh.train(parabolas((1, 1)), mh.asysvrg(lr=LR), cluster=mh.Cluster(workers=1), steps=9)
    w = 0.0
    for _ in range(6):
        w -= LR * (w - 1)
    assert result.weights["w"].item() == pytest.approx(w, abs=1e-12)


def test_without_a_rate_nothing_moves():
    result = mh.train(toy_t(), mh.asysvrg(rule=Sgd(lambda samples: 0.0)), cluster=mh.Cluster(workers=2), steps=9)
    assert result.weights["w"].item() == 0


def test_mu_is_complete_and_the_same_for_all_before_any_worker_moves():
    task, seen, moved = noisy(), {}, []

    def look(s, w):
        seen.setdefault((w.rank, w.step), s.mu[0].clone())
        assert torch.equal(s.u[0], s.origin[0]) or moved

    strategy = probed(mh.asysvrg(lr=LR), complete_mu=look, descend=lambda s, w: moved.append(w.rank))
    mh.train(task, strategy, cluster=mh.Cluster(workers=4, speeds=[1, 8, 0.2, 3]), steps=3)
    full = torch.cat([g.reshape(-1) for g in gradient(task, task.build(0), task.data.tensors)])
    assert sorted(seen) == [(rank, 2) for rank in range(4)]
    for mu in seen.values():
        assert torch.equal(mu, seen[0, 2])
        torch.testing.assert_close(mu, full, rtol=0, atol=1e-12)


def test_both_gradients_see_the_same_dropout_and_statistics_count_every_mini_batch_once():
    def model():
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)).double()

    noise = []

    def look(s, w):
        noise.append((w.flat.groups[0].grad - s.mu[0]).abs().max().item())

    task = mh.Task(model, noisy().data, nn.functional.mse_loss, 3)
    result = mh.train(task, probed(mh.asysvrg(lr=LR), descend=look), cluster=mh.Cluster(workers=1), steps=24)
    assert noise[0] == 0 < min(noise[1:])
    assert result.buffers["1.num_batches_tracked"].item() == 24


def test_what_no_mini_batch_touches_is_left_alone():
    class Half(Parabola):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))

    a = torch.ones(2, dtype=torch.float64)
    result = mh.train(
        mh.Task(Half, TensorDataset(a, a), batch_size=1),
        mh.asysvrg(rule=Sgd(0.1, 0.1)),
        steps=6,
        cluster=mh.Cluster(workers=2),
    )
    assert result.weights["unused"].tolist() == [1, 1] and result.weights["w"].item() > 0


@pytest.mark.parametrize("every", [3, 8, 11, 24, 25])
def test_a_lone_worker_continues_in_the_middle_of_an_epoch(every, tmp_path):
    task, settings = noisy(), {"cluster": mh.Cluster(workers=1), "checkpoint_every": every}
    never = mh.train(task, mh.asysvrg(lr=LR), cluster=mh.Cluster(workers=1), steps=60)
    mh.train(task, mh.asysvrg(lr=LR), steps=every, out=tmp_path, **settings)
    again = mh.train(task, mh.asysvrg(lr=LR), steps=60, out=tmp_path, resume=tmp_path, **settings)
    assert again.weights_sha256 == never.weights_sha256


def test_another_number_of_workers_begins_an_epoch(tmp_path):
    task = noisy()
    mh.train(task, mh.asysvrg(), cluster=mh.Cluster(workers=2), steps=6, out=tmp_path, checkpoint_every=6)
    assert load_checkpoint(tmp_path / "checkpoints").state["epoch"].tolist() == [2, 3, 4, 8, 6]
    begun = []
    strategy = probed(mh.asysvrg(), begin=lambda s, w: begun.append((w.rank, w.step)))
    mh.train(task, strategy, cluster=mh.Cluster(workers=3), steps=7, resume=tmp_path)
    assert sorted(begun) == [(0, 4), (1, 4), (2, 4)]

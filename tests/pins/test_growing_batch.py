"""Card 21, adaptive mini-batch size: the noise scale, the schedule, and its identities."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from toys import number, probed, toy_t

import manyhands as mh
from manyhands.rules import Sgd, Torch
from manyhands.splits.data import Share
from manyhands.strategies.growing_batch import GrowingBatch, noise_scale

TWO = mh.Cluster(workers=2)


def test_the_noise_scale_falls_alike_with_a_slower_rate_and_with_a_larger_batch():
    assert noise_scale(0.1, 50_000, 128, 0.9) == pytest.approx(390.625)
    assert noise_scale(0.1 / 5, 50_000, 128, 0.9) == pytest.approx(78.125)
    assert noise_scale(0.1, 50_000, 5 * 128, 0.9) == pytest.approx(78.125)


@pytest.mark.parametrize(
    ("factor", "most", "phases"),
    [
        (5, 125, [(1, 1), (5, 1), (25, 1), (125, 1)]),
        (5, 25, [(1, 1), (5, 1), (25, 1), (25, 5)]),
        (5, 1, [(1, 1), (1, 5), (1, 25), (1, 125)]),
        (2, 3, [(1, 1), (2, 1), (2, 2), (2, 4)]),
        (1, 25, [(1, 1), (1, 1), (1, 1), (1, 1)]),
    ],
)
def test_the_batch_grows_as_long_as_it_may_then_the_rate_falls(factor, most, phases):
    strategy = GrowingBatch(Sgd(0.1), factor, most=most)
    assert [strategy._phase_at(part) for part in (0.0, 0.3, 0.79, 0.8)] == phases
    noise = [1 / (batch * slower) for batch, slower in phases]
    assert noise == pytest.approx([factor**-n for n in range(4)]), "whichever way, it is equally small"


def test_a_factor_of_one_is_bsp(digits64):
    run = {"cluster": mh.Cluster(workers=3), "steps": 10}
    constant = mh.train(digits64, mh.adaptive_batch(lr=0.1, factor=1), **run)
    reference = mh.train(digits64, mh.bsp(lr=0.1), **run)
    for name, w in reference.weights.items():
        assert torch.allclose(constant.weights[name], w, rtol=0, atol=1e-12)


def test_a_batch_that_may_not_grow_is_a_rate_that_falls():
    """Toy T, ten steps: 3 with lr 0.1, 3 with 0.05, 2 with 0.025, 2 with 0.0125."""
    w = 0.0
    for lr in [0.1] * 3 + [0.05] * 3 + [0.025] * 2 + [0.0125] * 2:
        w -= lr * ((w - 1) + 2 * (w - 3)) / 2
    result = mh.train(toy_t(), mh.adaptive_batch(lr=0.1, factor=2, most=1), cluster=TWO, steps=10)
    assert number(result) == pytest.approx(w, abs=1e-9)


@pytest.mark.parametrize("rule", [Sgd(0.1), Torch("SGD", lr=0.1)], ids=["ours", "torch's"])
def test_the_rate_falls_whatever_the_rule(rule):
    slow, fast = (
        number(mh.train(toy_t(), GrowingBatch(rule, 10, (milestone,), most=1), cluster=TWO, steps=2))
        for milestone in (0.5, 0.9)
    )
    first = 0.35
    assert (slow - first) == pytest.approx((fast - first) / 10, abs=1e-12)


def test_milestones_may_be_in_samples():
    parts, samples = (
        number(mh.train(toy_t(), GrowingBatch(Sgd(0.1), 2, marks, most=2), cluster=TWO, steps=10))
        for marks in ((0.3, 0.6), (6, 12))
    )
    assert parts == samples


def test_large_batches_are_the_union_of_small_ones(digits64, plain_sgd):
    """Ten steps: three alone, then 2 + 2 + 2 (the last of them before 0.8), the rest in what is left of one of 4."""
    shares = [Share(digits64.data, rank, 2, 32, seed=0) for rank in range(2)]
    unions = []
    for size in (1, 1, 1, 2, 2, 3):
        batches = [share.next_batch() for _ in range(size) for share in shares]
        unions.append(tuple(torch.cat(fields) for fields in zip(*batches, strict=True)))
    updates = []
    strategy = probed(GrowingBatch(Sgd(0.1), 2, (0.3, 0.7), most=4), update=lambda s, w: updates.append(w.step))
    result = mh.train(digits64, strategy, cluster=TWO, steps=10)
    assert updates[::2] == [0, 1, 2, 4, 6, 10]
    reference = plain_sgd(digits64, unions, lr=0.1)
    for name, w in reference.items():
        assert torch.allclose(result.weights[name], w, rtol=0, atol=1e-12)


def test_fewer_updates_send_less(digits64):
    sent = [mh.train(digits64, mh.adaptive_batch(factor=f), cluster=TWO, steps=30).bytes_sent for f in (1, 2)]
    assert sent[1] < 0.7 * sent[0]


class Slope(nn.Module):
    """A loss whose gradient is 1 everywhere."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return (self.w * x).mean()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_gradient_counts_once_however_many_workers_continue(workers, tmp_path):
    """Two workers are saved within a large mini-batch; the mean of gradients that are all 1 must be 1."""
    task = mh.Task(Slope, TensorDataset(torch.ones(12, dtype=torch.float64)), batch_size=1)
    strategy = GrowingBatch(Sgd(0.1), 4, (0.01,), most=4)
    mh.train(task, strategy, cluster=TWO, steps=3, out=tmp_path, checkpoint_every=2)
    saved = mh.load_checkpoint(tmp_path / "checkpoints" / "step-00000002")
    assert [saved.state[f"worker{rank}/count"].item() for rank in (0, 1)] == [1, 1]
    resume = tmp_path / "checkpoints" / "step-00000002"
    result = mh.train(task, strategy, cluster=mh.Cluster(workers=workers), steps=8, resume=resume)
    updates = [1, 5, 8]  # after so many steps; the last one with what is left
    assert number(result) == pytest.approx(-0.1 * len(updates), abs=1e-12)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: mh.adaptive_batch(factor=0), "factor is 0, but must be >= 1"),
        (lambda: mh.adaptive_batch(most=0), "most is 0, but must be >= 1"),
        (lambda: GrowingBatch(Sgd(0.1), milestones=(0.5, 0.3)), "milestones is .* but must be rising"),
        (lambda: GrowingBatch(Sgd(0.1), milestones=(0.0, 0.3)), "but must be rising and > 0"),
    ],
)
def test_what_makes_no_sense_is_refused(make, says):
    with pytest.raises(mh.Refused, match=says):
        make()

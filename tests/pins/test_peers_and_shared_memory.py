"""Cards 9, 10 and 19, Hogwild!, HogBatch and AD-PSGD: pinned values, invariants, identities."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from toys import probed, toy_t

import manyhands as mh
from manyhands.core.rule import UpdateContext
from manyhands.rules import Adagrad, Momentum, Sgd
from manyhands.splits.data import Share

# -- Hogwild! -------------------------------------------------------------------------------------


class TwoCoordinates(nn.Module):
    """Each sample has a parabola on one coordinate only."""

    def __init__(self):
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2)])

    def forward(self, coordinate, a, b):
        w = self.w[int(coordinate[0])]
        return (0.5 * a * (w - b) ** 2).mean()


@pytest.mark.parametrize("order", sorted(set(permutations([0, 0, 0, 1, 1, 1]))))
def test_disjoint_supports_give_the_sequential_result_in_any_interleaving(order):
    data = TensorDataset(torch.tensor([0, 1]), torch.tensor([1.0, 2.0]).double(), torch.tensor([1.0, 3.0]).double())
    task = mh.Task(TwoCoordinates, data, batch_size=1)
    result = mh.train(task, mh.hogwild(lr=0.1), cluster=mh.Cluster(workers=2, order=order))
    assert [w.item() for w in result.weights.values()] == pytest.approx([0.271, 1.464], abs=1e-9)


def test_hogwild_applies_stale_gradients_in_full():
    """Both workers read 0; each write falls on what is there: -0.1 g1(0) - 0.1 g2(0)."""
    result = mh.train(toy_t(), mh.hogwild(lr=0.1), cluster=mh.Cluster(workers=2, order=[0, 1]))
    (w,) = result.weights.values()
    assert w.item() == pytest.approx(0.7, abs=1e-12)


class Rows(nn.Module):
    """The same with one sparse table whose rows are the coordinates, and perhaps something dense beside it."""

    def __init__(self, rows=2, dense=False):
        super().__init__()
        self.table = nn.Embedding(rows, 1, sparse=True, dtype=torch.float64)
        self.dense = nn.Parameter(torch.ones(1, dtype=torch.float64)) if dense else 1.0
        nn.init.zeros_(self.table.weight)

    def forward(self, row, a, b):
        return (0.5 * a * (self.dense * self.table(row).squeeze(-1) - b) ** 2).mean()


def rows(samples=2, batch_size=1, **knobs):
    a, b = (1.0 + torch.arange(samples).double() % 2), (1.0 + 2 * (torch.arange(samples).double() % 2))
    return mh.Task(
        lambda: Rows(**knobs), TensorDataset(torch.arange(samples) % knobs.get("rows", 2), a, b), None, batch_size
    )


@pytest.mark.parametrize("method", [mh.hogwild, mh.hogbatch])
@pytest.mark.parametrize("order", sorted(set(permutations([0, 0, 0, 1, 1, 1]))))
def test_so_do_disjoint_rows_of_one_sparse_table(order, method):
    result = mh.train(rows(), method(lr=0.1), cluster=mh.Cluster(workers=2, order=order))
    (table,) = result.weights.values()
    assert table.flatten().tolist() == pytest.approx([0.271, 1.464], abs=1e-9)


@pytest.mark.parametrize("rule", [Sgd(0.1), Adagrad(0.1), Sgd(0.1, weight_decay=0.1), Momentum(0.1)])
def test_one_worker_with_sparse_rows_is_sequential_bit_for_bit(rule):
    """Rows come twice in a mini-batch, and some never; a rule that moves those too sees them dense."""
    task = rows(12, batch_size=5, rows=9, dense=True)
    result = mh.train(task, mh.hogwild(rule=rule), cluster=mh.Cluster(workers=1), steps=6)
    model, share = task.build(0), Share(task.data, 0, 1, 5, seed=0)
    states = [rule.init(p) for p in model.parameters()]
    for number in range(6):
        model.zero_grad()
        task.loss_of(model, share.next_batch()).backward()
        with torch.no_grad():
            for p, state in zip(model.parameters(), states, strict=True):
                p += rule(p.grad.to_dense() if p.grad.is_sparse else p.grad, UpdateContext(p, state, number + 1))
    assert all(torch.equal(result.weights[name], w) for name, w in model.named_parameters())


def test_an_update_touches_nothing_but_its_rows():
    """Wherever the flat gradient was read it would bring NaN, and wherever it was written it would lose it."""
    seen = {}

    def poison(s, w):
        w.flat.groups[0].outgoing.fill_(float("nan"))

    def look(s, w):
        seen[w.step] = w.flat.groups[0].grad.isnan().all().item(), s.weights[0].clone()

    mh.train(
        rows(1, rows=4), probed(mh.hogwild(lr=0.1), setup=poison, step=look), cluster=mh.Cluster(workers=1), steps=2
    )
    assert [untouched for untouched, _ in seen.values()] == [True, True]
    assert seen[1][1].tolist() == pytest.approx([0.19, 0, 0, 0], abs=1e-12)


def test_the_time_of_an_update_is_that_of_its_rows():
    few, many = (
        mh.train(replace(rows(1, rows=size), work=1), mh.hogwild(), cluster=mh.Cluster(workers=1), steps=1).seconds
        for size in (10, 100_000)
    )
    assert few == many


# -- HogBatch -------------------------------------------------------------------------------------


def test_hogbatch_computes_on_a_copy_that_others_do_not_write():
    copies = {}

    def look(s, w):
        copies[w.rank, w.step] = w.flat.groups[0].weights.item(), s.weights[0].item()

    strategy = probed(mh.hogbatch(lr=0.1), step=look)
    mh.train(toy_t(), strategy, cluster=mh.Cluster(workers=2, order=[0, 1, 0]))
    assert copies[0, 0] == pytest.approx((0, 0.1)), "read 0, wrote 0.1"
    assert copies[1, 0] == pytest.approx((0, 0.7)), "read 0 too, and still has it"
    assert copies[0, 1] == pytest.approx((0.1, 0.79)), "read 0.1 before the other wrote"


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 0, 0, 1], [1, 1, 0, 1, 0, 0]])
def test_with_one_sample_at_a_time_hogbatch_is_hogwild(order):
    one, other = (
        mh.train(toy_t(), method(lr=0.1), cluster=mh.Cluster(workers=2, order=order)).weights_sha256
        for method in (mh.hogwild, mh.hogbatch)
    )
    assert one == other


# -- AD-PSGD --------------------------------------------------------------------------------------

EVENTS = [(0.1, 0), (0.05, 0.65), (0.44, 0.35)]


def xs_after(task, strategy, **run):
    xs = {}
    probed(strategy, finish=lambda s, w: xs.setdefault(w.rank, s.own.x[0].clone()))
    result = mh.train(task, strategy, **run)
    return [xs[rank] for rank in sorted(xs)], result


@pytest.mark.parametrize("events", [1, 2, 3])
def test_ad_psgd_by_events(events):
    xs, result = xs_after(toy_t(), mh.ad_psgd(lr=0.1), cluster=mh.Cluster(workers=2, order=[0, 1, 0][:events]))
    assert [x.item() for x in xs] == pytest.approx(EVENTS[events - 1], abs=1e-9)
    (mean,) = result.weights.values()
    assert mean.item() == pytest.approx(sum(EVENTS[events - 1]) / 2, abs=1e-9)


@pytest.mark.parametrize("graph", ["ring", "complete", "exponential", "torus", "random"])
@pytest.mark.parametrize("speeds", [[1] * 6, [1, 0.7, 2, 1.3, 0.4, 1]])
def test_averaging_keeps_the_mean(digits64, graph, speeds):
    """With steps too small to see, only averaging moves the weights: their mean stays, their spread shrinks."""
    start = {}

    def scatter(s, w):
        noise = torch.Generator().manual_seed(w.rank)
        torch._foreach_copy_(s.own.x, [torch.randn(x.shape, generator=noise, dtype=x.dtype) for x in s.own.x])
        start[w.rank] = s.own.x[0].clone()

    strategy = probed(mh.ad_psgd(rule=Sgd(1e-300), graph=graph), setup=scatter)
    xs, _ = xs_after(digits64, strategy, cluster=mh.Cluster(workers=6, speeds=speeds), steps=10)
    before, after = torch.stack(list(start.values())), torch.stack(xs)
    assert torch.allclose(after.mean(0), before.mean(0), rtol=0, atol=1e-12)
    assert after.std(0).mean() < 0.35 * before.std(0).mean()


def test_each_event_moves_the_mean_by_its_own_gradient_only(digits64):
    """mean(x) changes by -lr g / P per event, whatever was averaged: follow it through a run."""
    steps, first = [], {}

    def begin(s, w):
        first[w.rank] = s.own.x[0].clone()

    def note(s, w):
        steps.append(w.flat.groups[0].grad.clone())

    xs, _ = xs_after(
        digits64,
        probed(mh.ad_psgd(lr=0.1), setup=begin, step=note),
        cluster=mh.Cluster(workers=4, speeds=[1, 0.7, 2, 1.3]),
        steps=5,
    )
    moved = torch.stack(xs).mean(0) - torch.stack(list(first.values())).mean(0)
    assert torch.allclose(moved, -0.1 * torch.stack(steps).sum(0) / 4, rtol=0, atol=1e-12)


def test_with_two_sides_only_one_initiates(digits64):
    initiators = set()

    class Watched(type(mh.ad_psgd())):
        def _chosen(self, w):
            for rank in super()._chosen(w):
                initiators.add(w.rank)
                yield rank

    strategy = mh.ad_psgd(bipartite=True)
    strategy.__class__ = Watched
    mh.train(digits64, strategy, cluster=mh.Cluster(workers=4), steps=3)
    assert initiators == {0, 2}

"""Cards 9 and 19, Hogwild! and AD-PSGD: pinned values, invariants, identities."""

from itertools import permutations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from toys import probed, toy_t

import manyhands as mh
from manyhands.rules import Sgd

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
        s.own.place([torch.randn(x.shape, generator=noise, dtype=x.dtype) for x in s.own.x])
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
        steps.append(w.flat.parts[0].grad.clone())

    xs, _ = xs_after(
        digits64,
        probed(mh.ad_psgd(lr=0.1), setup=begin, step=note),
        cluster=mh.Cluster(workers=4, speeds=[1, 0.7, 2, 1.3]),
        steps=5,
    )
    moved = torch.stack(xs).mean(0) - torch.stack(list(first.values())).mean(0)
    assert torch.allclose(moved, -0.1 * torch.stack(steps).sum(0) / 4, rtol=0, atol=1e-12)


def test_with_two_sides_only_one_initiates(digits64):
    offers = []
    strategy = mh.ad_psgd(bipartite=True)
    probed(strategy, begin=lambda s, w: offers.append((w.rank, s.pairing.open)))
    mh.train(digits64, strategy, cluster=mh.Cluster(workers=4), steps=3)
    initiators = {rank for rank, peer in offers if peer is not None}
    assert initiators == {0, 2}

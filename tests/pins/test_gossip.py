"""Cards 20 and 20b, gossiping SGD and D-PSGD: pinned values, invariants, identities."""

from collections import Counter
from itertools import pairwise, product
from random import Random

import pytest
import torch
from toys import parabolas, probed, toy_t

import manyhands as mh
from manyhands.peers import mixing
from manyhands.rules import Sgd
from manyhands.splits.data import Share
from manyhands.strategies.gossip import random_order

GRAPHS = ["ring", "complete", "exponential", "torus", "random"]
MODES = ["push", "pull", "pairwise"]
STILL = Sgd(1e-300)
"""Steps too small to see: only averaging moves the weights."""
LR = 0.1

every_graph = pytest.mark.parametrize("graph", GRAPHS)
every_mode = pytest.mark.parametrize("mode", MODES)
either_order = pytest.mark.parametrize("mix", ["beside", "after"])


def starting_at(strategy, *values, **looks):
    """The strategy, with worker k at the k-th value."""

    def begin(s, w):
        torch._foreach_copy_(s.own.x, [torch.full_like(x, values[w.rank]) for x in s.own.x])
        s.own.show()

    return probed(strategy, setup=begin, **looks)


def scattered(strategy, start, **looks):
    """The strategy, with every worker somewhere else; `start` tells where."""

    def begin(s, w):
        noise = torch.Generator().manual_seed(w.rank)
        torch._foreach_copy_(s.own.x, [x + 0.1 * torch.randn(x.shape, generator=noise, dtype=x.dtype) for x in s.own.x])
        s.own.show()
        start[w.rank] = s.own.x[0].clone()

    return probed(strategy, setup=begin, **looks)


def meeting(strategy, *peers):
    """The strategy, with worker k always meeting the k-th of these peers."""
    strategy.__class__ = type("Arranged", (type(strategy),), {"_chosen": lambda self, w: iter([peers[w.rank]])})
    return strategy


def ending_in(xs):
    return {"answer": lambda s, w: xs.setdefault(w.rank, s.own.x[0].clone())}


def ends(task, strategy, **run):
    """Where every living worker ends, in order of rank, and the result."""
    xs = {}
    result = mh.train(task, probed(strategy, **ending_in(xs)), **run)
    return [xs[rank] for rank in sorted(xs)], result


def numbers(xs):
    return [x.item() for x in xs]


def idle(workers):
    """A toy for each worker, which nobody learns."""
    return parabolas(*[(1, 0)] * workers)


# -- D-PSGD by hand -------------------------------------------------------------------------------

T_BESIDE = [(0.1, 0.6), (0.44, 0.83), (0.691, 1.069)]
T_AFTER = [(0.35, 0.35), (0.6475, 0.6475)]


@pytest.mark.parametrize(
    ("mix", "steps", "expected"),
    [
        *(("beside", n + 1, xs) for n, xs in enumerate(T_BESIDE)),
        *(("after", n + 1, xs) for n, xs in enumerate(T_AFTER)),
    ],
)
def test_d_psgd_step_by_step(mix, steps, expected):
    xs, result = ends(toy_t(), mh.d_psgd(lr=LR, mix=mix), cluster=mh.Cluster(workers=2), steps=steps)
    assert numbers(xs) == pytest.approx(expected, abs=1e-9)
    (mean,) = result.weights.values()
    assert mean.item() == pytest.approx(sum(expected) / 2, abs=1e-9)


def recorded(task, strategy, workers, steps, seed=0, cluster=None):
    """Every worker's x before the first and after every step, and its gradients: [step, worker, parameter]."""
    xs, gs, start = {}, {}, {}

    def note(s, w):
        xs.setdefault(w.rank, [start[w.rank]]).append(s.own.x[0].clone())
        gs.setdefault(w.rank, []).append(w.flat.groups[0].grad.clone())

    strategy = scattered(strategy, start, step=note)
    mh.train(task, strategy, cluster=cluster or mh.Cluster(workers=workers), steps=steps, seed=seed)
    return [torch.stack([torch.stack(rows[rank]) for rank in range(workers)], 1) for rows in (xs, gs)]


def matrix(graph, workers, seed):
    rows = [mixing(graph, rank, workers, seed) for rank in range(workers)]
    return torch.tensor([[row.get(rank, 0.0) for rank in range(workers)] for row in rows], dtype=torch.float64)


@either_order
@every_graph
@pytest.mark.parametrize("workers", [2, 5, 6])
def test_d_psgd_is_its_equation(graph, mix, workers):
    """With decay, which is part of the step at x_i and must not see what mixing makes of it."""
    a, b = torch.tensor([(1, 1), (2, 3), (0.5, -1), (3, 2), (1, 7), (2, 0)][:workers], dtype=torch.float64).T
    strategy = mh.d_psgd(rule=Sgd(LR, weight_decay=0.2), graph=graph, mix=mix)
    xs, _ = recorded(parabolas(*zip(a, b, strict=True)), strategy, workers, steps=4, seed=3)
    W = matrix(graph, workers, seed=3)
    for x, after in pairwise(xs.squeeze(2)):
        step = -LR * (a * (x - b) + 0.2 * x)
        expected = W @ x + step if mix == "beside" else W @ (x + step)
        assert torch.allclose(after, expected, rtol=0, atol=1e-9)


@either_order
@every_graph
def test_the_mean_moves_by_the_mean_gradient_in_every_step(digits64, graph, mix):
    cluster = mh.Cluster(workers=6, speeds=[1, 0.7, 2, 1.3, 0.4, 1])
    xs, gs = recorded(digits64, mh.d_psgd(lr=LR, graph=graph, mix=mix), 6, steps=5, cluster=cluster)
    for (x, after), g in zip(pairwise(xs), gs, strict=True):
        assert torch.allclose(after.mean(0) - x.mean(0), -LR * g.mean(0), rtol=0, atol=1e-12)
    assert xs[0].std(0).mean() > 1e-3, "workers differ, or this would say little"


@every_graph
def test_without_steps_mixing_ends_in_the_mean_of_the_beginning(digits64, graph):
    start = {}
    strategy = scattered(mh.d_psgd(rule=STILL, graph=graph), start)
    xs, _ = ends(digits64, strategy, cluster=mh.Cluster(workers=6), steps=80)
    mean = torch.stack(list(start.values())).mean(0)
    assert all(torch.allclose(x, mean, rtol=0, atol=1e-9) for x in xs)


def test_in_a_complete_graph_equal_workers_stay_equal_only_with_equal_gradients():
    same, other = parabolas(*[(1, 1)] * 4), parabolas((1, 1), (2, 3), (1, 2), (3, 1))
    for task, equal in ((same, True), (other, False)):
        strategy = mh.d_psgd(lr=LR, graph="complete")
        xs, _ = ends(task, strategy, cluster=mh.Cluster(workers=4), steps=3)
        assert (max(numbers(xs)) - min(numbers(xs)) < 1e-12) == equal
    mixed, _ = ends(other, mh.d_psgd(lr=LR, graph="complete", mix="after"), cluster=mh.Cluster(workers=4), steps=3)
    assert max(numbers(mixed)) - min(numbers(mixed)) < 1e-12, "mixed after the step they are equal whatever it was"


# -- D-PSGD without some --------------------------------------------------------------------------


def lost(*ranks):
    return [mh.Die(rank) for rank in ranks]


def test_the_weight_of_a_lost_neighbour_goes_to_the_diagonal():
    """A ring of 4 without rank 0: W is [[2/3, 1/3, 0], [1/3, 1/3, 1/3], [0, 1/3, 2/3]] among 1, 2 and 3."""
    strategy = starting_at(mh.d_psgd(rule=STILL), 100, 1, 2, 6)
    xs, result = ends(idle(4), strategy, cluster=mh.Cluster(workers=4, faults=lost(0)), steps=1)
    assert numbers(xs) == pytest.approx([4 / 3, 3, 14 / 3], abs=1e-12)
    assert result.lost == [(0, "it died")]
    (mean,) = result.weights.values()
    assert mean.item() == pytest.approx(3, abs=1e-12), "of those that are left"


@every_graph
@pytest.mark.parametrize("dead", [(0,), (2, 3), (1, 4, 5)])
def test_the_mean_of_the_others_is_kept_without_the_lost(graph, dead):
    values = [1.0, -4, 2, 9, 0.5, 3, 7]
    strategy = starting_at(mh.d_psgd(rule=STILL, graph=graph), *values)
    xs, _ = ends(idle(7), strategy, cluster=mh.Cluster(workers=7, faults=lost(*dead)), steps=3)
    left = [value for rank, value in enumerate(values) if rank not in dead]
    assert sum(numbers(xs)) == pytest.approx(sum(left), abs=1e-12)
    assert max(numbers(xs)) - min(numbers(xs)) < max(left) - min(left)


def test_parts_that_only_the_lost_connected_continue_separately():
    strategy = starting_at(mh.d_psgd(rule=STILL), 1, 2, 6, 4)
    xs, result = ends(idle(4), strategy, cluster=mh.Cluster(workers=4, faults=lost(0, 2)), steps=5)
    assert numbers(xs) == [2, 4]
    (mean,) = result.weights.values()
    assert mean.item() == 3


@either_order
def test_who_is_left_alone_is_plain_sgd(digits64, plain_sgd, mix):
    """W = I: nobody is mixed with."""
    share = Share(digits64.data, 1, 3, 32, seed=0)
    reference = plain_sgd(digits64, [share.next_batch() for _ in range(6)], LR)
    cluster = mh.Cluster(workers=3, faults=lost(0, 2))
    result = mh.train(digits64, mh.d_psgd(lr=LR, mix=mix), cluster=cluster, steps=6)
    assert all(torch.equal(result.weights[name], w) for name, w in reference.items())


# -- gossip by hand -------------------------------------------------------------------------------

ONE_ROUND = {"pull": (1.5, 1.5, 3.5), "push": (3, 1.5, 6)}


@pytest.mark.parametrize("mode", ONE_ROUND)
def test_a_round_of_gossip(mode):
    """x = (1, 2, 6), whose peers are 1, 0, 0. What is pushed after one step is averaged at the next."""
    strategy = meeting(starting_at(mh.gossip(rule=STILL, mode=mode), 1, 2, 6), 1, 0, 0)
    xs, result = ends(idle(3), strategy, cluster=mh.Cluster(workers=3), steps=1 if mode == "pull" else 2)
    assert numbers(xs) == pytest.approx(ONE_ROUND[mode], abs=1e-9)
    (mean,) = result.weights.values()
    assert mean.item() == pytest.approx(sum(ONE_ROUND[mode]) / 3, abs=1e-9), "not 3: it is kept on average only"


def test_pulling_keeps_the_mean_on_average_over_all_choices():
    means = []
    for peers in product((1, 2), (0, 2), (0, 1)):
        strategy = meeting(starting_at(mh.gossip(rule=STILL), 1, 2, 6), *peers)
        xs, _ = ends(idle(3), strategy, cluster=mh.Cluster(workers=3), steps=1)
        means.append(sum(numbers(xs)) / 3)
    assert max(means) - min(means) > 1
    assert sum(means) / len(means) == pytest.approx(3, abs=1e-9)


def test_in_pairwise_gossip_both_ends_change():
    strategy = meeting(starting_at(mh.gossip(rule=STILL, mode="pairwise"), 1, 2, 6), 1, 2, 0)
    xs, _ = ends(idle(3), strategy, cluster=mh.Cluster(workers=3, order=[0, 1]))
    assert numbers(xs) == pytest.approx((1.5, 3.75, 3.75), abs=1e-9)


T_EVENTS = {
    ("pull", (0,)): (0.05, 0),
    ("pull", (0, 1)): (0.05, 0.325),
    ("pull", (0, 1, 0)): (0.235, 0.325),
    ("push", (0, 1)): (0.1, 0.35),
    ("push", (0, 1, 0)): (0.395, 0.35),
    ("push", (0, 0, 1)): (0.19, 0.89 / 3),
    ("pairwise", (0,)): (0.05, 0.05),
    ("pairwise", (0, 1)): (0.35, 0.35),
    ("pairwise", (0, 1, 0)): (0.3975, 0.3975),
}


@pytest.mark.parametrize(("mode", "order"), T_EVENTS)
def test_gossip_by_events(mode, order):
    """In pairwise mode worker 2 steps from where it was moved to, by a gradient of where it had been."""
    xs, _ = ends(toy_t(), mh.gossip(lr=LR, mode=mode), cluster=mh.Cluster(workers=2, order=order))
    assert numbers(xs) == pytest.approx(T_EVENTS[mode, order], abs=1e-9)


# -- gossip in general ----------------------------------------------------------------------------


def test_two_who_pull_in_step_average_their_models(digits64):
    """The same as model averaging after every step: both ask before either has averaged."""
    xs, _ = ends(digits64, mh.gossip(lr=LR), cluster=mh.Cluster(workers=2), steps=5)
    models = [digits64.build(0) for _ in range(2)]
    shares = [Share(digits64.data, rank, 2, 32, seed=0) for rank in range(2)]
    for _ in range(5):
        for model, share in zip(models, shares, strict=True):
            model.zero_grad()
            digits64.loss_of(model, share.next_batch()).backward()
        with torch.no_grad():
            for both in zip(*(model.parameters() for model in models), strict=True):
                mean = sum(p - LR * p.grad for p in both) / 2
                for p in both:
                    p.copy_(mean)
    expected = torch.cat([p.detach().reshape(-1) for p in models[0].parameters()])
    assert all(torch.allclose(x, expected, rtol=0, atol=1e-12) for x in xs)


@pytest.mark.parametrize("speeds", [[1] * 4, [1, 0.7, 2, 1.3]])
def test_pairwise_gossip_moves_the_mean_by_gradients_only(digits64, speeds):
    start, gradients = {}, []
    strategy = scattered(
        mh.gossip(lr=LR, mode="pairwise"), start, step=lambda s, w: gradients.append(w.flat.groups[0].grad.clone())
    )
    xs, _ = ends(digits64, strategy, cluster=mh.Cluster(workers=4, speeds=speeds), steps=6)
    moved = torch.stack(xs).mean(0) - torch.stack(list(start.values())).mean(0)
    assert torch.allclose(moved, -LR * torch.stack(gradients).sum(0) / 4, rtol=0, atol=1e-12)


@every_mode
def test_rumours_end_in_one_opinion(mode):
    """Without steps all agree in the end: in pairwise mode on the mean, otherwise on something between the first."""
    first = [1.0, -4, 2, 9, 0.5, 3.5]
    strategy = starting_at(mh.gossip(rule=STILL, mode=mode), *first)
    cluster = mh.Cluster(workers=6, speeds=[1, 0.7, 2, 1.3, 0.4, 1])
    last = numbers(ends(idle(6), strategy, cluster=cluster, steps=400)[0])
    assert max(last) - min(last) < 1e-9
    assert min(first) < min(last) and max(last) < max(first)
    assert (abs(sum(last) - sum(first)) < 1e-9) == (mode == "pairwise")


@every_mode
def test_without_exchanges_all_go_their_own_way(digits64, plain_sgd, mode):
    """tau = infinity."""
    xs, result = ends(digits64, mh.gossip(lr=LR, mode=mode, period=100), cluster=mh.Cluster(workers=3), steps=4)
    for rank, x in enumerate(xs):
        share = Share(digits64.data, rank, 3, 32, seed=0)
        reference = plain_sgd(digits64, [share.next_batch() for _ in range(4)], LR)
        assert torch.equal(x, torch.cat([w.detach().reshape(-1) for w in reference.values()]))
    flat = torch.cat([w.reshape(-1) for w in result.weights.values()])
    assert torch.allclose(flat, torch.stack(xs).mean(0), rtol=0, atol=1e-12)


def test_exchanges_come_every_period():
    for steps in range(1, 8):
        xs, _ = ends(toy_t(), mh.gossip(lr=LR, period=3), cluster=mh.Cluster(workers=2), steps=steps)
        one, other = numbers(xs)
        assert (abs(one - other) < 1e-12) == (steps % 3 == 0), steps


def test_all_others_are_chosen_equally_often():
    class Draws:
        def __init__(self, number):
            self.number = number

        def randrange(self, stop):
            return self.number % stop

    peers = [0, 1, 3, 4, 5]
    assert Counter(next(random_order(range(6), {2}, Draws(n))) for n in range(50)) == dict.fromkeys(peers, 10)
    assert all(sorted(random_order(range(6), {2}, Draws(n))) == peers for n in range(50))
    assert list(random_order([], (), Draws(0))) == []


@pytest.mark.parametrize("seed", range(20))
def test_peers_are_drawn_as_from_a_list_of_all_others(seed):
    draw, same = Random(seed), Random(seed)
    ranks = range(draw.randrange(1, 30))
    without = {rank for rank in ranks if draw.random() < 0.3}
    same.setstate(draw.getstate())
    others = [rank for rank in ranks if rank not in without]
    expected = [others.pop(same.randrange(len(others))) for _ in range(len(others))]
    assert list(random_order(ranks, without, draw)) == expected


@every_mode
def test_no_worker_is_its_own_peer_and_all_are_chosen(digits64, mode):
    met = Counter()

    class Watched(type(mh.gossip())):
        def _chosen(self, w):
            for rank in super()._chosen(w):
                met[w.rank, rank] += 1
                yield rank

    strategy = mh.gossip(lr=LR, mode=mode)
    strategy.__class__ = Watched
    mh.train(digits64, strategy, cluster=mh.Cluster(workers=4), steps=30)
    assert set(met) == {(one, other) for one in range(4) for other in range(4) if one != other}


# -- one worker -----------------------------------------------------------------------------------

ALONE = {
    **{f"d-psgd, mixed {mix}": lambda mix=mix: mh.d_psgd(lr=LR, mix=mix) for mix in ("beside", "after")},
    **{f"gossip by {mode}": lambda mode=mode: mh.gossip(lr=LR, mode=mode) for mode in MODES},
}


@pytest.mark.parametrize("method", ALONE)
def test_one_worker_is_sequential_bit_for_bit(digits64, plain_sgd, method):
    share = Share(digits64.data, 0, 1, 32, seed=0)
    reference = plain_sgd(digits64, [share.next_batch() for _ in range(6)], LR)
    result = mh.train(digits64, ALONE[method](), cluster=mh.Cluster(workers=1), steps=6)
    assert all(torch.equal(result.weights[name], w) for name, w in reference.items())

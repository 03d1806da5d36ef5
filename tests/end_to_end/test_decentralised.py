"""Without a centre: who waits for whom, what a lost worker means, and what is on its way when a run is saved."""

import random
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import manyhands as mh
from manyhands.core.state import named
from manyhands.rules import Sgd
from manyhands.runtime.checkpoint import load_checkpoint
from manyhands.tasks import load

from .small import steps_of, task

GRAPHS = ["ring", "complete", "exponential", "torus", "random"]
MODES = ["push", "pull", "pairwise"]
every_mode = pytest.mark.parametrize("mode", MODES)
either_order = pytest.mark.parametrize("mix", ["beside", "after"])
MILLISECOND = 50e9 / 4 / 1000
"""Work per sample that makes a mini-batch of 4 take a worker of speed 1 one millisecond."""
STEPS = 24
DATA = task(work=MILLISECOND)


def run(strategy, steps=STEPS, data=None, **cluster):
    return mh.train(data or DATA, strategy, cluster=mh.Cluster(**cluster), steps=steps)


def steps_by_rank(result):
    return [sum(line["rank"] == rank for line in steps_of(result)) for rank in range(result.workers)]


def waits(result, rank):
    """How long a worker waited for others in each of its steps."""
    return [b - a for a, b in pairwise([0.0, *(line["waited"] for line in steps_of(result) if line["rank"] == rank)])]


def error(weights, data=DATA):
    """The loss of these weights on all samples."""
    x, y = data.data.tensors
    return mse_loss(torch.func.functional_call(data.build(0), weights, x), y).item()


def has_learned(result):
    return error(result.weights) < 0.5 * error(dict(DATA.build(0).named_parameters()))


# -- lost workers in lock step ------------------------------------------------------------------------


@either_order
@pytest.mark.parametrize("graph", ["ring", "complete", "random"])
@pytest.mark.parametrize("rank", [0, 2], ids=["lead", "other"])
def test_in_lock_step_the_others_take_all_their_steps_whenever_a_worker_is_lost(graph, rank, mix):
    whole = run(mh.d_psgd(lr=0.2, graph=graph, mix=mix), workers=5)
    assert steps_by_rank(whole) == [STEPS] * 5 and has_learned(whole)
    for moment in range(4):
        fault = (mh.Die, mh.Stop, mh.CutLink)[moment % 3](rank, whole.seconds * moment / 4)
        result = run(mh.d_psgd(lr=0.2, graph=graph, mix=mix), workers=5, faults=[fault])
        assert result.lost == [(rank, fault.why)]
        taken = steps_by_rank(result)
        assert taken[rank] < STEPS and [n for one, n in enumerate(taken) if one != rank] == [STEPS] * 4
        assert has_learned(result) and all(weight.isfinite().all() for weight in result.weights.values())


@pytest.mark.parametrize("graph", GRAPHS)
def test_in_lock_step_one_worker_is_enough(graph):
    whole = run(mh.d_psgd(lr=0.2, graph=graph), workers=4)
    faults = [mh.Die(0, whole.seconds / 8), mh.Stop(1, whole.seconds / 6), mh.CutLink(3, whole.seconds / 4)]
    result = run(mh.d_psgd(lr=0.2, graph=graph), workers=4, faults=faults)
    assert [rank for rank, _ in result.lost] == [0, 1, 3]
    assert steps_by_rank(result)[2] == STEPS and has_learned(result)


def test_a_lost_worker_is_waited_for_no_longer_than_it_takes_to_hear_of_it():
    whole = run(mh.d_psgd(), workers=4)
    lost = run(mh.d_psgd(), workers=4, faults=[mh.Die(1, whole.seconds / 3)])
    assert lost.seconds == pytest.approx(whole.seconds, rel=0.05)


def test_digits_are_learned_in_lock_step_without_the_lost_worker():
    """A quarter of the samples is seen by nobody any more."""
    result = mh.train("digits", mh.d_psgd(), cluster=mh.Cluster(workers=4, faults=[mh.Die(1, 0.01)]))
    assert result.lost == [(1, "it died")] and result.seconds > 0.03
    assert result.test_accuracy >= 0.93


@pytest.mark.parametrize("method", [mh.d_psgd, mh.ad_psgd])
@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_draw_the_same_random_graph(method, seed):
    """Else somebody would wait for a rank that does not take it for its neighbour."""
    result = mh.train(task(), method(lr=0.2, graph="random"), cluster=mh.Cluster(workers=7), steps=5, seed=seed)
    assert len(steps_of(result)) == 35 and result.lost == []


# -- lost workers out of lock step --------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("rank", [0, 2], ids=["lead", "other"])
def test_gossip_uses_up_its_budget_whenever_a_worker_is_lost(mode, rank):
    far = {"workers": 5, "latency": "500us"}  # so that somebody is waiting for an answer most of the time
    whole = run(mh.gossip(lr=0.2, mode=mode), **far)
    assert len(steps_of(whole)) == STEPS * 5 and has_learned(whole)
    for moment in range(4):
        fault = (mh.Die, mh.Stop, mh.CutLink)[moment % 3](rank, whole.seconds * moment / 4)
        result = run(mh.gossip(lr=0.2, mode=mode), **far, faults=[fault])
        assert result.lost == [(rank, fault.why)]
        assert STEPS * 5 - 1 <= len(steps_of(result)) <= STEPS * 5, "all that is missing is the one it died over"
        assert has_learned(result) and all(weight.isfinite().all() for weight in result.weights.values())


@every_mode
def test_gossip_is_learned_by_one_that_is_left(mode):
    third = run(mh.gossip(lr=0.2, mode=mode), workers=4).seconds / 3
    faults = [mh.Die(0, third / 4), mh.Stop(1, third / 2), mh.CutLink(3, third)]
    result = run(mh.gossip(lr=0.2, mode=mode), workers=4, faults=faults)
    assert [rank for rank, _ in result.lost] == [0, 1, 3]
    assert {line["rank"] for line in steps_of(result) if line["time"] > third} == {2}
    assert STEPS * 4 - 3 <= len(steps_of(result)) <= STEPS * 4 and has_learned(result)


@every_mode
def test_a_lost_worker_is_not_chosen_any_more(mode):
    chosen = []

    class Watched(type(mh.gossip())):
        def _chosen(self, w):
            for rank in super()._chosen(w):
                chosen.append((w.transport.now(), rank))
                yield rank

    strategy, at = mh.gossip(lr=0.01, mode=mode), 0.005
    strategy.__class__ = Watched
    run(strategy, workers=4, faults=[mh.Die(2, at)])
    assert any(rank == 2 for when, rank in chosen if when < at)
    assert not any(rank == 2 for when, rank in chosen if when > at + 0.001), "once everybody has heard of it"
    assert {rank for when, rank in chosen if when > at + 0.001} == {0, 1, 3}


@pytest.mark.parametrize("mode", ["push", "pairwise"])
def test_no_schedule_of_faults_makes_gossip_hang(mode, tmp_path):
    """As for every method, but in its other modes too, and with checkpoints."""
    until = 1.2 * run(mh.gossip(lr=0.01, mode=mode), steps=6, data=task()).seconds
    lost = 0
    for seed in range(24):
        draw = random.Random(f"{mode} {seed}")
        faults = [mh.Die(draw.randrange(4), draw.uniform(0, until)) for _ in range(draw.choice([1, 2]))]
        faults += [mh.SlowLink(draw.randrange(4), draw.uniform(0, until))]
        cluster = mh.Cluster(workers=4, faults=faults)
        saves = {"out": tmp_path / str(seed), "checkpoint_every": 2} if seed % 2 else {}
        result = mh.train(task(), mh.gossip(lr=0.01, mode=mode), cluster=cluster, steps=6, **saves)
        assert {rank for rank, _ in result.lost} <= {fault.rank for fault in faults[:-1]}
        assert all(weight.isfinite().all() for weight in result.weights.values())
        lost += bool(result.lost)
    assert lost, "some of these must have hurt"


# -- slow workers -------------------------------------------------------------------------------------


@every_mode
def test_gossip_is_not_held_up_by_a_slow_worker(mode):
    even, slow = (
        run(mh.gossip(lr=0.01, mode=mode), workers=6, cores=2, stragglers=mh.Slow([2], factor)) for factor in (1.0, 5.0)
    )
    taken = steps_by_rank(slow)
    assert slow.samples == even.samples and taken[2] < min(taken) * 1.01 < STEPS / 3
    assert slow.seconds < 1.3 * even.seconds, "five of six workers do the work of six"
    for rank in {0, 1, 3, 4, 5}:
        assert max(waits(slow, rank)) < 0.002, "an answer takes some journeys, not a slow gradient"


@either_order
def test_d_psgd_is_held_up_by_a_slow_worker(mix):
    even, slow = (
        run(mh.d_psgd(lr=0.01, mix=mix), workers=6, cores=2, stragglers=mh.Slow([2], factor)) for factor in (1.0, 5.0)
    )
    assert steps_by_rank(slow) == [STEPS] * 6
    assert slow.seconds > 4 * even.seconds
    for rank in {0, 1, 3, 4, 5}:
        assert sum(waits(slow, rank)) > 0.6 * slow.seconds, "step by step also those who are not its neighbours"


def test_a_push_waits_for_no_rank_and_an_answer_takes_two_latencies():
    """Journeys of 20 steps: pushes of both workers are under way to each other all the time, and neither waits."""
    far = {"workers": 2, "latency": "20ms"}
    push, pull = (run(mh.gossip(lr=0.01, mode=mode), **far) for mode in ("push", "pull"))
    assert max(waits(push, 0) + waits(push, 1)) < 1e-4
    assert max(line["time"] for line in steps_of(push)) == pytest.approx(STEPS * 1e-3, rel=0.1)
    assert min(waits(pull, 0) + waits(pull, 1)) > 0.039


def test_a_peer_pulls_from_one_whose_gradient_is_being_computed():
    """Rank 0 computes for 20 ms at a time; rank 1 has nobody else to ask."""
    few = task(work=MILLISECOND)
    result = run(mh.gossip(lr=0.01), 20, few, workers=2, cores=2, stragglers=mh.Slow([0], 20))
    slow = [line for line in steps_of(result) if line["rank"] == 0]
    meanwhile = [line for line in steps_of(result) if line["rank"] == 1 and line["time"] < slow[0]["time"]]
    size = 4 * sum(p.numel() for p in few.build(0).parameters())
    assert slow[0]["time"] > 0.020 and len(meanwhile) >= 15
    assert slow[0]["bytes"] >= len(meanwhile) * size, "rank 0 told its weights each time"


def test_what_is_mixed_beside_the_step_travels_while_the_gradient_is_computed():
    far = {"workers": 4, "latency": "800us"}
    beside, after = (run(mh.d_psgd(lr=0.01, mix=mix), **far).seconds for mix in ("beside", "after"))
    assert beside == pytest.approx(STEPS * 1e-3, rel=0.1)
    assert after == pytest.approx(STEPS * 1.8e-3, rel=0.1)


# -- bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "messages"),
    [
        (mh.d_psgd(), 8 * 2),
        (mh.d_psgd(graph="complete", mix="after"), 8 * 7),
        (mh.d_psgd(graph="torus"), 8 * 3),
        (mh.gossip(), 8),
        (mh.gossip(mode="push"), 8),
        (mh.gossip(mode="push", period=5), 8 / 5),
    ],
    ids=["ring", "complete", "torus of two rows", "pull", "push", "push every fifth"],
)
def test_bytes_of_a_model_of_sizes_only_are_those_of_the_closed_form(strategy, messages):
    """Each message is a whole model; in the end seven workers hand theirs over for the answer."""
    vgg = load("vgg16")
    size = 4 * sum(p.numel() for p in vgg.build(0).parameters())
    result = mh.train(vgg, strategy, cluster=mh.Cluster(workers=8), steps=5)
    assert result.bytes_sent == (5 * messages + 7) * size


# -- checkpoints --------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("period", [1, 3])
def test_a_gossip_that_continues_after_a_checkpoint_is_the_one_that_is_resumed(mode, period, tmp_path):
    def go(folder, **resumed):
        strategy, saves = mh.gossip(rule=Sgd(0.05), mode=mode, period=period), {"out": folder, "checkpoint_every": 4}
        return mh.train(task(), strategy, cluster=mh.Cluster(workers=4), steps=9, seed=5, **saves, **resumed)

    whole = go(tmp_path / "whole")
    again = go(tmp_path / "again", resume=tmp_path / "whole" / "checkpoints" / "step-00000008")
    assert whole.weights_sha256 == again.weights_sha256


def test_what_was_pushed_is_averaged_before_a_checkpoint_however_late_it_comes(tmp_path):
    """Workers are at 1, 3, 5; the second pushes to the third, on whose slow link small words overtake it."""
    data = task(model=lambda: nn.Sequential(nn.Linear(4, 9000), nn.Linear(9000, 2)))
    cluster = mh.Cluster(workers=3, bandwidth="10Mbit", faults=[mh.SlowLink(2, factor=20)])

    class Apart(type(mh.gossip())):
        def setup(self, w):
            super().setup(w)
            torch._foreach_copy_(self.own.x, [torch.full_like(x, 2 * w.rank + 1) for x in self.own.x])
            self.own.show()

        def _chosen(self, w):
            return iter([2] if (w.rank, w.step) == (1, 3) else [])

    strategy = mh.gossip(rule=Sgd(1e-30), mode="push")
    strategy.__class__ = Apart
    mh.train(data, strategy, cluster=cluster, steps=4, out=tmp_path, checkpoint_every=4, per_worker=True)
    saved = load_checkpoint(tmp_path / "checkpoints")
    for rank, x in enumerate([1, 3, 4]):
        found = [one for name, one in saved.state.items() if name.startswith(f"worker{rank}/x/")]
        assert len(found) == 4 and all(bool((one == x).all()) for one in found)


@pytest.mark.parametrize("graph", GRAPHS)
@either_order
def test_a_resumed_d_psgd_equals_one_that_never_stopped(graph, mix, tmp_path):
    def go(steps, **saves):
        strategy = mh.d_psgd(rule=Sgd(0.05), graph=graph, mix=mix)
        cluster = mh.Cluster(workers=5, speeds=[1, 2, 0.5, 1, 1.5])
        return mh.train(task(work=MILLISECOND), strategy, cluster=cluster, steps=steps, seed=5, **saves)

    never = go(9)
    go(5, out=tmp_path, checkpoint_every=5)
    again = go(9, resume=tmp_path)
    assert again.weights_sha256 == never.weights_sha256


def test_each_worker_of_d_psgd_has_its_own_x_in_a_checkpoint(tmp_path):
    xs = {}

    class Seen(type(mh.d_psgd())):
        def answer(self, w):
            xs[w.rank] = {name: x.clone() for name, x in named(w.flat.slots, self.own.x).items()}
            return super().answer(w)

    strategy = mh.d_psgd(lr=0.05)
    strategy.__class__ = Seen
    mh.train(task(), strategy, cluster=mh.Cluster(workers=3), steps=4, out=tmp_path, checkpoint_every=4)
    saved = load_checkpoint(tmp_path / "checkpoints").state
    for rank, found in xs.items():
        assert all(torch.equal(saved[f"worker{rank}/x/{name}"], x) for name, x in found.items())
    assert not torch.equal(*(torch.cat([*xs[rank].values()]) for rank in (0, 1)))

"""Things break in the first third of a run, or anywhere: each method does what it promises, and none hangs."""

import random

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.tasks import load
from repeats import diagonals

from .small import METHODS, ONE_HOST, SERVED, model, steps_of, task

STOPPING = ["bsp", "bsp_server", "hierarchical_server", "hybrid", "easgd", "asysvrg", "gpipe", "pipedream"]
"""Everyone is needed: a lost worker ends the run."""
GOING_ON = [
    *(
        (method, place)
        for method in SERVED
        if not METHODS[method]().traits.lockstep
        for place in ("servers", "one host")
    ),
    ("ad_psgd", "apart"),
    ("gossip", "apart"),
    ("hogwild", "one host"),
]
"""Nobody is missed."""
PLACES = {"apart": {}, "servers": {"servers": 2}, "one host": {"hosts": 1}}
KINDS = [mh.Die, mh.Stop, mh.CutLink]
LOST = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
VICTIM = pytest.mark.parametrize("rank", [0, 2], ids=["lead", "other"])
LATENCY = 50e-6
STEPS = 12


def run(method, place="apart", faults=(), data=None, steps=STEPS, **cluster):
    lr = 0.005 if method in ("ssp", "downpour", "dc_asgd") else 0.02
    machines = mh.Cluster(workers=4, faults=faults, **PLACES[place], **cluster)
    return mh.train(data or task(), METHODS[method](lr=lr), cluster=machines, steps=steps)


# -- a lost worker ----------------------------------------------------------------------------------


@LOST
@VICTIM
@pytest.mark.parametrize("method", STOPPING)
def test_a_method_in_which_all_are_needed_ends_and_names_the_lost_worker(method, rank, kind):
    fault = kind(rank, run(method).seconds / 4)
    with pytest.raises(mh.PeerLost) as caught:
        run(method, faults=[fault])
    assert caught.value.rank == rank
    assert caught.value.why == fault.why
    assert str(caught.value) == f"rank {rank} is lost: {fault.why}"


@pytest.mark.parametrize("place", ["servers", "one host"])
@VICTIM
def test_a_bulk_method_ends_wherever_its_shards_are(place, rank):
    fault = mh.Die(rank, run("bsp_server", place).seconds / 4)
    with pytest.raises(mh.PeerLost, match=f"rank {rank} is lost: it died"):
        run("bsp_server", place, faults=[fault])


@LOST
@VICTIM
@pytest.mark.parametrize(("method", "place"), GOING_ON)
def test_an_asynchronous_method_continues_without_the_lost_worker(method, place, rank, kind):
    fault = kind(rank, run(method, place).seconds / 4)
    result = run(method, place, faults=[fault])
    assert result.lost == [(rank, fault.why)]
    lines = steps_of(result)
    assert STEPS * 4 - 1 <= len(lines) <= STEPS * 4, "all that is missing is the mini-batch it died over"
    assert max((line["time"] for line in lines if line["rank"] == rank), default=0.0) <= fault.at
    assert all(any(line["rank"] == other and line["time"] > fault.at for line in lines) for other in {1, 3})
    assert all(weight.isfinite().all() for weight in result.weights.values())


@pytest.mark.parametrize(("method", "place"), GOING_ON)
def test_one_worker_is_enough(method, place):
    third = run(method, place).seconds / 3
    result = run(method, place, faults=[mh.Die(0, third / 4), mh.Stop(1, third / 2), mh.CutLink(3, third)])
    assert [rank for rank, _ in result.lost] == [0, 1, 3]
    assert {line["rank"] for line in steps_of(result) if line["time"] > third} == {2}
    assert STEPS * 4 - 3 <= len(steps_of(result)) <= STEPS * 4


@pytest.mark.parametrize(
    ("method", "place", "rank"),
    [
        ("ssp", "servers", 0),
        ("downpour", "servers", 1),
        ("dc_asgd", "one host", 0),
        ("ad_psgd", "apart", 0),
        ("gossip", "apart", 3),
        ("hogwild", "one host", 2),
    ],
)
def test_digits_are_learned_without_the_lost_worker(method, place, rank):
    digits = load("digits")
    fault = mh.Die(rank, 0.03 if place != "one host" else 0.01)
    result = mh.train(digits, METHODS[method](), cluster=mh.Cluster(faults=[fault], **PLACES[place]))
    assert result.lost == [(rank, "it died")]
    assert fault.at < result.seconds / 3
    assert result.samples >= result.steps * 4 * 32 - 32, "all that is missing is the mini-batch it died over"
    assert result.test_accuracy >= 0.93


@pytest.mark.parametrize("method", METHODS)
def test_all_workers_lost(method):
    with pytest.raises(mh.PeerLost) as caught:
        run(method, faults=[mh.Die(rank, 1e-7 * rank) for rank in range(4)])
    assert caught.value.rank in range(4)


# -- a lost server ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "rank", "kind"), diagonals(3, SERVED, [4, 5], KINDS))
def test_a_lost_server_ends_the_run(method, rank, kind):
    fault = kind(rank, run(method, "servers").seconds / 4)
    with pytest.raises(mh.PeerLost) as caught:
        run(method, "servers", faults=[fault])
    assert (caught.value.rank, caught.value.why) == (rank, fault.why)


@pytest.mark.parametrize(("method", "rank", "kind"), diagonals(3, SERVED, [0, 2], KINDS))
def test_a_shard_dies_with_the_worker_that_keeps_it(method, rank, kind):
    """Without server ranks, on hosts of their own, every worker keeps a shard."""
    fault = kind(rank, run(method).seconds / 4)
    with pytest.raises(mh.PeerLost) as caught:
        run(method, faults=[fault])
    assert (caught.value.rank, caught.value.why) == (rank, fault.why)


def test_a_worker_that_keeps_no_shard_is_not_missed_even_without_servers():
    few = task(model=lambda: nn.Sequential(nn.Linear(4, 2)))
    cluster = mh.Cluster(workers=4, faults=[mh.Die(3, 3 * LATENCY)])
    result = mh.train(few, mh.ssp(lr=0.01, shard="layer"), cluster=cluster, steps=STEPS)
    assert result.lost == [(3, "it died")]
    assert {line["rank"] for line in steps_of(result) if line["step"] > 5} == {0, 1, 2}


# -- slower, not lost -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_slow_worker_makes_the_run_longer_and_loses_no_rank(method):
    busy = task(work=1e7)
    usual = run(method, data=busy)
    slow = run(method, data=busy, faults=[mh.Slow([1], 8, at=usual.seconds / 4)])
    assert slow.lost == [] and slow.samples == usual.samples
    assert usual.seconds < slow.seconds < 9 * usual.seconds


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ONE_HOST])
def test_a_slow_link_makes_the_run_longer_and_loses_no_rank(method):
    usual = run(method)
    slow = run(method, faults=[mh.SlowLink(1, usual.seconds / 4, factor=8)])
    assert slow.lost == [] and slow.samples == usual.samples
    assert usual.seconds < slow.seconds < 9 * usual.seconds


# -- no hang, whatever happens ----------------------------------------------------------------------

WAYS = [(method, "apart" if method not in ONE_HOST else "one host") for method in METHODS]
WAYS += [(method, place) for method in SERVED for place in ("servers", "one host")]
WAYS += [("bsp", "one host"), ("easgd", "one host")]


def normed():
    """With buffers to be averaged at the end, there is more that can be interrupted."""
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2)
    )


def ends_well(method, place, faults, data, steps):
    """A result that names whom it lost, or the loss of somebody to whom something was to happen. Never a deadlock."""
    doomed = {fault.rank for fault in faults if isinstance(fault, tuple(KINDS))}
    try:
        result = run(method, place, faults, data, steps)
    except mh.PeerLost as loss:
        assert loss.rank in doomed, f"{loss}, but only {doomed} were to be lost"
        return None
    assert {rank for rank, _ in result.lost} <= doomed
    assert all(weight.isfinite().all() for weight in result.weights.values())
    return result


def schedule(draw, ranks, until):
    """One to three faults."""
    faults = []
    for _ in range(draw.choice([1, 1, 2, 3])):
        rank, at = draw.randrange(ranks), draw.uniform(0, until)
        kind = draw.choice([*KINDS, mh.SlowLink, mh.Slow])
        faults.append(mh.Slow([rank], draw.uniform(2, 20), at) if kind is mh.Slow else kind(rank, at))
    return faults


@pytest.mark.parametrize(("method", "place"), WAYS)
def test_no_schedule_of_faults_makes_a_run_hang(method, place):
    data = task()
    until = 1.2 * run(method, place, data=data, steps=6).seconds
    ranks = 4 + PLACES[place].get("servers", 0)
    ended = []
    for seed in range(8):
        draw = random.Random(f"{method} {place} {seed}")
        ended.append(ends_well(method, place, schedule(draw, ranks, until), data, 6))
    hurt = [result is None or result.lost for result in ended]
    assert any(hurt), "some of these schedules must have hurt"


@pytest.mark.parametrize(("method", "place"), WAYS)
def test_the_lead_may_be_lost_at_any_moment_of_the_end(method, place):
    """Others have slow links, so that some have heard the last word of the lead and some have not."""
    data, late = task(model=normed, batch_size=8), [mh.SlowLink(1, factor=5), mh.SlowLink(3, factor=2)]
    ends = run(method, place, late, data, steps=3).seconds
    outcomes = []
    pace = LATENCY / 2 if place != "one host" else LATENCY / 200
    for moment in range(0, 24, 3):
        at = max(0.0, ends + (moment - 4) * pace)
        outcomes.append(ends_well(method, place, [*late, mh.Die(0, at)], data, 3))
    assert all(outcome is None or outcome.weights is not None for outcome in outcomes)


@pytest.mark.parametrize("method", ["gpipe", "pipedream"])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_pipeline_never_answers_with_a_stage_that_was_not_trained(method, rank):
    data = task(model=model)
    whole = run(method, data=data, steps=3)
    last = max(line["time"] for line in steps_of(whole) if line["rank"] == rank)
    kept = 0
    for moment in range(0, 30, 2):
        result = ends_well(method, "apart", [mh.Die(rank, last + moment * LATENCY / 5)], data, 3)
        if result is not None:
            kept += 1
            assert all(torch.equal(weight, whole.weights[name]) for name, weight in result.weights.items())
    assert kept, "once a stage has handed its weights over it may die"


def test_the_next_worker_reads_the_shards_if_the_lead_is_lost_before_it_could():
    data = task(model=normed, batch_size=8)
    faults = [mh.SlowLink(4, factor=20), mh.SlowLink(5, factor=20)]
    ends = run("ssp", "servers", faults, data, 3).seconds
    seen = [ends_well("ssp", "servers", [*faults, mh.Die(0, ends - moment * LATENCY)], data, 3) for moment in range(20)]
    assert any(result is not None and result.lost == [(0, "it died")] for result in seen)

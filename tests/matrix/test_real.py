"""Every method with real processes, on every link: it learns, and it does what it promises whatever happens to a rank.

learn     two workers with default settings; in lock step the bits are those of virtual time
slow      one of them computes five times slower: no rank is lost, no sample is missed, and bits stay the same
killed    the run ends or continues, as the card says; what was saved continues with all workers, to the same bits
stopped   SIGTERM saves; the same number of workers continues to the same bits, another number continues, too
joined    a spare takes the place of a killed worker, where workers may join
"""

import functools
import os
from statistics import median

import pytest
import torch

import manyhands as mh
from every_method import (
    BATCH_SIZE,
    EVERY,
    GOOD,
    SAMPLES,
    accepts_joiners,
    ends_when_one_is_lost,
    fits,
    on_every_link,
    repeats,
    replicas,
)
from manyhands.runtime.membership.error_codec import exit_code
from real.tools import KILLED, LIMIT, SPARE, Awaited, Strike, ask_to_stop, kill, messages, slow_down, struck, taken_by

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("quickly")]

HALF = 20
"""Half as many epochs as usual."""
PROMISING, PEAK, CALM = 0.9, 0.5, 0.1
"""The accuracy that must be reached after them. In the middle of a run one mini-batch may throw the weights off for
some steps, once in sixteen half runs of d-psgd in virtual time: then so much is enough, if that was the loss in most of
the last quarter. At the end of whole runs nothing of the kind was seen."""
NEEDS_ALL = [name for name in EVERY if ends_when_one_is_lost(name)]


def steps_of(strategy, workers, epochs=HALF):
    """How many steps that is."""
    return epochs * SAMPLES // (BATCH_SIZE * replicas(strategy, workers))


def keepers_apart(strategy, workers, link):
    """Servers, if workers that may be lost would keep shards otherwise."""
    return {"servers": 1 if link == "tcp" and fits(strategy, workers, 1) else 0}


def virtually(name, link, servers=0, **knobs):
    """The same two workers in virtual time."""
    cluster = mh.Cluster(workers=2, servers=servers, hosts=1 if link == "shm" else None)
    return mh.train("digits", EVERY[name](), cluster=cluster, **knobs)


@functools.cache
def bits(name, link, epochs):
    return virtually(name, link, epochs=epochs).weights_sha256


def check(result, strategy, since=0, accuracy=None):
    """It has seen all that was left to see, and has learned."""
    assert result.samples == (result.steps - since) * replicas(strategy, result.workers) * BATCH_SIZE
    assert result.test_accuracy >= (calm(result) if accuracy is None else accuracy)


def calm(result):
    """What half a run must have reached."""
    losses = [one["loss"] for one in result.records if one.get("loss") is not None]
    return PEAK if losses and median(losses[-len(losses) // 4 :]) <= CALM else PROMISING


# -- nothing happens ----------------------------------------------------------------------------------


@on_every_link()
def test_two_workers_learn_the_digits(name, link):
    strategy = EVERY[name]()
    result = mh.train("digits", strategy, workers=2, link=link)
    assert (result.world, result.lost, result.stopped_at) == ("real", [], None)
    check(result, strategy, accuracy=GOOD)
    if repeats(strategy):
        assert result.weights_sha256 == bits(name, link, epochs=None)


# -- a slow worker ------------------------------------------------------------------------------------


@on_every_link()
def test_a_worker_that_is_five_times_slower_is_not_lost(name, link, tmp_path):
    strategy = EVERY[name]()
    slow = Strike(functools.partial(slow_down, 5), tmp_path, rank=0, step=0)
    result = mh.train("digits", struck(strategy, slow), workers=2, link=link, epochs=HALF)
    assert result.lost == []
    check(result, strategy)
    if repeats(strategy):
        assert result.weights_sha256 == bits(name, link, HALF)


# -- a worker that is killed in the first third -------------------------------------------------------


@on_every_link(NEEDS_ALL)
def test_a_method_that_needs_all_workers_ends_and_can_be_resumed(name, link, tmp_path, caplog):
    strategy = EVERY[name]()
    steps, place = steps_of(strategy, 2), keepers_apart(strategy, 2, link)
    strike, every = Strike(kill, tmp_path, step=steps // 4), steps // 5
    run = {"link": link, "steps": steps, "out": tmp_path / "run", "checkpoint_every": every, **place}
    with pytest.raises(mh.PeerLost) as caught:
        mh.train("digits", struck(strategy, strike), workers=2, **run)
    assert strike.seconds_ago() < LIMIT
    told = [text for text in messages(caplog) if "lost" in text]
    assert told == [f"rank 1 is lost: {KILLED}"] == [str(caught.value)]
    assert exit_code(caught.value) == 3

    resumed = mh.train("digits", strategy, workers=2, resume=tmp_path / "run", **run)
    check(resumed, strategy, since=every)
    if repeats(strategy):
        whole = virtually(name, **{**run, "out": tmp_path / "whole"})
        assert resumed.weights_sha256 == whole.weights_sha256


@on_every_link([name for name in EVERY if name not in NEEDS_ALL])
def test_the_others_do_what_the_lost_worker_cannot(name, link, tmp_path):
    strategy = EVERY[name]()
    steps, place = steps_of(strategy, 3, epochs=2 * HALF), keepers_apart(strategy, 3, link)
    strike = Strike(kill, tmp_path, step=steps // 4)
    run = {"workers": 3, "link": link, "out": tmp_path / "run", "checkpoint_every": steps // 2, **place}
    result = mh.train("digits", struck(strategy, strike), steps=steps, **run)
    assert result.lost == [(1, KILLED)]
    assert result.test_accuracy >= GOOD
    taken = taken_by(result)
    if strategy.traits.lockstep:
        assert taken[0] == taken[2] == steps
    else:
        assert taken[0] + taken[2] == steps * 3 - strike.step - 1, "it took its last one with it"

    saved = mh.load_checkpoint(tmp_path / "run" / "checkpoints").weights
    last_push = 0.02 if getattr(strategy, "push_every", 1) > 1 else 0.0  # what is accrued is saved beside the weights
    for parameter, weights in result.weights.items():
        torch.testing.assert_close(saved[parameter], weights, rtol=0, atol=1e-6 + last_push)
    # One step only: the worker that is back brings samples that nobody has seen since it was lost, and at these rates
    # they may throw a model off its narrow path for a while, whatever the method. What was saved is right: see above.
    resumed = mh.train("digits", strategy, steps=steps + 1, resume=tmp_path / "run", **run)
    assert resumed.lost == []
    check(resumed, strategy, since=steps, accuracy=PEAK)


# -- a run that is asked to stop ----------------------------------------------------------------------


@on_every_link()
def test_a_stopped_run_continues_with_as_many_or_with_others(name, link, tmp_path):
    strategy = EVERY[name]()
    steps = steps_of(strategy, 2)
    late = steps // 2 + 5 if repeats(strategy) else steps // 4
    asks = Strike(functools.partial(ask_to_stop, os.getpid()), tmp_path, step=late)
    run = {"link": link, "steps": steps}
    stopped = mh.train("digits", struck(strategy, asks), workers=2, out=tmp_path / "run", **run)
    if name == "simuparallel" and stopped.stopped_at is None:  # nobody waits for anybody: one was done already
        check(stopped, strategy)
        return
    saved = mh.load_checkpoint(tmp_path / "run" / "checkpoints").facts["step"]
    assert stopped.stopped_at == saved < steps

    same = mh.train("digits", strategy, workers=2, resume=tmp_path / "run", **run)
    check(same, strategy, since=saved)
    if repeats(strategy):  # saved once, since it is in the second half
        whole = virtually(name, out=tmp_path / "whole", checkpoint_every=saved, **run)
        assert same.weights_sha256 == whole.weights_sha256

    servers = 1 if fits(strategy, 3, 1) else 0
    others = mh.train("digits", strategy, workers=3, servers=servers, resume=tmp_path / "run", **run)
    check(others, strategy, since=saved * replicas(strategy, 2) // replicas(strategy, 3))


# -- a worker that joins in the middle ----------------------------------------------------------------


@on_every_link([name for name in EVERY if accepts_joiners(EVERY[name]())])
def test_a_spare_takes_the_place_of_a_lost_worker(name, link, tmp_path):
    strategy = EVERY[name]()
    place = keepers_apart(strategy, 2, link)
    awaited = struck(strategy, Awaited(tmp_path))
    result = mh.train("digits", awaited, workers=2, spares=1, link=link, epochs=HALF, **place)
    assert result.lost == [(1, KILLED)]
    assert taken_by(result)[SPARE] > 10
    assert result.samples >= (result.steps * 2 - 6) * BATCH_SIZE, "but for what the lost one had not told yet"
    assert result.test_accuracy >= calm(result)

"""Real processes compute what virtual ones do: bit for bit in lock step, and well enough otherwise."""

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

import manyhands as mh
from every_method import EVERY, GOOD, links, one_of_each_file, replicas
from repeats import diagonals, only

from .tools import Strike, small, struck, together

pytestmark = pytest.mark.timeout(60)

LINKS = pytest.mark.parametrize("link", ["shm", "tcp"])
STEPS = 12
VIRTUALLY_ALONE = {"cluster": mh.Cluster(workers=1)}


@functools.cache
def virtual(method, workers, hosts=None):
    """The digest of the weights after a few steps in virtual time."""
    cluster = mh.Cluster(workers=workers, hosts=hosts)
    return mh.train("digits", EVERY[method](), cluster=cluster, steps=STEPS).weights_sha256


# -- to the last bit ----------------------------------------------------------------------------------


IN_LOCK_STEP = [
    *[("bsp", 2), ("bsp-server", 2), ("bsp-server", 3), ("d-psgd", 2), ("d-psgd", 3)],
    *[("gpipe", 2), ("gpipe", 3), ("pipedream", 2), ("ddg", 3), ("weight-copies", 2), ("dni", 3)],
    ("terngrad with one scale", 3),
]


@pytest.mark.parametrize(("case", "link"), diagonals(2, IN_LOCK_STEP, ["shm", "tcp"]), ids=str)
def test_lock_step_gives_the_same_bits_in_both_worlds(case, link, quickly):
    method, workers = case
    strategy = EVERY[method]()
    real = mh.train("digits", strategy, workers=workers, link=link, steps=STEPS)
    assert real.weights_sha256 == virtual(method, workers)
    assert real.samples == STEPS * 32 * replicas(strategy, workers)


@LINKS
def test_replicated_stages_give_the_same_bits_in_both_worlds(link, quickly):
    strategy, steps = mh.pipedream(replicas=(2, 1)), 7
    real = mh.train("digits", strategy, workers=3, link=link, steps=steps)
    assert real.weights_sha256 == mh.train("digits", strategy, cluster=mh.Cluster(3), steps=steps).weights_sha256


@pytest.mark.parametrize(("link", "hosts"), [("shm", 1), ("tcp", None)])
def test_three_workers_sum_in_the_order_of_their_place(link, hosts, quickly):
    real = mh.train("digits", mh.bsp(), workers=3, link=link, steps=STEPS)
    assert real.weights_sha256 == virtual("bsp", 3, hosts)


@LINKS
@pytest.mark.parametrize("servers", [0, 1])
def test_a_lone_worker_meets_the_same_centre_in_both_worlds(servers, link, quickly):
    elastic = EVERY["easgd in fp16"]
    real = mh.train("digits", elastic(), workers=1, servers=servers, link=link, steps=STEPS)
    virtual = mh.train("digits", elastic(), cluster=mh.Cluster(workers=1, servers=servers), steps=STEPS)
    assert real.weights_sha256 == virtual.weights_sha256


# -- several jobs at once -----------------------------------------------------------------------------


def job(link, folder):
    """A job that goes on in its sixth step when all four have come that far."""
    folder.mkdir()
    strategy = struck(mh.bsp(), Strike(functools.partial(together, 4, folder=folder), folder))
    return mh.train("digits", strategy, workers=2, link=link, steps=STEPS).weights_sha256


def test_jobs_at_the_same_time_do_not_meet(tmp_path, quickly):
    links = ["shm", "shm", "tcp", "tcp"]
    with ThreadPoolExecutor(len(links)) as pool:
        digests = pool.map(job, links, [tmp_path / str(number) for number in range(len(links))])
    assert list(digests) == [virtual("bsp", 2)] * 4


# -- well enough --------------------------------------------------------------------------------------


FAMILIES = ("bsp", "downpour", "hogwild", "easgd", "gossip by push", "pipelined-backprop")
"""Lock step, servers, shared memory, an elastic centre, peers, pipelines."""


def kinds():
    """A method for every file of strategies, on one link or the other; tests/matrix/ has all methods on both."""
    for name, link in zip(one_of_each_file(), itertools.cycle(["shm", "tcp"]), strict=False):
        yield name, link if link in links(EVERY[name]()) else "shm"


@pytest.mark.parametrize(
    ("name", "link"),
    only(
        lambda case: case[0] in FAMILIES,
        [*kinds(), ("gossip by push", "tcp"), ("ssp with a cache", "shm"), ("easgd in fp16", "tcp")],
    ),
)
def test_two_workers_learn_the_digits(name, link, quickly):
    slow = name in ("easgd in fp16", "gossip")  # a worker that is hardly let run holds the others where it was
    passes = 40 if slow else 20
    result = mh.train("digits", EVERY[name](), workers=2, link=link, epochs=passes)
    assert result.test_accuracy >= GOOD
    assert (result.world, result.lost, result.stopped_at) == ("real", [], None)


def test_a_model_that_writes_its_own_steps_does_so_in_both_worlds(quickly):
    """Alone to the last bit; two of them meet in memory as it happens, and learn."""
    alone, twin = (mh.train("sparse", mh.hogwild(), steps=40, **where) for where in ({"workers": 1}, VIRTUALLY_ALONE))
    assert alone.weights_sha256 == twin.weights_sha256
    assert mh.train("sparse", mh.hogwild(lr=0.5), workers=2, epochs=2).test_accuracy >= 0.75


def test_who_shares_memory_cannot_be_apart():
    with pytest.raises(mh.Refused, match="link is tcp, but must be shm: the workers of this method share memory"):
        mh.train(small(), mh.hogwild(lr=0.01), workers=2, link="tcp", steps=1)

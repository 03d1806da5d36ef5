"""Real processes compute what virtual ones do: bit for bit in lock step, and well enough otherwise."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest

import manyhands as mh
from manyhands.codecs import Half

from .tools import Strike, small, struck, together

pytestmark = pytest.mark.timeout(60)

LINKS = pytest.mark.parametrize("link", ["shm", "tcp"])
STEPS = 12
METHODS = {
    "bsp": mh.bsp,
    "bsp_server": mh.bsp_server,
    "ssp": mh.ssp,
    "downpour": mh.downpour,
    "easgd": mh.easgd,
    "easgd in fp16": functools.partial(mh.easgd, asynchronous=True, codec=Half()),
    "ad_psgd": mh.ad_psgd,
    "d_psgd": mh.d_psgd,
    "gossip": mh.gossip,
    "gossip by push": functools.partial(mh.gossip, mode="push"),
    "hogwild": mh.hogwild,
    "gpipe": mh.gpipe,
    "pipedream": mh.pipedream,
}


@functools.cache
def virtual(method, workers, hosts=None):
    """The digest of the weights after a few steps in virtual time."""
    cluster = mh.Cluster(workers=workers, hosts=hosts)
    return mh.train("digits", METHODS[method](), cluster=cluster, steps=STEPS).weights_sha256


# -- to the last bit ----------------------------------------------------------------------------------


@LINKS
@pytest.mark.parametrize(
    ("method", "workers"),
    [
        *[("bsp", 2), ("bsp_server", 2), ("bsp_server", 3), ("d_psgd", 2), ("d_psgd", 3)],
        *[("gpipe", 2), ("gpipe", 3), ("pipedream", 2)],
    ],
)
def test_lock_step_gives_the_same_bits_in_both_worlds(method, workers, link, quickly):
    real = mh.train("digits", METHODS[method](), workers=workers, link=link, steps=STEPS)
    assert real.weights_sha256 == virtual(method, workers)
    assert real.samples == STEPS * 32 * (1 if method in ("gpipe", "pipedream") else workers)


@pytest.mark.parametrize(("link", "hosts"), [("shm", 1), ("tcp", None)])
def test_three_workers_sum_in_the_order_of_their_place(link, hosts, quickly):
    real = mh.train("digits", mh.bsp(), workers=3, link=link, steps=STEPS)
    assert real.weights_sha256 == virtual("bsp", 3, hosts)


@LINKS
@pytest.mark.parametrize("servers", [0, 1])
def test_a_lone_worker_meets_the_same_centre_in_both_worlds(servers, link, quickly):
    elastic = METHODS["easgd in fp16"]
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


@LINKS
@pytest.mark.parametrize("method", [name for name in METHODS if name != "hogwild"])
def test_two_workers_learn_the_digits(method, link, quickly):
    result = mh.train("digits", METHODS[method](), workers=2, link=link)
    assert result.test_accuracy >= 0.93
    assert (result.world, result.lost, result.stopped_at) == ("real", [], None)


def test_so_they_do_without_any_locks(quickly):
    assert mh.train("digits", mh.hogwild(), workers=2).test_accuracy >= 0.93


def test_who_shares_memory_cannot_be_apart():
    with pytest.raises(mh.Refused, match="link is tcp, but must be shm: the workers of this method share memory"):
        mh.train(small(), mh.hogwild(lr=0.01), workers=2, link="tcp", steps=1)

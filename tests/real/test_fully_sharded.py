"""Fully sharded training among real processes: the bits of virtual time, and a lost worker is named."""

import pytest

import manyhands as mh
from pace import assert_within

from .tools import KILLED, LIMIT, Strike, kill, small, struck

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_processes_have_the_bits_of_virtual_time(link, quickly):
    settings = {"steps": 8, "seed": 2}
    hosts = 1 if link == "shm" else None
    make = {"virtual": {"cluster": mh.Cluster(workers=2, hosts=hosts)}, "real": {"workers": 2, "link": link}}
    virtual, real = (mh.train(small(), mh.fully_sharded(unit=1), **make[world], **settings) for world in make)
    assert real.weights_sha256 == virtual.weights_sha256
    assert real.weights_sha256 == mh.train(small(), mh.bsp(), workers=2, link=link, **settings).weights_sha256


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_a_lost_worker_ends_the_run_and_is_named(link, tmp_path, quickly):
    strike = Strike(kill, tmp_path, rank=1)
    with pytest.raises(mh.PeerLost, match=f"^rank 1 is lost: {KILLED}$"):
        mh.train(small(), struck(mh.fully_sharded(lr=0.01, unit=1), strike), workers=3, link=link, steps=10**6)
    assert_within(LIMIT, strike.seconds_ago())

"""A tree of servers among real processes: the same bits in lock step, and well enough otherwise."""

import pytest

import manyhands as mh

from .tools import Strike, kill, struck

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(("link", "servers"), [("shm", 0), ("tcp", 1)])
def test_a_bulk_tree_gives_the_same_bits_in_both_worlds(link, servers, quickly):
    real = mh.train("digits", mh.hierarchical_server(), workers=3, servers=servers, link=link, steps=12)
    virtual = mh.train("digits", mh.hierarchical_server(), cluster=mh.Cluster(workers=3, servers=servers), steps=12)
    assert real.weights_sha256 == virtual.weights_sha256


def test_downpour_in_two_groups_learns_the_digits(quickly):
    result = mh.train("digits", mh.downpour(groups=2), workers=4, epochs=15)
    assert result.test_accuracy >= 0.9
    assert (result.world, result.lost) == ("real", [])


def test_a_group_continues_without_a_child(tmp_path, quickly):
    strike = Strike(kill, tmp_path)
    result = mh.train("digits", struck(mh.downpour(groups=2), strike), workers=4, servers=1, epochs=15)
    assert result.lost == [(1, "it was killed by SIGKILL")]
    assert result.test_accuracy >= 0.9


def test_an_aggregator_is_missed(tmp_path, quickly):
    strike = Strike(kill, tmp_path, rank=2)
    with pytest.raises(mh.PeerLost, match=r"^rank 2 is lost: it was killed by SIGKILL$"):
        mh.train("digits", struck(mh.downpour(groups=2), strike), workers=4, servers=1)

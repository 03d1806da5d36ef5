"""What breaks in a virtual cluster, and what the others see of it, to the second."""

import pytest
import torch

from manyhands.core.errors import PeerLost
from manyhands.core.port import ANY, Tag, recv
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.faults import CutLink, Die, Slow, SlowLink, Stop
from manyhands.virtual.world import simulate

A, B, NEVER = Tag("a"), Tag("b"), Tag("never")


def run(workers, program, *faults, **knobs):
    """The simulation, without latency and with links of 100 bytes per second."""
    return simulate(Cluster(workers=workers, faults=faults, **{"latency": 0.0, "bandwidth": 100.0} | knobs), program)


def losses(t, frm=ANY):
    """The times and ranks of the losses that this rank learns of, until there is none for 10 seconds."""
    heard = []
    while True:
        try:
            if t.recv(NEVER, frm=frm, timeout=10.0) is None:
                return heard
        except PeerLost as loss:
            heard.append((t.now(), loss.rank, loss.why))
            if frm != ANY:
                return heard


KINDS = [(Die, "it died"), (Stop, "it was stopped"), (CutLink, "its link was cut")]


@pytest.mark.parametrize(("kind", "why"), KINDS)
@pytest.mark.parametrize("frm", [ANY, 1])
def test_a_rank_is_lost_at_its_time_and_the_others_hear_at_once(kind, why, frm):
    result = run(3, lambda t: losses(t, frm=t.rank if t.rank == 1 else frm), kind(1, at="2s"))
    assert result.results == [[(2.0, 1, why)], None, [(2.0, 1, why)]]
    assert result.lost == [(1, why)]


def test_the_reason_may_be_given():
    result = run(2, losses, Die(1, at=0.5, why="out of memory"))
    assert result.results[0] == [(0.5, 1, "out of memory")]


def test_a_lost_rank_does_nothing_any_more():
    log = []

    def program(t):
        def beside():
            try:
                t.charge_compute(9.0)
                log.append("never")
            finally:
                log.append((t.rank, "beside", t.now()))

        t.spawn(beside)
        try:
            t.charge_compute(9.0)
            log.append("never")
        finally:
            log.append((t.rank, "main", t.now()))
            t.send(0, A)
            t.recv(NEVER)

    def watch(t):
        if t.rank == 1:
            return program(t)
        return losses(t), t.recv(A, timeout=5.0)

    assert run(2, watch, Die(1, at=3.0)).results == [([(3.0, 1, "it died")], None), None]
    assert log == [(1, "main", 3.0), (1, "beside", 3.0)]


def test_a_message_that_was_not_sent_completely_is_lost_with_its_sender():
    """100 bytes take a second: the first two arrive in time, the third does not."""

    def program(t):
        if t.rank == 1:
            for number in range(3):
                t.send(0, A._replace(credit=3), (number,), [torch.zeros(25)])
            t.recv(NEVER)
        got = []
        with pytest.raises(PeerLost):
            while True:
                message = recv(t, A._replace(credit=3), frm=1)
                got.append((t.now(), message.meta))
        return got, t.now()

    assert run(2, program, Die(1, at=2.5)).results[0] == ([(1.0, (0,)), (2.0, (1,))], 2.5)


def test_the_link_is_free_again_when_a_lost_rank_no_longer_sends():
    """Ranks 1 and 2 send 16 chunks each to rank 0 in turn; one dies after 8, while its 9th is on the wire."""

    def program(t):
        if t.rank:
            t.send(0, A, (), [torch.zeros(65536 * 4)])
            t.flush()
            return t.now()
        message = recv(t, A, frm=2)
        message.release()
        return t.now()

    rate = 65536.0 * 16
    assert run(3, program, bandwidth=rate).results == [2.0, 1.9375, 2.0]
    assert run(3, program, Die(1, at=1.0), bandwidth=rate).results == [1.5625, None, 1.5625]


def test_what_is_in_flight_to_a_lost_rank_is_dropped_and_flush_returns():
    """Of two messages of 4 s each the first is on the wire and passes, the second never gets there."""

    def program(t):
        if t.rank:
            recv(t, NEVER)
        x = torch.zeros(100)
        for _ in range(4):
            t.send(1, A, (), [x])
        x.add_(1)
        freed = t.now()
        t.flush()
        return freed, t.now(), t.bytes_sent

    assert run(2, program, Die(1, at=1.5)).results[0] == (1.5, 4.0, 800)


def test_two_deaths_are_two_losses_in_their_order():
    result = run(4, losses, Die(2, at=3.0), Die(1, at=1.0))
    heard = [(1.0, 1, "it died"), (3.0, 2, "it died")]
    assert result.results == [heard, None, None, heard]
    assert result.lost == [(1, "it died"), (2, "it died")]


def test_two_deaths_at_one_instant_are_two_losses():
    both = [(1.0, 2, "it died"), (1.0, 1, "it was stopped")]
    assert run(4, losses, Die(2, at=1.0), Stop(1, at=1.0)).results == [both, None, None, both]


def test_a_rank_dies_only_once():
    result = run(2, losses, Die(1, at=1.0), Stop(1, at=2.0), CutLink(1, at=1.0))
    assert result.results[0] == [(1.0, 1, "it died")]
    assert result.lost == [(1, "it died")]


def test_who_has_left_cannot_be_lost():
    def program(t):
        if t.rank == 1:
            t.leave()
            t.charge_compute(5.0)
            return "still here"
        heard = losses(t)
        with pytest.raises(PeerLost, match="rank 1 is lost: left"):
            recv(t, NEVER, frm=1)
        return heard

    result = run(2, program, Die(1, at=1.0))
    assert result.results == [[], "still here"]
    assert result.lost == []


def test_a_death_after_the_end_does_not_happen():
    result = run(2, lambda t: t.charge_compute(1.0), Die(1, at=1.5))
    assert (result.seconds, result.lost) == (1.0, [])


def test_a_rank_may_be_dead_from_the_start():
    def program(t):
        t.charge_compute(1.0)
        return losses(t)

    assert run(2, program, Die(1)).results == [[(1.0, 1, "it died")], None]


def test_a_lock_is_freed_when_its_holder_dies_and_given_to_the_next():
    def program(t):
        t.charge_compute(0.1 * t.rank)
        with t.lock("lock"):
            entered = t.now()
            t.charge_compute(10.0)
        return entered, t.now()

    result = run(4, program, Die(1, at=14.0), Die(2, at=5.0), hosts=1)
    assert result.results == [(0.0, 10.0), None, None, (14.0, 24.0)]
    assert run(2, program, Die(0, at=4.0), hosts=1).results == [None, (4.0, 14.0)]


def test_all_but_one_die():
    def program(t):
        seen = [(t.now(), list(t.peers()))]
        for _ in range(4):
            with pytest.raises(PeerLost):
                recv(t, NEVER)
            seen.append((t.now(), list(t.peers())))
        for rank in range(4):
            t.send(rank, A, (), [torch.ones(3)])
        t.flush()
        t.collective([4]).all_reduce(torch.ones(2))
        return seen

    result = run(5, program, *(Die(rank, at=1.0 + rank) for rank in range(4)))
    assert result.results[:4] == [None] * 4
    assert result.results[4] == [
        (0.0, [0, 1, 2, 3]),
        (1.0, [1, 2, 3]),
        (2.0, [2, 3]),
        (3.0, [3]),
        (4.0, []),
    ]


def test_all_die():
    result = run(2, losses, Die(0, at=1.0), Die(1, at=2.0))
    assert (result.results, result.seconds, len(result.lost)) == ([None, None], 2.0, 2)


def test_a_death_in_an_all_reduce_is_raised_in_all_that_wait_in_it():
    def program(t):
        if t.rank == 2:
            t.charge_compute(9.0)
        with pytest.raises(PeerLost) as caught:
            t.collective(range(3)).all_reduce(torch.ones(2))
        return t.now(), caught.value.rank

    assert run(3, program, Die(2, at=3.0)).results == [(3.0, 2), (3.0, 2), None]


def test_a_slow_link_slows_the_messages_sent_from_its_time_on():
    """100 bytes take 1 s and latency 1 s; five times as much from 10 s on, on the links of rank 1 only."""

    def program(t):
        if t.rank == 0:
            for number in range(2):
                for to in (1, 2):
                    t.send(to, A.of(number), (), [torch.zeros(25)])
                    t.flush()
                t.recv(NEVER, timeout=20.0 - t.now())
            return None
        arrived = []
        for number in range(2):
            recv(t, A.of(number)).release()
            arrived.append(t.now())
        return arrived

    faults = [SlowLink(1, at="10s", factor=5.0)]
    assert run(3, program, *faults, latency=1.0).results == [None, [2.0, 30.0], [4.0, 32.0]]


def test_a_rank_becomes_slow_at_its_time():
    def program(t):
        times = []
        for _ in range(3):
            t.charge_compute(1.0)
            times.append(t.now())
        return times

    result = run(2, program, Slow([1], factor=3.0, at="1500ms"))
    assert result.results == [[1.0, 2.0, 3.0], [1.0, 2.0, 5.0]]
    assert result.lost == []

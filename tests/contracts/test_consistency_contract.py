"""Every consistency, on all interleavings of a few workers: bounds hold, nobody is stuck, nothing is lost."""

import functools
import random

import pytest
import torch

from manyhands.codecs import Raw
from manyhands.consistency import Bulk, Free, Quorum, Stale
from manyhands.core.flat import Place, Span
from manyhands.core.holding import Holding
from manyhands.rules import Sgd
from manyhands.topology.servers.inbox import inbox_of
from manyhands.topology.servers.ledger import NEVER, Ledger
from manyhands.topology.servers.shard import Shard

ALL = [Bulk(), Stale(0), Stale(1), Stale(2), Free()]


class Play:
    """A shard and workers that each pull and push `clocks` times and then leave, one move at a time."""

    def __init__(self, when, workers, clocks):
        self.workers, self.clocks = range(workers), clocks
        weights = torch.zeros(1, dtype=torch.float64)
        place = Place("w", Span(0, 0, 1), weights.shape, 0)
        holding = Holding(Span(0, 0, 1), weights, [place], Sgd(1.0))
        self.shard = Shard([holding], when, Ledger(workers, 0), inbox_of([Raw()]), batch_size=1)
        self.clock = [0] * workers
        self.state = ["wants to read"] * workers
        self.seen = [0] * workers
        self.reads = []
        self.released = []

    def able(self):
        """Who can do something now."""
        return [i for i in self.workers if self.state[i] in ("wants to read", "has read")]

    def move(self, i):
        """Worker i takes its next step."""
        if self.state[i] == "wants to read":
            if self.clock[i] == self.clocks:
                self.state[i] = "left"
                self.free(self.shard.leave(i))
            else:
                self.state[i] = "parked"
                if self.shard.pull(i):
                    self.read(i)
        else:
            g = torch.tensor([-float(10**i)], dtype=torch.float64)
            self.state[i], c = "wants to read", self.clock[i]
            self.clock[i] += 1
            self.free(self.shard.push(i, [(g,)], self.seen[i], (), lambda: self.released.append((i, c))))

    def free(self, freed):
        for i in freed:
            assert self.state[i] == "parked", "only the parked are freed"
            self.read(i)

    def read(self, i):
        slowest = min(c for c, s in zip(self.clock, self.state, strict=True) if s != "left")
        self.state[i] = "has read"
        self.seen[i] = self.shard.ledger.version
        self.reads.append((i, self.clock[i], self.clock[i] - slowest, self.shard.holdings[0].weights.item()))


def exhaustive(when, workers, clocks):
    """All plays, depth first; where one branches off is played again, from its moves."""
    stack = [[]]
    while stack:
        play, moves = Play(when, workers, clocks), stack.pop()
        for i in moves:
            play.move(i)
        while able := play.able():
            first, *others = able
            stack += [[*moves, i] for i in others]
            moves = [*moves, first]
            play.move(first)
        yield play


def at_random(when, workers, clocks, plays):
    """Some plays."""
    dice = random.Random(f"{when}")
    for _ in range(plays):
        play = Play(when, workers, clocks)
        while able := play.able():
            play.move(dice.choice(able))
        yield play


def played(when):
    yield from exhaustive(when, workers=2, clocks=2)
    yield from exhaustive(when, workers=3, clocks=1)
    yield from at_random(when, workers=3, clocks=5, plays=100)


@functools.cache
def plays(when):
    """All of them, once for all tests."""
    return list(played(when))


@pytest.mark.parametrize("when", ALL, ids=str)
def test_nobody_is_stuck_and_every_push_counts_once(when):
    for play in plays(when):
        assert play.state == ["left"] * len(play.workers)
        total = play.shard.holdings[0].weights.item()
        pushed = [play.clocks * 10.0**i for i in play.workers]
        assert total == pytest.approx(sum(pushed) / (len(pushed) if when.merges else 1))
        assert sorted(play.released) == [(i, c) for i in play.workers for c in range(play.clocks)]


@pytest.mark.parametrize("when", [Stale(0), Stale(1), Stale(2)], ids=str)
def test_nobody_reads_too_far_ahead_but_as_far_as_allowed(when):
    gaps = {gap for play in plays(when) for _, _, gap, _ in play.reads}
    assert max(gaps) == when.staleness


@pytest.mark.parametrize("when", [Stale(0), Stale(1), Stale(2), Free()], ids=str)
def test_everyone_sees_their_own_writes(when):
    for play in plays(when):
        for i, c, _, w in play.reads:
            assert w // 10**i % 10 >= c


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_read_at_clock_c_sees_all_updates_up_to_c_minus_s_minus_1(staleness):
    for play in plays(Stale(staleness)):
        for _, c, _, w in play.reads:
            assert all(w // 10**k % 10 >= c - staleness for k in play.workers)


@pytest.mark.parametrize("when", [Stale(0), Bulk()], ids=str)
def test_pushes_of_a_clock_stay_invisible_until_all_have_read_at_it(when):
    for play in plays(when):
        one = sum(10.0**k for k in play.workers) / (len(play.workers) if when.merges else 1)
        for _, c, _, w in play.reads:
            assert w == pytest.approx(c * one), "exactly the updates of earlier clocks"


QUORUMS = [
    Quorum(k, fresh=fresh, distinct=distinct) for k in (1, 2) for fresh in (True, False) for distinct in (True, False)
]


@pytest.mark.parametrize("when", QUORUMS, ids=str)
def test_of_some_nobody_is_stuck_and_every_push_is_applied_once_or_refused(when, monkeypatch):
    update = Shard._update

    def noted(shard, group):
        shard.__dict__.setdefault("groups", []).append([(one.worker, shard.ledger.version - one.seen) for one in group])
        update(shard, group)

    monkeypatch.setattr(Shard, "_update", noted)
    sizes, refused = set(), 0
    for play in played(when):
        assert play.state == ["left"] * len(play.workers)
        assert sorted(play.released) == [(i, c) for i in play.workers for c in range(play.clocks)]
        groups = play.shard.groups
        assert play.shard.holdings[0].weights.item() == pytest.approx(
            sum(sum(10.0**i for i, _ in group) / len(group) for group in groups)
        )
        sizes |= {len(group) for group in groups}
        refused += len(play.workers) * play.clocks - sum(len(group) for group in groups)
        for group in groups:
            assert not when.fresh or all(lag == 0 for _, lag in group)
            assert not when.distinct or len({i for i, _ in group}) == len(group)
    assert max(sizes) == when.k
    assert (refused > 0) == when.fresh


def test_the_slowest_clock_is_kept_without_searching():
    ledger = Ledger(3, 0)
    moved = [ledger.tick(i) for i in (0, 0, 1, 2)]
    assert moved == [False, False, False, True]
    assert ledger.slowest == 1
    assert [ledger.leave(1), ledger.leave(2), ledger.leave(2)] == [False, True, False]
    assert (ledger.slowest, ledger.alive, ledger.clock[1]) == (2, 1, NEVER)

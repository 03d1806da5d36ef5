"""Every consistency (EXAMPLES of manyhands/consistency), on all interleavings of a few workers.

Bounds hold, no worker is stuck, and no gradient is lost.
"""

import collections
import functools
import random

import pytest
import torch
from part_modules import check_module, classes_with, examples, members_of, modules, public_members

from manyhands import consistency
from manyhands.codecs import Raw
from manyhands.core.consistency import OPTIONAL, Consistency, Picks
from manyhands.core.flat import ParamSlot, Span
from manyhands.core.vector_ops import UNCHARGED
from manyhands.core.weight_slice import WeightSlice
from manyhands.rules import Sgd
from manyhands.servers.clock_table import NEVER, ClockTable
from manyhands.servers.pending_gradients import PendingGradients
from manyhands.servers.shard import Shard

MODULES = modules(consistency)
EXAMPLES = examples(consistency)


def those(condition):
    """The consistencies for which a test applies."""
    found = {name: when for name, when in EXAMPLES.items() if condition(when)}
    return pytest.mark.parametrize("when", found.values(), ids=found.keys())


class RecordingShard(Shard):
    """A shard that records of each update the workers and the lags of its gradients."""

    def _update(self, group, read):
        self.__dict__.setdefault("updates", []).append([(one.worker, self.clocks.version - one.seen) for one in group])
        super()._update(group, read)


class Play:
    """A shard and workers that each pull and push `clocks` times and then leave, one move at a time."""

    def __init__(self, when, workers, clocks):
        self.workers, self.clocks = range(workers), clocks
        weights = torch.zeros(1, dtype=torch.float64)
        slot = ParamSlot("w", Span(0, 0, 1), weights.shape, 0)
        weight_slice = WeightSlice(UNCHARGED, Span(0, 0, 1), weights, [slot], Sgd(1.0))
        when = when.among(workers) if isinstance(when, Picks) else when
        pending = PendingGradients(UNCHARGED, [Raw()], [weights], "never")
        self.shard = RecordingShard(UNCHARGED, [weight_slice], when, ClockTable(workers, 0), pending, batch_size=1)
        self.clock = [0] * workers
        self.state = ["wants to read"] * workers
        self.seen = [0] * workers
        self.reads = []
        self.released = []

    @property
    def updates(self):
        """The (worker, lag) of all gradients of each update."""
        return self.shard.__dict__.get("updates", [])

    def able(self):
        """The workers that can make a move."""
        return [i for i in self.workers if self.state[i] in ("wants to read", "has read")]

    def move(self, i):
        """The next read or push of worker i."""
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
            assert self.state[i] == "parked", "only parked workers are freed"
            self.read(i)

    def read(self, i):
        slowest = min(c for c, s in zip(self.clock, self.state, strict=True) if s != "left")
        self.state[i] = "has read"
        self.seen[i] = self.shard.clocks.version
        self.reads.append((i, self.clock[i], self.clock[i] - slowest, self.shard.slices[0].weights.item()))


def exhaustive(when, workers, clocks):
    """All plays, depth first; a branch is replayed from its list of moves."""
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
    """Plays whose next worker is drawn at random."""
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
    """All plays of a consistency, computed once for all tests."""
    return list(played(when))


# -- the table -----------------------------------------------------------------------------------------

PARTS = {name: classes_with(module, "ready", "admit") for name, module in MODULES.items()}


@pytest.mark.parametrize("name", [name for name, kinds in PARTS.items() if kinds])
def test_a_module_with_a_consistency_has_examples_and_is_exported(name):
    check_module(consistency, MODULES[name], PARTS[name])


@pytest.mark.parametrize("kind", [kind for kinds in PARTS.values() for kind in kinds], ids=lambda kind: kind.__name__)
def test_every_public_member_is_in_the_protocol_or_in_the_table(kind):
    assert public_members(kind) <= members_of(Consistency) | set(OPTIONAL)
    assert set(OPTIONAL) == members_of(Picks)


# -- all interleavings ---------------------------------------------------------------------------------


@those(lambda when: True)
def test_no_worker_is_stuck_and_every_push_is_applied_once_or_dropped(when):
    for play in plays(when):
        assert play.state == ["left"] * len(play.workers)
        assert sorted(play.released) == [(i, c) for i in play.workers for c in range(play.clocks)]
        means = [sum(10.0**i for i, _ in group) / (len(group) if when.merges else 1) for group in play.updates]
        assert play.shard.slices[0].weights.item() == pytest.approx(sum(means))
        applied = collections.Counter(i for group in play.updates for i, _ in group)
        assert all(applied[i] <= play.clocks for i in play.workers)
        assert isinstance(when, Picks) or sum(applied.values()) == len(play.workers) * play.clocks


@those(lambda when: isinstance(when, Picks))
def test_an_update_holds_only_accepted_gradients_and_no_more_than_may_be_pending(when):
    dropped = 0
    for play in plays(when):
        for group in play.updates:
            again = len({i for i, _ in group}) < len(group)
            assert all(when.accept(lag, again) for _, lag in group)
            assert len(group) <= when.among(len(play.workers)).most(len(play.workers))
        dropped += len(play.workers) * play.clocks - sum(len(group) for group in play.updates)
    assert (dropped > 0) is not when.accept(lag=1, again=False)


@those(lambda when: when.bounds_clocks)
def test_a_read_is_at_most_staleness_clocks_ahead_and_some_are_that_far(when):
    gaps = {gap for play in plays(when) for _, _, gap, _ in play.reads}
    assert max(gaps) == when.staleness


@those(lambda when: when.bounds_clocks)
def test_a_read_at_clock_c_sees_all_updates_up_to_c_minus_s_minus_1(when):
    for play in plays(when):
        for _, c, _, w in play.reads:
            assert all(w // 10**k % 10 >= c - when.staleness for k in play.workers)


@those(lambda when: not when.merges)
def test_a_worker_reads_its_own_writes(when):
    for play in plays(when):
        for i, c, _, w in play.reads:
            assert w // 10**i % 10 >= c


@those(lambda when: not any(when.ready(n - 1, n) for n in (2, 3)))
def test_pushes_of_a_clock_stay_invisible_until_all_have_read_at_it(when):
    """If an update needs all workers, a read sees exactly the updates of earlier clocks."""
    for play in plays(when):
        one = sum(10.0**k for k in play.workers) / (len(play.workers) if when.merges else 1)
        for _, c, _, w in play.reads:
            assert w == pytest.approx(c * one)


def test_the_slowest_clock_is_kept_without_searching():
    clocks = ClockTable(3, 0)
    moved = [clocks.tick(i) for i in (0, 0, 1, 2)]
    assert moved == [False, False, False, True]
    assert clocks.slowest == 1
    assert [clocks.leave(1), clocks.leave(2), clocks.leave(2)] == [False, True, False]
    assert (clocks.slowest, clocks.alive, clocks.clock[1]) == (2, 1, NEVER)

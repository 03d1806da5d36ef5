"""Gathering at the lead, while ranks die."""

import pytest
import torch
from torch import nn

from manyhands.core.gather import gather, mean
from manyhands.core.task import Task
from manyhands.core.worker import Worker
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.faults import Die, SlowLink
from manyhands.virtual.world import simulate

TASK = Task(model=lambda: nn.Linear(1, 1), data=[(torch.zeros(1), torch.zeros(1))])


def worker(t):
    return Worker(t, TASK, TASK.build(0), seed=0, steps=1, batch_size=1)


def hand_over(w, number=0):
    """Gather a number and two tensors of this rank; what came together, by rank."""
    one = torch.full((2,), float(w.rank + 10 * number))
    two = torch.arange(3, dtype=torch.float64) * w.rank
    gathered = gather(w, (w.rank, number), (one, two))
    one.fill_(-1.0)
    two.fill_(-1.0)
    return gathered


def read(gathered):
    return gathered and {rank: (meta, [x.tolist() for x in tensors]) for rank, (meta, tensors) in gathered.items()}


def whole(ranks, number=0):
    return {rank: ((rank, number), [[rank + 10.0 * number] * 2, [0.0, float(rank), 2.0 * rank]]) for rank in ranks}


def handed(w, number=0):
    """What was gathered, read at once: the lead's own tensors are its own."""
    one = torch.full((2,), float(w.rank + 10 * number))
    two = torch.arange(3, dtype=torch.float64) * w.rank
    return read(gather(w, (w.rank, number), (one, two)))


def run(workers, program, *faults, servers=0, bandwidth="inf"):
    cluster = Cluster(workers=workers, servers=servers, faults=faults, latency=0.25, bandwidth=bandwidth)
    return simulate(cluster, program).results


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_lead_gets_everything_by_rank_and_the_others_nothing(workers):
    results = run(workers, lambda t: handed(worker(t)))
    assert results == [whole(range(workers)), *[None] * (workers - 1)]
    assert list(results[0]) == list(range(workers))


def test_servers_hand_nothing_over():
    def program(t):
        return handed(worker(t)) if t.role == "worker" else "server"

    assert run(2, program, servers=2) == [whole([0, 1]), None, "server", "server"]


def test_what_was_handed_over_may_be_overwritten_afterwards():
    def program(t):
        w = worker(t)
        return read({rank: it for rank, it in (hand_over(w) or {}).items() if rank != w.rank})

    assert run(3, program)[0] == whole([1, 2])


def test_it_is_a_barrier():
    def program(t):
        t.spend(float(t.rank))
        handed(worker(t))
        return t.now()

    assert run(3, program) == [2.25, 2.5, 2.5]


def test_one_gathering_after_the_other():
    def program(t):
        w = worker(t)
        return [handed(w, number) for number in range(5)]

    results = run(3, program)
    assert results[0] == [whole(range(3), number) for number in range(5)]
    assert results[1:] == [[None] * 5] * 2


def test_a_worker_that_dies_before_it_hands_over_is_left_out():
    def program(t):
        t.spend(3.0 if t.rank == 1 else 0.5)
        return handed(worker(t)), t.now()

    assert run(4, program, Die(1, at=2.0)) == [(whole([0, 2, 3]), 2.0), None, (None, 2.25), (None, 2.25)]


@pytest.mark.parametrize("late", [0, 2])
def test_a_worker_that_dies_after_it_handed_over_counts(late):
    def program(t):
        w = worker(t)
        t.spend(3.0 if t.rank == late else 0.5)
        return handed(w)

    assert run(3, program, Die(1, at=2.0)) == [whole([0, 1, 2]), None, None]


def test_a_worker_that_has_left_is_left_out():
    def program(t):
        if t.rank == 1:
            return t.leave()
        t.spend(1.0)
        return handed(worker(t))

    assert run(3, program) == [whole([0, 2]), None, None]


def test_when_the_lead_dies_the_next_one_leads():
    def program(t):
        t.spend(3.0 if t.rank == 0 else 0.5)
        return handed(worker(t)), t.now()

    assert run(4, program, Die(0, at=2.0)) == [None, (whole([1, 2, 3]), 2.25), (None, 2.5), (None, 2.5)]


def test_when_two_leads_die_the_third_leads():
    def program(t):
        t.spend((9.0, 9.0, 0.5, 0.5)[t.rank])
        return handed(worker(t))

    assert run(4, program, Die(0, at=2.0), Die(1, at=3.0)) == [None, None, whole([2, 3]), None]
    assert run(4, program, Die(1, at=2.0), Die(0, at=3.0)) == [None, None, whole([2, 3]), None]
    assert run(4, program, Die(0, at=2.0), Die(1, at=2.0)) == [None, None, whole([2, 3]), None]


def test_when_all_others_die_one_gathers_alone():
    def program(t):
        t.spend(0.5 if t.rank == 2 else 9.0)
        return handed(worker(t))

    assert run(3, program, Die(0, at=1.0), Die(1, at=2.0)) == [None, None, whole([2])]


def test_gatherings_go_on_after_the_lead_has_died():
    def program(t):
        w = worker(t)
        gathered = []
        for number in range(8):
            t.spend(1.0)
            gathered.append(handed(w, number))
        return gathered

    results = run(4, program, Die(0, at=2.0))
    assert results[0] is None
    assert results[1][-6:] == [whole([1, 2, 3], number) for number in range(2, 8)]
    assert results[2:] == [[None] * 8] * 2


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_whenever_the_lead_dies_the_gatherings_stay_apart(slow):
    """One rank hears everything late, so the lead may die when it has thanked only some. Nobody hangs, each gathering
    ends up in one place with nothing but its own, and once rank 1 leads it goes on doing so."""

    def program(t):
        w = worker(t)
        gathered = []
        for number in range(5):
            t.spend(0.1 * (t.rank + 1))
            gathered.append(handed(w, number))
        t.leave()
        return gathered

    counts = set()
    for moment in range(1, 400):
        died, *others = run(4, program, SlowLink(slow, factor=4.0), Die(0, at=moment / 8), bandwidth=64.0)
        last = [gathered.pop() for gathered in others]  # whoever was thanked may have left by now
        assert all(found is None or found == whole(found, 4) for found in last)
        assert others[1:] == [[None] * 4] * 2
        led = [number for number in range(4) if others[0][number] is not None]
        assert led == list(range(4 - len(led), 4))
        assert [others[0][number] for number in led] == [whole([1, 2, 3], number) for number in led]
        if died is not None:
            assert died == [whole(range(4), number) for number in range(5)]
            assert (led, last) == ([], [None] * 3)
        counts.add(len(led))
    assert counts == {0, 1, 2, 3, 4}


# -- the mean -----------------------------------------------------------------------------------------


def test_the_mean_of_what_was_handed_over():
    def program(t):
        w = worker(t)
        x = torch.tensor([1.0, 2.0], dtype=torch.float64) * (w.rank + 1)
        gathered = gather(w, (), (x, torch.full((1, 2), float(w.rank))))
        return gathered and [(y.dtype, y.tolist()) for y in mean(gathered)]

    expected = [(torch.float64, [2.0, 4.0]), (torch.float32, [[1.0, 1.0]])]
    assert run(3, program) == [expected, None, None]


def test_the_mean_is_over_those_who_are_there():
    def program(t):
        if t.rank == 1:
            t.spend(9.0)
        gathered = gather(worker(t), (), (torch.tensor([float(t.rank)]),))
        return gathered and mean(gathered)[0].item()

    assert run(4, program, Die(1, at=1.0)) == [pytest.approx(5 / 3), None, None, None]


def test_the_mean_of_weights_that_require_a_gradient_has_none():
    gathered = {rank: ((), (torch.ones(2, requires_grad=True),)) for rank in range(2)}
    (average,) = mean(gathered)
    assert (average.tolist(), average.requires_grad) == ([1.0, 1.0], False)

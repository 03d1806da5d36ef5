"""Gather at the lead, while ranks are lost."""

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


def gather_and_overwrite(w, number=0):
    """Gather a number and two tensors of this rank, then overwrite the tensors; what was gathered."""
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


def gathered_parts(w, number=0):
    """Gather a number and two tensors of this rank; what was gathered, as plain numbers."""
    one = torch.full((2,), float(w.rank + 10 * number))
    two = torch.arange(3, dtype=torch.float64) * w.rank
    return read(gather(w, (w.rank, number), (one, two)))


def run(workers, program, *faults, servers=0, bandwidth="inf"):
    cluster = Cluster(workers=workers, servers=servers, faults=faults, latency=0.25, bandwidth=bandwidth)
    return simulate(cluster, program).results


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_lead_gets_everything_by_rank_and_the_others_nothing(workers):
    results = run(workers, lambda t: gathered_parts(worker(t)))
    assert results == [whole(range(workers)), *[None] * (workers - 1)]
    assert list(results[0]) == list(range(workers))


def test_servers_take_no_part():
    def program(t):
        return gathered_parts(worker(t)) if t.role == "worker" else "server"

    assert run(2, program, servers=2) == [whole([0, 1]), None, "server", "server"]


def test_tensors_may_be_overwritten_after_the_gather():
    def program(t):
        w = worker(t)
        return read({rank: it for rank, it in (gather_and_overwrite(w) or {}).items() if rank != w.rank})

    assert run(3, program)[0] == whole([1, 2])


def test_it_is_a_barrier():
    def program(t):
        t.charge_compute(float(t.rank))
        gathered_parts(worker(t))
        return t.now()

    assert run(3, program) == [2.25, 2.5, 2.5]


def test_one_gather_after_the_other():
    def program(t):
        w = worker(t)
        return [gathered_parts(w, number) for number in range(5)]

    results = run(3, program)
    assert results[0] == [whole(range(3), number) for number in range(5)]
    assert results[1:] == [[None] * 5] * 2


def test_a_worker_that_is_lost_before_it_sends_is_left_out():
    def program(t):
        t.charge_compute(3.0 if t.rank == 1 else 0.5)
        return gathered_parts(worker(t)), t.now()

    assert run(4, program, Die(1, at=2.0)) == [(whole([0, 2, 3]), 2.0), None, (None, 2.25), (None, 2.25)]


@pytest.mark.parametrize("late", [0, 2])
def test_a_worker_that_is_lost_after_it_sent_counts(late):
    def program(t):
        w = worker(t)
        t.charge_compute(3.0 if t.rank == late else 0.5)
        return gathered_parts(w)

    assert run(3, program, Die(1, at=2.0)) == [whole([0, 1, 2]), None, None]


def test_a_worker_that_has_left_is_left_out():
    def program(t):
        if t.rank == 1:
            return t.leave()
        t.charge_compute(1.0)
        return gathered_parts(worker(t))

    assert run(3, program) == [whole([0, 2]), None, None]


def test_when_the_lead_is_lost_the_next_rank_leads():
    def program(t):
        t.charge_compute(3.0 if t.rank == 0 else 0.5)
        return gathered_parts(worker(t)), t.now()

    assert run(4, program, Die(0, at=2.0)) == [None, (whole([1, 2, 3]), 2.25), (None, 2.5), (None, 2.5)]


def test_when_two_leads_are_lost_the_third_leads():
    def program(t):
        t.charge_compute((9.0, 9.0, 0.5, 0.5)[t.rank])
        return gathered_parts(worker(t))

    assert run(4, program, Die(0, at=2.0), Die(1, at=3.0)) == [None, None, whole([2, 3]), None]
    assert run(4, program, Die(1, at=2.0), Die(0, at=3.0)) == [None, None, whole([2, 3]), None]
    assert run(4, program, Die(0, at=2.0), Die(1, at=2.0)) == [None, None, whole([2, 3]), None]


def test_when_all_others_are_lost_one_gathers_alone():
    def program(t):
        t.charge_compute(0.5 if t.rank == 2 else 9.0)
        return gathered_parts(worker(t))

    assert run(3, program, Die(0, at=1.0), Die(1, at=2.0)) == [None, None, whole([2])]


def test_gathers_continue_after_the_lead_is_lost():
    def program(t):
        w = worker(t)
        gathered = []
        for number in range(8):
            t.charge_compute(1.0)
            gathered.append(gathered_parts(w, number))
        return gathered

    results = run(4, program, Die(0, at=2.0))
    assert results[0] is None
    assert results[1][-6:] == [whole([1, 2, 3], number) for number in range(2, 8)]
    assert results[2:] == [[None] * 8] * 2


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_rounds_are_not_mixed_whenever_the_lead_is_lost(slow):
    """One rank has a slow link, so the lead may be lost when only some have its acknowledgement. No rank waits for
    ever, each round is gathered by one lead with the parts of that round only, and once rank 1 leads it stays lead."""

    def program(t):
        w = worker(t)
        gathered = []
        for number in range(5):
            t.charge_compute(0.1 * (t.rank + 1))
            gathered.append(gathered_parts(w, number))
        t.leave()
        return gathered

    counts = set()
    for moment in range(1, 400):
        died, *others = run(4, program, SlowLink(slow, factor=4.0), Die(0, at=moment / 8), bandwidth=64.0)
        last = [gathered.pop() for gathered in others]  # a worker with its acknowledgement may have left by now
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


def test_the_mean_of_gathered_tensors():
    def program(t):
        w = worker(t)
        x = torch.tensor([1.0, 2.0], dtype=torch.float64) * (w.rank + 1)
        gathered = gather(w, (), (x, torch.full((1, 2), float(w.rank))))
        return gathered and [(y.dtype, y.tolist()) for y in mean(gathered)]

    expected = [(torch.float64, [2.0, 4.0]), (torch.float32, [[1.0, 1.0]])]
    assert run(3, program) == [expected, None, None]


def test_the_mean_is_over_living_workers():
    def program(t):
        if t.rank == 1:
            t.charge_compute(9.0)
        gathered = gather(worker(t), (), (torch.tensor([float(t.rank)]),))
        return gathered and mean(gathered)[0].item()

    assert run(4, program, Die(1, at=1.0)) == [pytest.approx(5 / 3), None, None, None]


def test_the_mean_of_weights_that_require_a_gradient_has_none():
    gathered = {rank: ((), (torch.ones(2, requires_grad=True),)) for rank in range(2)}
    (average,) = mean(gathered)
    assert (average.tolist(), average.requires_grad) == ([1.0, 1.0], False)

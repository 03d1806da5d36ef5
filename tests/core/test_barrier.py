"""Barrier: work that needs all workers continues after a gather, whenever a rank is lost."""

import pytest
import torch
from torch import nn

from manyhands.core.barrier import barrier
from manyhands.core.errors import PeerLost
from manyhands.core.gather import gather
from manyhands.core.port import Tag, recv
from manyhands.core.task import Task
from manyhands.core.worker import Worker
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.faults import Die, SlowLink
from manyhands.virtual.world import simulate

TASK = Task(model=lambda: nn.Linear(1, 1), data=[(torch.zeros(1), torch.zeros(1))])
WORK = Tag("work")
LATENCY = 0.25


def worker(t):
    return Worker(t, TASK, TASK.build(0), seed=0, steps=1, batch_size=1)


def work(w, number):
    """An exchange that completes only if all living workers take part."""
    others = [rank for rank in w.workers if rank != w.rank]
    for rank in others:
        w.transport.send(rank, WORK.of(number))
    for rank in others:
        try:
            recv(w.transport, WORK.of(number), frm=rank)
        except PeerLost:
            continue


def rounds(t):
    """Three rounds of work, two gathers and a barrier."""
    w = worker(t)
    for number in range(3):
        work(w, number)
        gather(w, (number,), (torch.zeros(2),))
        gather(w)
        barrier(w)
    t.leave()
    return "done"


def run(*faults, workers=4, program=rounds):
    return simulate(Cluster(workers=workers, faults=faults, latency=LATENCY, bandwidth=100.0), program)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_no_worker_continues_before_the_last_one_is_there(workers):
    def program(t):
        t.charge_compute(float(t.rank))
        barrier(worker(t))
        return t.now()

    times = run(workers=workers, program=program).results
    assert min(times) >= workers - 1
    assert max(times) == pytest.approx(workers - 1 + (LATENCY if workers > 1 else 0))


def test_a_lost_worker_is_not_waited_for():
    def program(t):
        t.charge_compute(5.0 * t.rank)
        barrier(worker(t))
        return t.now()

    *others, lost = run(Die(3, 4.0), program=program).results
    assert lost is None and max(others) == pytest.approx(10 + LATENCY)


@pytest.mark.parametrize("links", [(1, 3), (2, 3), (3, 1)])
@pytest.mark.parametrize("victims", [(0,), (0, 1), (2,)], ids=str)
def test_no_worker_waits_for_ever_whenever_a_rank_is_lost(victims, links):
    slow = [SlowLink(links[0], factor=5), SlowLink(links[1], factor=2)]
    until, moments = run(*slow).seconds, 120
    for moment in range(moments):
        at = moment * until / moments
        deaths = [Die(rank, at + index * LATENCY) for index, rank in enumerate(victims)]
        results = run(*slow, *deaths).results
        assert all(results[rank] == "done" for rank in range(4) if rank not in victims)

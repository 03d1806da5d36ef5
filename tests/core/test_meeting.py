"""Meeting: work that needs everyone goes on after a gathering, whoever died at whatever moment of it."""

import pytest
import torch
from torch import nn

from manyhands.core.errors import PeerLost
from manyhands.core.gather import gather
from manyhands.core.meeting import meet
from manyhands.core.protocols import Tag, recv
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
    """Something that goes on only if all others do it too."""
    others = [rank for rank in w.workers if rank != w.rank]
    for rank in others:
        w.transport.send(rank, WORK.of(number))
    for rank in others:
        try:
            recv(w.transport, WORK.of(number), frm=rank)
        except PeerLost:
            continue


def rounds(t):
    """Work, gather what was done, meet, work again."""
    w = worker(t)
    for number in range(3):
        work(w, number)
        gather(w, (number,), (torch.zeros(2),))
        gather(w)
        meet(w)
    t.leave()
    return "done"


def run(*faults, workers=4, program=rounds):
    return simulate(Cluster(workers=workers, faults=faults, latency=LATENCY, bandwidth=100.0), program)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_nobody_goes_on_before_the_last_one_is_there(workers):
    def program(t):
        t.spend(float(t.rank))
        meet(worker(t))
        return t.now()

    times = run(workers=workers, program=program).results
    assert min(times) >= workers - 1
    assert max(times) == pytest.approx(workers - 1 + (LATENCY if workers > 1 else 0))


def test_a_worker_that_dies_on_the_way_is_not_waited_for():
    def program(t):
        t.spend(5.0 * t.rank)
        meet(worker(t))
        return t.now()

    *early, late = run(Die(3, 4.0), program=program).results
    assert late is None and max(early) == pytest.approx(10 + LATENCY)


@pytest.mark.parametrize("links", [(1, 3), (2, 3), (3, 1)])
@pytest.mark.parametrize("victims", [(0,), (0, 1), (2,)], ids=str)
def test_no_death_at_any_moment_makes_anybody_wait_for_ever(victims, links):
    late = [SlowLink(links[0], factor=5), SlowLink(links[1], factor=2)]
    until, moments = run(*late).seconds, 120
    for moment in range(moments):
        at = moment * until / moments
        deaths = [Die(rank, at + place * LATENCY) for place, rank in enumerate(victims)]
        results = run(*late, *deaths).results
        assert all(results[rank] == "done" for rank in range(4) if rank not in victims)

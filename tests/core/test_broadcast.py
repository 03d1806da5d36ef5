"""All ranks have one model at the beginning and at the end, even if the lead is lost."""

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.core.broadcast import broadcast_answer, broadcast_model
from manyhands.core.fields import OwnTask
from manyhands.core.flat import BUCKET_BYTES
from manyhands.core.port import Tag
from manyhands.core.subgroup import Subgroup
from manyhands.core.worker import Worker
from manyhands.virtual.world import simulate

ANSWER = {"weight": torch.full((1, 2), 7.0), "bias": torch.full((1,), 8.0)}


def worker(transport, steps=1):
    model = nn.Linear(2, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float(transport.rank))
    w = Worker(transport, OwnTask(model, None), model, seed=0, steps=0, batch_size=1)
    w.step = steps
    return w


def numbers(w):
    return [x for p in w.model.parameters() for x in p.detach().flatten().tolist()]


def wait_for_death(transport):
    transport.recv(Tag("never"), frm=transport.rank)


def test_all_ranks_begin_with_the_model_of_the_lead_servers_too():
    def run(transport):
        w = worker(transport)
        if transport.rank == 0:
            return wait_for_death(transport)
        transport.recv(Tag("never"), frm=transport.rank, timeout=2.0)  # until all ranks know that rank 0 is lost
        broadcast_model(w)
        return numbers(w)

    cluster = mh.Cluster(workers=3, servers=1, faults=[mh.Die(0, at=1.0)])
    assert simulate(cluster, run).results[1:] == [[1.0, 1.0, 1.0]] * 3


def test_a_large_model_is_sent_in_pieces():
    """No message is larger than a bucket, or than the one tensor that it has: a receiver keeps as much memory."""
    sizes = []

    class Noted(Subgroup):
        def send(self, to, tag, meta=(), tensors=(), *, latest=False):
            sizes.append([x.nbytes for x in tensors])
            super().send(to, tag, meta, tensors, latest=latest)

    def run(transport):
        torch.manual_seed(transport.rank)
        model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(5)), nn.Linear(600, 2000))
        transport = Noted(transport, range(2), "all")
        broadcast_model(Worker(transport, OwnTask(model, None), model, seed=0, steps=0, batch_size=1))
        return [p.detach() for p in model.parameters()]

    mine, theirs = simulate(mh.Cluster(2), run).results
    assert all(map(torch.equal, mine, theirs)) and len(mine) == sum(map(len, sizes)) and len(sizes) > 2
    assert all(sum(piece) <= BUCKET_BYTES or len(piece) == 1 for piece in sizes)


def test_a_slice_becomes_the_whole_parameter():
    def run(transport):
        w = worker(transport)
        w.model.weight.data = w.model.weight.data[:, :1].clone()
        broadcast_answer(w, 0, ANSWER if transport.rank == 0 else None)
        return numbers(w)

    assert simulate(mh.Cluster(2), run).results == [[7.0, 7.0, 8.0]] * 2


def test_a_lead_that_is_lost_before_the_beginning_is_named():
    def run(transport):
        if transport.rank == 0:
            wait_for_death(transport)
        broadcast_model(worker(transport))

    with pytest.raises(mh.PeerLost, match="rank 0 is lost"):
        simulate(mh.Cluster(workers=3, faults=[mh.Die(0, at=1.0)]), run)


@pytest.mark.parametrize(("steps", "expected"), [(1, [7.0, 7.0, 8.0]), (0, [0.0, 0.0, 0.0])])
def test_all_ranks_end_with_the_answer_if_a_worker_took_a_step(steps, expected):
    def run(transport):
        w = worker(transport, steps if transport.rank == 2 else 0)
        led = broadcast_answer(w, 0, ANSWER if transport.rank == 0 else None)
        transport.leave()
        return led, numbers(w)

    results = simulate(mh.Cluster(workers=3, servers=1), run).results
    assert results == [(rank == 0, expected) for rank in range(4)]


def test_the_successor_of_a_lost_lead_sends_the_answer():
    def run(transport):
        if transport.rank == 0:
            wait_for_death(transport)
        w = worker(transport)
        led = broadcast_answer(w, 0, ANSWER if transport.rank == 1 else None)
        transport.leave()
        return led, numbers(w)

    results = simulate(mh.Cluster(workers=4, servers=1, faults=[mh.Die(0, at=1.0)]), run).results
    assert results == [None, *((rank == 1, [7.0, 7.0, 8.0]) for rank in range(1, 5))]


def test_the_loss_of_a_lead_with_the_answer_is_named():
    def run(transport):
        if transport.rank == 0:
            wait_for_death(transport)
        broadcast_answer(worker(transport), 0, None)

    with pytest.raises(mh.PeerLost, match="rank 0 is lost: it had the answer"):
        simulate(mh.Cluster(workers=3, faults=[mh.Die(0, at=1.0)]), run)

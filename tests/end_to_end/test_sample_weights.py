"""Unequal mini-batches: the mean gradient is one over samples, not over workers."""

import pytest
import torch
from torch.nn.functional import mse_loss

import manyhands as mh
from manyhands.run.join import Hands
from manyhands.run.sample_weights import samples_in
from manyhands.virtual.world import simulate

from .small import task
from .test_prepared import close, fresh, sgd

X, Y = task().data.tensors
ROWS = {0: 6, 1: 2, 2: 3}
STEPS = 5
AVERAGING = {
    "bsp": mh.bsp,
    "bsp on one host": mh.bsp,
    "bsp-server": mh.bsp_server,
    "topk-sgd of everything": lambda: mh.topk_sgd(fraction=1.0),
    "hybrid": mh.hybrid,
    "sufficient-factors": mh.sufficient_factors,
}


def rows(rank, step):
    """Six rows for the first worker, two for the second, three for the third; other ones in every step."""
    start = (7 * step + sum(ROWS[other] for other in range(rank))) % 20
    return X[start : start + ROWS[rank]], Y[start : start + ROWS[rank]]


def alone(workers):
    """One process with the samples of all workers in one mini-batch."""
    net = fresh()
    optimizer = sgd(net)
    for step in range(STEPS):
        x, y = (torch.cat(parts) for parts in zip(*(rows(rank, step) for rank in range(workers)), strict=True))
        optimizer.zero_grad()
        mse_loss(net(x), y).backward()
        optimizer.step()
    return net


def prepared(hands, net):
    optimizer = sgd(net)
    hands.prepare(net, optimizer)
    for step in range(STEPS):
        x, y = rows(hands.rank, step)
        mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(name, loop, workers, **settings):
    """The models that every rank ends with."""

    def program(transport):
        net = fresh()
        with Hands(transport, strategy=AVERAGING[name](), **settings.get("join", lambda net: {})(net)) as hands:
            loop(hands, net)
        return net

    return simulate(mh.Cluster(workers=workers, hosts=1 if "one host" in name else None), program).results


def stepped(hands, net):
    for step in range(STEPS):
        hands.step(*rows(hands.rank, step))


def joining(net):
    return {"model": net, "loss": mse_loss, "optimizer": sgd(net)}


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", AVERAGING)
def test_a_prepared_loop_weighs_gradients_by_samples(name, workers):
    close(trained(name, prepared, workers), alone(workers), 1e-5)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", AVERAGING)
def test_a_loop_of_steps_weighs_gradients_by_samples(name, workers):
    close(trained(name, stepped, workers, join=joining), alone(workers), 1e-5)


def test_accumulated_passes_count_all_their_samples():
    """Two passes of three rows on one worker, one of two rows on the other: as six and two rows."""

    def loop(hands, net):
        optimizer = sgd(net)
        hands.prepare(net, optimizer)
        for step in range(STEPS):
            x, y = rows(hands.rank, step)
            parts = 2 if hands.rank == 0 else 1
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (mse_loss(net(a), b) / parts).backward()
            optimizer.step()
            optimizer.zero_grad()

    close(trained("bsp", loop, 2), alone(2), 1e-5)


def test_workers_that_have_ended_do_not_count():
    """Behind a server a worker may take fewer steps: the last ones are those of the other worker alone."""

    def loop(hands, net):
        optimizer = sgd(net)
        hands.prepare(net, optimizer)
        for step in range(STEPS if hands.rank == 0 else 3):
            x, y = rows(hands.rank, step)
            mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    net = fresh()
    optimizer = sgd(net)
    for step in range(STEPS):
        parts = [rows(rank, step) for rank in range(2 if step < 3 else 1)]
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        mse_loss(net(x), y).backward()
        optimizer.step()
    close(trained("bsp-server", loop, 2), net, 1e-5)


def test_the_first_tensor_of_the_inputs_tells_the_number_of_samples():
    x = torch.zeros(3, 2)
    assert samples_in(((x, torch.zeros(5)), {})) == 3
    assert samples_in(((), {"ids": x})) == 3
    assert samples_in((("text", [{"a": 1, "b": x}]), {})) == 3
    assert samples_in(((torch.tensor(1.0),), {})) is None

"""Passes that wait: in a thread that takes turns with the rank's own line of control, in both worlds."""

import gc
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from worlds import WORLDS, by_rank, die

from manyhands.collectives import collective
from manyhands.core.errors import PeerLost
from manyhands.core.pass_thread import PassEnded, PassThread
from manyhands.core.port import Tag, inside_backward, recv
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.world import simulate

ON = ["virtual", "shm", "tcp"]
BUSY = Tag("busy")
on_every_world = pytest.mark.parametrize("world", ON)


class Asking(torch.autograd.Function):
    """The identity; asks for `there` in its forward pass, and for `back` in its backward pass."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, error):
        return ctx.back(error), None, None


def threads():
    gc.collect()
    for thread in (found := [one for one in threading.enumerate() if one.name == "manyhands passes"]):
        if thread is not threading.current_thread():
            thread.join(5)
    return [one for one in found if one.is_alive()]


@torch.enable_grad()
def summing(asks, group, layers, x):
    """A pass whose layers sum over the ranks both ways; the gradient."""

    def summed(y):
        total = y.detach().clone()
        asks.ask(partial(group.all_reduce, total))
        return total

    y = x.requires_grad_()
    for _ in range(layers):
        y = Asking.apply(y * torch.rand(()), summed, summed)
    y.sum().backward()
    return x.grad


def sums_in_both_passes(transport):
    """Some passes on every rank, which seed the generator alike; what they computed, and when they ended."""
    asks, group, found = PassThread(protected), collective("ring", transport, range(transport.size)), []
    for step in range(3):
        transport.charge_compute(0.001 * transport.rank)
        torch.manual_seed(step)
        x = torch.full((4,), 1.0 + transport.rank, dtype=torch.float64)
        found.append(asks.run(partial(summing, asks, group, 3, x)))
    return torch.stack(found), transport.now() if transport.is_simulated else None


class protected:
    """Keeps torch's generator, which the ranks of virtual time share."""

    def __enter__(self):
        self.state = torch.get_rng_state()

    def __exit__(self, *_):
        torch.set_rng_state(self.state)


@on_every_world
def test_ranks_wait_for_one_another_inside_both_passes(world):
    found = WORLDS[world].run(3, sums_in_both_passes)
    for step in range(3):
        torch.manual_seed(step)
        factor = float(torch.rand(3).prod()) * 3**3
        for gradient, _ in found:
            assert gradient[step].tolist() == pytest.approx([factor] * 4)
    assert not threads()


def test_two_runs_have_the_same_bits_and_virtual_seconds():
    first, second = (WORLDS["virtual"].run(3, sums_in_both_passes) for _ in range(2))
    for (one, at), (other, then) in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert at == then > 0


def test_every_world_has_the_same_bits():
    first, *others = [WORLDS[world].run(2, sums_in_both_passes) for world in ON]
    for other in others:
        assert all(torch.equal(one[0], two[0]) for one, two in zip(first, other, strict=True))


def never_ends(transport):
    """Passes that sum with a rank that dies; the error comes out here, and not inside the pass."""
    asks, group = PassThread(protected), collective("ring", transport, range(transport.size))
    with pytest.raises(PeerLost):
        while True:
            asks.run(partial(summing, asks, group, 2, torch.ones(4)))
    assert not inside_backward()
    left = len(threads())
    return left, float(asks.run(lambda: summing(asks, One(), 1, torch.ones(2))).sum())


class One:
    """A collective of one rank."""

    def all_reduce(self, x):
        pass


def dies_in_a_pass(transport):
    asks, group = PassThread(protected), collective("ring", transport, range(transport.size))
    asks.run(partial(summing, asks, group, 2, torch.ones(4)))
    asks.run(partial(asks.ask, partial(die, transport)))


@on_every_world
def test_a_loss_comes_out_in_the_own_line_and_the_thread_ends(world):
    left, gradient = WORLDS[world].run(2, by_rank(never_ends, dies_in_a_pass), deaths=[1])[0]
    assert left == 0
    assert 0 <= gradient <= 2, "another pass can be run"
    assert not threads()


def test_an_error_of_a_pass_is_raised_by_run():
    asks = PassThread(nullcontext)
    with pytest.raises(KeyError, match="3"):
        asks.run(lambda: {}[3])
    assert not threads()


@torch.enable_grad()
def caught(asks, seen):
    def back(error):
        try:
            return asks.ask(lambda: {}["missing"])
        except Exception as error:  # a model's own handler
            seen.append(error)
        except PassEnded:
            seen.append("ended")
            raise

    Asking.apply(torch.ones(2, requires_grad=True), torch.clone, back).sum().backward()


def test_what_was_asked_for_fails_outside_and_ends_the_pass():
    asks, seen = PassThread(nullcontext), []
    with pytest.raises(KeyError, match="missing"):
        asks.run(partial(caught, asks, seen))
    assert seen == ["ended"]
    assert not threads()


def test_the_pass_has_the_modes_of_the_caller():
    asks, before = PassThread(nullcontext), torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            fresh = PassThread(nullcontext)
            assert fresh.run(torch.get_num_threads) == count
    finally:
        torch.set_num_threads(before)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            assert asks.run(torch.is_grad_enabled) is torch.is_grad_enabled()
    del asks, fresh
    assert not threads()


def test_outside_of_a_pass_the_call_is_made_at_once():
    asks = PassThread(nullcontext)
    assert asks.ask(threading.current_thread) is threading.current_thread()
    assert asks.run(threading.current_thread) is not threading.current_thread()
    assert asks.run(lambda: asks.ask(threading.current_thread)) is threading.current_thread()


def test_the_thread_can_be_ended_between_two_passes():
    asks = PassThread(nullcontext)
    asks.end()
    first = asks.run(threading.current_thread)
    asks.end()
    assert not first.is_alive()
    assert asks.run(threading.current_thread) is not first, "another pass starts another one"
    asks.end()
    assert not threads()


def killed_while_it_waits(transport):
    if transport.rank == 0:
        asks = PassThread(protected)
        asks.run(lambda: asks.ask(partial(recv, transport, BUSY, frm=1)))
    raise ValueError("the run ends")


def test_a_rank_that_is_ended_while_its_pass_waits_leaves_no_thread():
    with pytest.raises(ValueError, match="the run ends"):
        simulate(Cluster(workers=2), killed_while_it_waits)
    assert not threads()

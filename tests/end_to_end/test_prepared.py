"""A loop that is left as it is (`hands.prepare`), in virtual time: what the user's lines do is in force."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import manyhands as mh
from manyhands import Refused
from manyhands.core.errors import ManyhandsError
from manyhands.run.join import Hands
from manyhands.run.loaders import part_of
from manyhands.virtual.world import simulate

from .small import METHODS, ONE_HOST, SERVED, model, task

X, Y = task().data.tensors
STEPS, BATCH = 12, 4
NEED_STEP = {name for name in METHODS if METHODS[name]().traits.needs_step}
PREPARED = [name for name in METHODS if name not in NEED_STEP]
EXACT = ["bsp", "bsp_server"]
"""Methods that equal one process with the mean gradient of all workers."""


def fresh(make=model):
    torch.manual_seed(0)
    return make()


def sgd(net, **options):
    return torch.optim.SGD(net.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def batch(rank, step):
    """Other samples for every worker and step."""
    index = (torch.arange(BATCH) * 7 + 3 * step + 11 * rank) % len(X)
    return X[index], Y[index]


def joined(strategy, loop, workers=2, make=model, optimizer=sgd, cluster=None):
    """The models that `loop(hands, net, optimizer)` ends with on every rank."""

    def program(transport):
        net = fresh(make)
        with Hands(transport, strategy=strategy) as hands:
            loop(hands, net, optimizer(net))
        return net

    return simulate(cluster or mh.Cluster(workers=workers), program).results


def trained(strategy, between=None, schedule=None, steps=STEPS, **settings):
    """Train by an ordinary loop; `between` is called between backward and step, `schedule` makes a scheduler."""

    def loop(hands, net, optimizer):
        scheduler = schedule and schedule(optimizer)
        hands.prepare(net, optimizer)
        for step in range(steps):
            x, y = batch(hands.rank, step)
            mse_loss(net(x), y).backward()
            if between:
                between(net, optimizer, step)
            optimizer.step()
            if scheduler:
                scheduler.step()
            optimizer.zero_grad()

    return joined(strategy, loop, **settings)


def alone(between=None, schedule=None, steps=STEPS, workers=2, make=model, optimizer=sgd):
    """One process that takes the mean of the gradients which the workers would have computed."""
    net = fresh(make)
    optimizer = optimizer(net)
    scheduler = schedule and schedule(optimizer)
    for step in range(steps):
        for rank in range(workers):
            x, y = batch(rank, step)
            (mse_loss(net(x), y) / workers).backward()
        if between:
            between(net, optimizer, step)
        optimizer.step()
        if scheduler:
            scheduler.step()
        optimizer.zero_grad()
    return net


def close(nets, other, tolerance=1e-6):
    for net in nets:
        for a, b in zip(net.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def same(nets):
    return all(torch.equal(a, b) for net in nets for a, b in zip(net.parameters(), nets[0].parameters(), strict=True))


def error(net):
    with torch.no_grad():
        return mse_loss(net(X), Y).item()


def distance(net, other):
    return max((a - b).abs().max().item() for a, b in zip(net.parameters(), other.parameters(), strict=True))


# -- every method -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PREPARED)
def test_every_method_trains_a_loop_that_is_left_as_it_is(name):
    knobs = {"period": 4} if name == "diloco" else {}
    cluster = mh.Cluster(workers=2, hosts=1 if name in ONE_HOST else None)
    nets = trained(
        METHODS[name](**knobs), lambda net, *_: clip_grad_norm_(net.parameters(), 1.0), steps=60, cluster=cluster
    )
    assert same(nets)
    assert error(nets[0]) < 0.6 * error(fresh())


@pytest.mark.parametrize("name", [name for name in SERVED if name in PREPARED])
def test_server_ranks_serve_within_prepare(name):
    nets = trained(METHODS[name](), steps=30, cluster=mh.Cluster(workers=2, servers=1))
    assert len(nets) == 3
    assert same(nets)
    assert distance(nets[0], fresh()) > 0


@pytest.mark.parametrize("name", sorted(NEED_STEP))
def test_a_method_that_needs_more_than_one_gradient_says_why(name):
    with pytest.raises(Refused, match=r"calls backward\(\) itself: .+; use hands.step"):
        trained(METHODS[name](), steps=1, cluster=mh.Cluster(workers=2, hosts=1 if name in ONE_HOST else None))


# -- what is in force -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_the_optimizer_is_in_force(name):
    close(trained(METHODS[name]()), alone())


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("name", EXACT)
def test_a_scheduler_is_in_force_made_before_or_after(name, made):
    def loop(hands, net, optimizer):
        scheduler = one_cycle(optimizer) if made == "before" else None
        hands.prepare(net, optimizer)
        scheduler = scheduler or one_cycle(optimizer)
        for step in range(STEPS):
            x, y = batch(hands.rank, step)
            mse_loss(net(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    close(joined(METHODS[name](), loop), alone(schedule=one_cycle))
    assert distance(alone(schedule=one_cycle), alone()) > 1e-3


def one_cycle(optimizer):
    """It changes the learning rate and the momentum in every step."""
    return OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)


@pytest.mark.parametrize("name", PREPARED)
def test_a_learning_rate_of_0_moves_nothing(name):
    """Except an outer step, which would be one of its own."""
    cluster = mh.Cluster(workers=2, hosts=1 if name in ONE_HOST else None)

    def stop(net, optimizer, step):
        optimizer.param_groups[0]["lr"] = 0.0

    nets = trained(METHODS[name](), stop, optimizer=lambda net: sgd(net, momentum=0.0), cluster=cluster)
    assert distance(nets[0], fresh()) < 1e-6


@pytest.mark.parametrize("name", EXACT)
def test_groups_keep_options_of_their_own_under_a_schedule(name):
    def grouped(net):
        weights, biases = ([p for p in net.parameters() if (p.dim() == 1) is one] for one in (False, True))
        return torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.02}], lr=0.01)

    def stepped(optimizer):
        return StepLR(optimizer, 3, 0.5)

    close(trained(METHODS[name](), schedule=stepped, optimizer=grouped), alone(schedule=stepped, optimizer=grouped))


@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_])
def test_clipping_is_of_the_mean_gradient(clip):
    def between(net, *_):
        clip(net.parameters(), 0.05)

    close(trained(mh.bsp(), between), alone(between))
    assert distance(alone(between), alone()) > 1e-3


def test_a_gradient_can_be_read_on_one_rank_only():
    norms = {}

    def loop(hands, net, optimizer):
        hands.prepare(net, optimizer)
        for step in range(3):
            x, y = batch(hands.rank, step)
            mse_loss(net(x), y).backward()
            if hands.rank == 0:
                norms[step] = net[0].weight.grad.norm().item()
            optimizer.step()
            optimizer.zero_grad()

    expected = {}
    close(
        joined(mh.bsp(), loop),
        alone(lambda net, _, step: expected.update({step: net[0].weight.grad.norm().item()}), steps=3),
    )
    assert norms == pytest.approx(expected)


@pytest.mark.parametrize("with_context", [True, False])
def test_gradients_accumulate_over_several_backward_passes(with_context):
    def loop(hands, net, optimizer):
        hands.prepare(net, optimizer)
        for step in range(0, STEPS, 2):
            if with_context:
                with hands.accumulate():
                    half(net, hands.rank, step)
            else:
                half(net, hands.rank, step)
            half(net, hands.rank, step + 1)
            optimizer.step()
            optimizer.zero_grad()

    def half(net, rank, step):
        x, y = batch(rank, step)
        (mse_loss(net(x), y) / 2).backward()

    reference = fresh()
    optimizer = sgd(reference)
    for step in range(0, STEPS, 2):
        for rank in range(2):
            for one in (step, step + 1):
                x, y = batch(rank, one)
                (mse_loss(reference(x), y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name in EXACT:
        close(joined(METHODS[name](), loop), reference)


def test_a_gradient_that_was_used_before_another_backward_pass_is_refused():
    def loop(hands, net, optimizer):
        hands.prepare(net, optimizer)
        x, y = batch(hands.rank, 0)
        mse_loss(net(x), y).backward()
        net[0].weight.grad.norm()
        mse_loss(net(x), y).backward()

    with pytest.raises(ManyhandsError, match=r"with hands.accumulate"):
        joined(mh.bsp(), loop)


@pytest.mark.parametrize("name", ["bsp", "ssp"])
def test_gradients_that_were_not_cleared_are_refused(name):
    def loop(hands, net, optimizer):
        hands.prepare(net, optimizer)
        for step in range(2):
            x, y = batch(hands.rank, step)
            mse_loss(net(x), y).backward()
            optimizer.step()

    with pytest.raises(ManyhandsError, match=r"call optimizer.zero_grad\(\)"):
        joined(METHODS[name](), loop)


def test_a_closure_is_refused():
    def loop(hands, net, optimizer):
        hands.prepare(net, optimizer)
        optimizer.step(lambda: 0.0)

    with pytest.raises(Refused, match="closure"):
        joined(mh.bsp(), loop)


@pytest.mark.parametrize("name", EXACT)
def test_two_models_with_an_optimizer_each_train_together(name):
    """As a GAN does: the loss of one has gradients for both."""

    def parts(net):
        return net[:4], net[4:]

    def steps(first, second, optimizers, x, y):
        for optimizer in optimizers:
            mse_loss(second(first(x)), y).backward()
            yield optimizer
            for one in optimizers:
                one.zero_grad()

    def loop(hands, net, _):
        first, second = parts(net)
        optimizers = sgd(first), sgd(second, lr=0.02)
        first, *optimizers, second = hands.prepare(first, *optimizers, second)
        for step in range(STEPS):
            for optimizer in steps(first, second, optimizers, *batch(hands.rank, step)):
                optimizer.step()

    reference = fresh()
    first, second = parts(reference)
    optimizers = [sgd(first), sgd(second, lr=0.02)]
    for step in range(STEPS):
        for optimizer in optimizers:
            for rank in range(2):
                x, y = batch(rank, step)
                (mse_loss(second(first(x)), y) / 2).backward()
            optimizer.step()
            for one in optimizers:
                one.zero_grad()
    close(joined(METHODS[name](), loop), reference)


def test_parameters_that_no_worker_touched_are_not_moved():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            return self.used(x)

    nets = trained(mh.bsp(), make=Two, optimizer=lambda net: sgd(net, weight_decay=0.5))
    assert torch.equal(nets[0].idle.weight, fresh(Two).idle.weight)
    assert not torch.equal(nets[0].used.weight, fresh(Two).used.weight)


# -- objects and refusals ---------------------------------------------------------------------------


def test_prepare_returns_what_it_was_given_in_that_order():
    def loop(hands, net, optimizer):
        scheduler = StepLR(optimizer, 1)
        loader = DataLoader(TensorDataset(X, Y), batch_size=4)
        found = hands.prepare(scheduler, loader, net, optimizer)
        assert found[0] is scheduler
        assert found[2:] == (net, optimizer)
        assert len(found[1]) == len(loader) / 2

    joined(mh.bsp(), loop)


@pytest.mark.parametrize(
    ("objects", "why"),
    [
        (lambda net, optimizer: (net, optimizer, 3), "a int, but takes models"),
        (lambda net, optimizer: (net,), "optimizers to prepare is 0"),
        (lambda net, optimizer: (optimizer,), "models to prepare is 0"),
        (lambda net, optimizer: (net, sgd(nn.Linear(2, 2))), "but must have those of the model only"),
    ],
)
def test_what_cannot_be_prepared_is_refused(objects, why):
    with pytest.raises(Refused, match=why):
        joined(mh.bsp(), lambda hands, net, optimizer: hands.prepare(*objects(net, optimizer)), workers=1)


# -- loaders ----------------------------------------------------------------------------------------


def drawn(loader, parts=2, even=True, passes=1):
    """The samples that each worker draws, pass after pass."""
    own = [part_of(loader, 0, part, parts, even) for part in range(parts)]
    return [[[x.tolist() for (x,) in one] for one in own] for _ in range(passes)]


def numbers(count):
    return TensorDataset(torch.arange(count))


def test_workers_draw_different_batches_of_a_loader_that_shuffles_anew_in_every_pass():
    first, second = drawn(DataLoader(numbers(32), batch_size=4, shuffle=True), passes=2)
    for one in (first, second):
        assert sorted(x for batches in one for batch in batches for x in batch) == list(range(32))
    assert first != second


def test_an_order_is_kept_and_batch_samplers_are_dealt_out_as_they_are():
    sequential = DataLoader(numbers(8), batch_size=2)
    own = DataLoader(numbers(8), batch_sampler=BatchSampler(SequentialSampler(range(8)), 2, False))
    for loader in (sequential, own):
        assert drawn(loader) == [[[[0, 1], [4, 5]], [[2, 3], [6, 7]]]]


def test_an_incomplete_round_is_filled_up_or_uneven():
    loader = DataLoader(numbers(10), batch_size=2)
    assert drawn(loader) == [[[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]]
    assert drawn(loader, even=False) == [[[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]]]]
    assert [len(part_of(loader, 0, part, 2, even=False)) for part in range(2)] == [3, 2]


def test_a_loader_keeps_its_workers_and_functions():
    loader = DataLoader(numbers(8), 2, num_workers=1, prefetch_factor=3, collate_fn=list, drop_last=True, timeout=9)
    own = part_of(loader, 0, 0, 2, even=True)
    for name in ("num_workers", "prefetch_factor", "collate_fn", "timeout", "dataset"):
        assert getattr(own, name) == getattr(loader, name)
    assert [[int(x) for (x,) in batch] for batch in own] == [[0, 1], [4, 5]]


def test_a_stream_is_dealt_out_batch_by_batch():
    class Stream(IterableDataset):
        def __iter__(self):
            return ((x,) for x in torch.arange(8))

    assert drawn(DataLoader(Stream(), batch_size=2)) == [[[[0, 1], [4, 5]], [[2, 3], [6, 7]]]]


# -- the mean gradient in memory that workers of one host share -----------------------------------------


ONE = mh.Cluster(workers=2, hosts=1)


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_of_one_host_equal_one_process(workers):
    close(trained(mh.bsp(), cluster=mh.Cluster(workers=workers, hosts=1)), alone(workers=workers))


@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_])
def test_clipping_on_one_host_is_of_the_mean_and_once(clip):
    def between(net, *_):
        clip(net.parameters(), 0.05)

    close(trained(mh.bsp(), between, cluster=ONE), alone(between))


def test_a_mean_is_read_after_the_step_and_on_one_rank_only():
    """Also a gradient that is set to zero in place, as `zero_grad(set_to_none=False)` does."""
    norms, expected = {}, {}

    def loop(hands, net, optimizer):
        hands.prepare(net, optimizer)
        for step in range(3):
            x, y = batch(hands.rank, step)
            mse_loss(net(x), y).backward()
            optimizer.step()
            if hands.rank == 1:
                norms[step] = net[0].weight.grad.norm().item()
            optimizer.zero_grad()

    alone(lambda net, _, step: expected.update({step: net[0].weight.grad.norm().item()}), steps=3)
    close(joined(mh.bsp(), loop, cluster=ONE), alone(steps=3))
    assert norms == pytest.approx(expected)


@pytest.mark.parametrize("cluster", [ONE, None], ids=["one host", "two hosts"])
def test_gradients_of_another_optimizer_stay_the_mean_until_it_steps(cluster):
    """One backward pass, two optimizers, another backward pass between their steps."""

    def steps(net, x, y, part, optimizers):
        (mse_loss(net(x), y) * part).backward()
        yield optimizers[0]
        optimizers[0].zero_grad()
        for p in net[4:].parameters():
            p.requires_grad_(False)
        (mse_loss(net(x), y) * part).backward()
        for p in net[4:].parameters():
            p.requires_grad_(True)
        yield optimizers[1]
        for one in optimizers:
            one.zero_grad()

    def pair(net):
        return sgd(net[:4], momentum=0.0), sgd(net[4:], lr=0.02, momentum=0.0)

    def loop(hands, net, _):
        net, *optimizers = hands.prepare(net, *pair(net))
        for step in range(4):
            for optimizer in steps(net, *batch(hands.rank, step), 1.0, optimizers):
                optimizer.step()

    reference = fresh()
    optimizers = pair(reference)
    for step in range(4):
        passes = [steps(reference, *batch(rank, step), 0.5, [NoStep(one) for one in optimizers]) for rank in range(2)]
        for optimizer, _ in zip(optimizers, zip(*passes, strict=True), strict=False):
            optimizer.step()
            for p in reference.parameters() if optimizer is optimizers[1] else reference[:4].parameters():
                p.grad = None
    close(joined(mh.bsp(), loop, cluster=cluster), reference)


class NoStep:
    """An optimizer whose gradients are cleared by the reference itself."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def zero_grad(self):
        pass

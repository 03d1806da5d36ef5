"""What the workers of a user's loop do together between two steps, in virtual time: reduce, gather, the answer."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import manyhands as mh
from manyhands import Refused
from manyhands.core.loop_position import OutOfStep
from manyhands.run.join import Hands
from manyhands.virtual.budget import VirtualSharedBudget
from manyhands.virtual.world import simulate

from .small import METHODS, ONE_HOST, SERVED, chain, model, task
from .test_prepared import PREPARED, batch, fresh, sgd

DATA = task().data
X, Y = DATA.tensors
STEPS = 6
LOCKSTEP = ["bsp", "hybrid", "bmuf", "easgd", "d_psgd"]


def cluster_for(name, workers=2, **settings):
    return mh.Cluster(workers=workers, hosts=1 if name in ONE_HOST else None, **settings)


@torch.no_grad()
def error(net):
    return float(mse_loss(net(X), Y))


def prepared(name, body, make=model, cluster=None):
    """Run `body(hands, step)` after each step of a prepared loop; what the ranks return."""

    def program(transport):
        net, found = fresh(make), []
        optimizer = sgd(net)
        with Hands(transport, strategy=METHODS[name]()) as hands:
            hands.prepare(net, optimizer)
            for step in range(STEPS):
                x, y = batch(hands.rank, step)
                mse_loss(net(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(body(hands, step))
        return net, found

    return [one for one in simulate(cluster or cluster_for(name), program).results if one is not None]


def stepped(name, body, make=model, workers=2):
    """The same with `hands.step`, on mini-batches of a share."""
    budgets = []

    def program(transport):
        def budget(total):
            budgets[:] = budgets or [VirtualSharedBudget(total)]
            return budgets[0]

        net, found = fresh(make), []
        with Hands(transport, net, strategy=METHODS[name](), loss=mse_loss, budget_for=budget) as hands:
            for step, fields in enumerate(hands.share(DATA, batch_size=4, steps=STEPS)):
                hands.step(*fields)
                found.append(body(hands, step))
        return net, found

    return simulate(cluster_for(name, workers), program).results


# -- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PREPARED)
def test_every_rank_learns_the_mean_of_all_at_every_step(name):
    found = [values for _, values in prepared(name, lambda hands, step: hands.reduce(hands.rank + step))]
    assert found == [[0.5 + step for step in range(STEPS)]] * 2


@pytest.mark.parametrize(("how", "expected"), [("mean", 1.5), ("sum", 3.0), ("min", 1.0), ("max", 2.0)])
def test_numbers_and_tensors_are_reduced(how, expected):
    def body(hands, step):
        value = torch.tensor([hands.rank + 1.0, hands.rank + 1.0], requires_grad=True)
        return hands.reduce(hands.rank + 1, how), hands.reduce(value, how).tolist()

    for _, values in prepared("ssp", body):
        assert values == [(expected, [expected, expected])] * STEPS


def test_gathered_values_come_in_the_order_of_ranks():
    def body(hands, step):
        return hands.gather(f"rank {hands.rank}"), [one.tolist() for one in hands.gather(torch.arange(hands.rank))]

    for _, values in prepared("bsp", body, cluster=cluster_for("bsp", 3)):
        assert values == [(["rank 0", "rank 1", "rank 2"], [[], [0], [0, 1]])] * STEPS


def test_only_the_lead_prints(capsys):
    prepared("bsp", lambda hands, step: hands.print("step", step))
    assert capsys.readouterr().out == "".join(f"step {step}\n" for step in range(STEPS))


@pytest.mark.parametrize("name", SERVED)
def test_server_ranks_take_part_before_training_begins(name):
    def program(transport):
        with Hands(transport, fresh(), strategy=METHODS[name](), loss=mse_loss) as hands:
            hands.barrier()
            before = hands.reduce(10.0 if hands.role == "server" else 1.0)
            hands.step(*batch(hands.rank, 0))
            assert hands.reduce(2.0, "sum") == 4.0
        return before

    assert simulate(mh.Cluster(workers=2, servers=1), program).results[:2] == [1.0, 1.0]


def test_what_cannot_be_reduced_or_gathered_is_refused():
    def body(hands, step):
        with pytest.raises(Refused, match="must be a number or a tensor"):
            hands.reduce("loss")
        with pytest.raises(Refused, match="a number, string or tensor"):
            hands.gather([1])
        with pytest.raises(Refused, match="no reduction 'median'"):
            hands.reduce(1.0, "median")

    prepared("bsp", body)


def test_another_shape_on_another_rank_is_refused():
    with pytest.raises(Refused, match=r"has shape \(\d,\), but on another rank it is"):
        prepared("bsp", lambda hands, step: hands.reduce(torch.zeros(1 + hands.rank)))


# -- the answer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PREPARED)
def test_every_rank_sees_the_same_answer_in_a_prepared_loop(name):
    (_, mine), (_, others) = prepared(name, lambda hands, step: hands.evaluate(error))
    assert mine == others


@pytest.mark.parametrize("name", METHODS)
def test_every_rank_sees_the_same_answer_in_a_loop_of_steps(name):
    def body(hands, step):
        return hands.evaluate(error) if step == 2 else None

    (net, mine), (_, others) = stepped(name, body)
    assert mine[2] == others[2]
    assert error(net) != error(fresh())


@pytest.mark.parametrize("name", ["bsp", "easgd", "d_psgd", "gpipe", "bmuf"])
def test_training_continues_as_if_there_had_been_no_answer(name):
    looked = stepped(name, lambda hands, step: hands.evaluate(error) if step % 2 else None)
    left_alone = stepped(name, lambda hands, step: None)
    for (net, _), (other, _) in zip(looked, left_alone, strict=True):
        for mine, others in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, others)


@pytest.mark.parametrize("name", ["bsp", "gpipe", "easgd", "ssp"])
def test_the_last_answer_is_the_one_that_the_model_ends_with(name):
    for net, values in stepped(name, lambda hands, step: hands.evaluate(error)):
        assert values[-1] == error(net)


def test_all_stages_of_a_pipeline_are_in_the_answer():
    def body(hands, step):
        with hands.answer() as net:
            return [p.clone() for p in net.parameters()]

    seen = [values[-1] for _, values in stepped("gpipe", body)]
    for mine, others, begin in zip(*seen, fresh().parameters(), strict=True):
        assert torch.equal(mine, others)
        assert not torch.equal(mine, begin)


def test_buffers_are_merged_in_the_answer_and_put_back():
    def make():
        return nn.Sequential(nn.BatchNorm1d(4), chain(4, 2))

    def body(hands, step):
        own = hands._joined.worker.model[0].running_mean
        before = own.clone()
        with hands.answer() as net:
            merged = net[0].running_mean.clone()
        assert torch.equal(own, before)
        return before, merged

    (_, mine), (_, others) = prepared("bsp", body, make=make)
    for (a, merged), (b, also) in zip(mine, others, strict=True):
        assert torch.equal(merged, also)
        torch.testing.assert_close(merged, (a + b) / 2)
        assert not torch.equal(a, b)


def test_modes_are_as_before_an_evaluation():
    def body(hands, step):
        net = hands._joined.worker.model
        net[1].eval()
        assert hands.evaluate(lambda one: [m.training for m in one.modules()]) == [False] * 8
        assert [m.training for m in net.modules()] == [True, True, False] + [True] * 5
        with hands.answer() as shown:
            assert shown.training

    prepared("bsp", body)


def test_training_within_the_answer_is_refused():
    def program(transport):
        net = fresh()
        optimizer = sgd(net)
        with Hands(transport, strategy=mh.bsp()) as hands:
            hands.prepare(net, optimizer)
            with hands.answer(), pytest.raises(Refused, match="while the model holds the answer"):
                optimizer.step()

    simulate(mh.Cluster(workers=2), program)


def test_an_answer_within_a_step_is_refused():
    def program(transport):
        net = fresh()
        with Hands(transport, strategy=mh.ssp()) as hands:
            hands.prepare(net, sgd(net))
            net(X)
            with pytest.raises(Refused, match="between two steps"), hands.answer():
                pass

    simulate(mh.Cluster(workers=2), program)


def test_an_answer_before_the_first_step_is_refused():
    with Hands(simulate_one(), fresh(), strategy=mh.bsp(), loss=mse_loss) as hands:
        with pytest.raises(Refused, match="before the first step"), hands.answer():
            pass
        hands.transport = None
        hands._ended = True


def simulate_one():
    found = []
    simulate(mh.Cluster(workers=1), found.append)
    return found[0]


# -- ranks that do not meet ----------------------------------------------------------------------------


def takes(steps):
    """A loop in which each rank takes its own number of steps."""

    def program(transport):
        net = fresh()
        with Hands(transport, net, strategy=program.strategy, loss=mse_loss) as hands:
            for step in range(steps[hands.rank]):
                hands.step(*batch(hands.rank, step))

    return program


@pytest.mark.parametrize("steps", [(6, 10), (10, 6), (6, 7), (0, 1)])
@pytest.mark.parametrize("name", LOCKSTEP)
def test_unequal_steps_in_lock_step_fail_and_name_the_rank(name, steps):
    program = takes(steps)
    program.strategy = METHODS[name]()
    with pytest.raises(OutOfStep, match=r"rank [01] .*but rank [01] ended its loop after"):
        simulate(mh.Cluster(workers=2), program)


@pytest.mark.parametrize("name", ["ssp", "ad_psgd", "downpour", "bsp_server"])
def test_unequal_steps_are_allowed_without_lock_step_and_with_a_server(name):
    program = takes((6, 10))
    program.strategy = METHODS[name]()
    simulate(mh.Cluster(workers=2), program)


@pytest.mark.parametrize("name", LOCKSTEP)
def test_a_prepared_loop_that_ends_early_fails_and_names_the_rank(name):
    def body(hands, step):
        if step == 3 and hands.rank == 1:
            hands.end()
            raise SystemExit

    with pytest.raises(OutOfStep, match="rank 0 is in step 5, but rank 1 ended its loop after 4"):
        prepared(name, body)


@pytest.mark.parametrize("name", ["bsp", "bsp_server", "bmuf", "ad_psgd", "downpour"])
def test_an_answer_on_one_rank_only_fails_and_names_the_rank(name):
    with pytest.raises(OutOfStep, match=r"hands\.answer"):
        prepared(name, lambda hands, step: hands.lead and hands.evaluate(error))


def test_two_different_calls_that_cannot_meet_fail():
    with pytest.raises(OutOfStep, match="call the same on all ranks"):
        prepared("bsp", lambda hands, step: hands.reduce(1.0) if hands.lead else hands.gather(1.0))


def test_all_ranks_leave_the_loop_together_by_what_reduce_returns():
    def program(transport):
        net = fresh()
        with Hands(transport, net, strategy=mh.bsp(), loss=mse_loss) as hands:
            for step in range(20):
                hands.step(*batch(hands.rank, step))
                if hands.reduce(step >= 3 + hands.rank, "max"):
                    return step
        return None

    assert simulate(mh.Cluster(workers=3), program).results == [3, 3, 3]

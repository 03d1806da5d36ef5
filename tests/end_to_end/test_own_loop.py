"""The user's own loop, in virtual time: it trains as `mh.train` does, and ends with one model on every rank."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import manyhands as mh
from manyhands import rules
from manyhands.core.flat import DtypeGroup, ParamSlot, Span
from manyhands.core.port import Tag
from manyhands.core.strategy import Strategy, Traits
from manyhands.run.join import Hands
from manyhands.run.manual_changes import _sample
from manyhands.virtual.budget import VirtualSharedBudget
from manyhands.virtual.world import simulate

from .small import METHODS, ONE_HOST, SERVED, model, task

ALIKE = ["bsp", "bsp_server", "hybrid", "easgd", "d_psgd", "gpipe", "pipedream"]
"""Methods whose result does not depend on timing."""
DATA = task().data


class Joined:
    """Hands on every rank of a virtual cluster; the nth share has the same budget on all of them."""

    def __init__(self, strategy, program, cluster=None, make=model, loss=mse_loss, optimizer=None, **knobs):
        self.strategy, self.program, self.make, self.loss, self.knobs = strategy, program, make, loss, knobs
        self.optimizer = optimizer
        self.budgets = []
        self.simulation = simulate(cluster or mh.Cluster(workers=4), self.run)
        self.ranks = [one for one in self.simulation.results if one is not None]
        self.models = [one["model"] for one in self.ranks]

    def run(self, transport):
        torch.manual_seed(0)
        net = self.make()
        found = {"model": net, "losses": []}
        optimizer = self.optimizer and self.optimizer(net)
        hands = found["hands"] = Hands(
            transport,
            net,
            strategy=self.strategy,
            loss=self.loss,
            optimizer=optimizer,
            budget_for=self.budget_for(),
            **self.knobs,
        )
        with hands:
            self.program(hands, found["losses"])
        found["after"] = True
        return found

    def budget_for(self):
        made = iter(range(100))

        def budget(total):
            number = next(made)
            if number == len(self.budgets):
                self.budgets.append(VirtualSharedBudget(total))
            return self.budgets[number]

        return budget


def loop(hands, losses, data=DATA, batch_size=4, **settings):
    """A typical user's loop."""
    for x, y in hands.share(data, batch_size, **settings):
        losses.append(hands.step(x, y))


def looped(**settings):
    return partial(loop, **settings)


def same(nets, others=None):
    """Whether all of them have equal weights and buffers."""
    first, *rest = [[*net.parameters(), *net.buffers()] for net in [*nets, *(others or [])]]
    return all(torch.equal(a, b) for other in rest for a, b in zip(first, other, strict=True))


def fresh(make=model):
    torch.manual_seed(0)
    return make()


def managed(strategy, cluster=None, **settings):
    """The model that `mh.train` ends with."""
    result = mh.train(task(), strategy, cluster=cluster, **settings)
    net = fresh()
    net.load_state_dict(result.weights)
    return net


def cluster_for(name, **settings):
    return mh.Cluster(workers=4, hosts=1 if name in ONE_HOST else None, **settings)


def error(data, net):
    with torch.no_grad():
        return mse_loss(net(data.tensors[0]), data.tensors[1]).item()


# -- it trains --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALIKE)
def test_an_own_loop_equals_managed_training_to_the_last_bit(name):
    joined = Joined(METHODS[name](), looped(epochs=2))
    assert same(joined.models, [managed(METHODS[name](), epochs=2)])
    assert not same(joined.models, [fresh()])


@pytest.mark.parametrize("name", METHODS)
def test_every_method_lowers_the_loss_and_ends_with_one_answer_everywhere(name):
    joined = Joined(METHODS[name](), looped(epochs=12), cluster_for(name))
    assert len(joined.models) == 4
    assert same(joined.models)
    assert error(DATA, joined.models[0]) < 0.5 * error(DATA, fresh())


@pytest.mark.parametrize("name", SERVED)
def test_server_ranks_serve_and_continue_after_the_block_with_the_answer(name):
    joined = Joined(METHODS[name](), looped(epochs=8), cluster_for(name, servers=2))
    assert [one["hands"].role for one in joined.ranks] == ["worker"] * 4 + ["server"] * 2
    assert all(one["after"] for one in joined.ranks)
    assert [len(one["losses"]) > 0 for one in joined.ranks] == [True] * 4 + [False] * 2
    assert same(joined.models)
    assert error(DATA, joined.models[5]) < 0.5 * error(DATA, fresh())


def test_servers_do_not_change_what_a_bulk_method_learns():
    joined = Joined(mh.bsp_server(), looped(epochs=2), mh.Cluster(workers=4, servers=2))
    assert same(joined.models, [managed(mh.bsp_server(), mh.Cluster(workers=4, servers=2), epochs=2)])


@pytest.mark.parametrize("name", METHODS)
def test_exactly_one_rank_leads_before_and_after_the_end(name):
    during = []
    joined = Joined(METHODS[name](), lambda h, ls: (during.append(h.lead), loop(h, ls)), cluster_for(name))
    assert sum(during) == 1
    assert [one["hands"].lead for one in joined.ranks] == [True, False, False, False]


def test_hands_say_where_they_are():
    joined = Joined(mh.ssp(), looped(), mh.Cluster(workers=3, servers=1))
    hands = [one["hands"] for one in joined.ranks]
    assert [h.rank for h in hands] == [0, 1, 2, 3]
    assert [h.workers for h in hands] == [3] * 4
    assert [h.transport.rank for h in hands] == [0, 1, 2, 3]


def test_the_lag_of_a_step_is_known():
    lags = []

    def program(hands, losses):
        for x, y in hands.share(DATA, 4, epochs=4):
            hands.step(x, y)
            lags.append((hands.rank, hands.lag))

    Joined(mh.ssp(staleness=2), program, mh.Cluster(workers=4, stragglers=mh.Slow(ranks=[0], factor=10)))
    assert lags[0][1] is None, "whether a gradient was applied is known after the next read"
    oldest = {rank: max(lag for who, lag in lags if who == rank and lag is not None) for rank in range(4)}
    assert min(oldest.values()) >= 1
    assert oldest[0] == max(oldest.values()), "the others have moved on while the slow one computed"


def test_all_ranks_begin_with_the_weights_of_the_lead():
    """A script that does not seed makes another model on every rank, servers too."""
    made = []

    def another():
        torch.manual_seed(len(made))
        made.append(model())
        return made[-1]

    joined = Joined(mh.bsp_server(), looped(epochs=2), mh.Cluster(workers=4, servers=2), make=another)
    assert same(joined.models, [managed(mh.bsp_server(), mh.Cluster(workers=4, servers=2), epochs=2)])


def test_no_worker_begins_before_all_are_set_up():
    began = []

    def program(hands, losses):
        if hands.rank == 2:
            hands.transport.recv(Tag("never"), frm=2, timeout=1.0)
        batches = hands.share(DATA, 4)
        began.append(hands.transport.now())
        for x, y in batches:
            hands.step(x, y)

    Joined(mh.ssp(), program, mh.Cluster(workers=4))
    assert min(began) >= 1.0


def test_float_buffers_are_averaged_and_loaded_everywhere():
    def normed():
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    seen = []

    def program(hands, losses):
        loop(hands, losses, epochs=1)
        seen.append(hands._training.worker.model[1].running_mean.clone())

    joined = Joined(mh.bsp(), program, make=normed)
    assert same(joined.models)
    torch.testing.assert_close(joined.models[2][1].running_mean, torch.stack(seen).mean(0))
    assert joined.models[2][1].num_batches_tracked == len(joined.ranks[0]["losses"])


def test_a_list_of_stages_is_a_pipeline():
    whole = Joined(mh.gpipe(), looped(epochs=1))
    stages = []

    def program(hands, losses):
        loop(hands, losses, epochs=1)

    def run(transport):
        net = fresh()
        groups = [net[0:2], net[2:4], net[4:6], net[6:7]]
        with Hands(transport, groups, strategy=mh.gpipe(), loss=mse_loss) as hands:
            program(hands, [])
        stages.append(net)

    simulate(mh.Cluster(workers=4), run)
    assert same(stages, whole.models)


@pytest.mark.parametrize("name", ["bsp", "ssp", "hogwild"])
def test_after_the_block_the_model_is_an_ordinary_one(name):
    joined = Joined(METHODS[name](), looped(), cluster_for(name))
    first, second = joined.models[:2]
    mse_loss(first(DATA.tensors[0]), DATA.tensors[1]).backward()
    assert all(p.grad is not None for p in first.parameters())
    torch.optim.SGD(first.parameters(), lr=0.1).step()
    assert not same([first, second])
    first.zero_grad()
    kept = iter(joined.models)
    again = Joined(METHODS[name](), looped(epochs=2), cluster_for(name), make=lambda: next(kept))
    assert same(again.models)


# -- how much, and of what --------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "batches"), [({}, 8), ({"epochs": 2.5}, 24), ({"steps": 7}, 28)])
@pytest.mark.parametrize("name", ["bsp", "ssp"])
def test_the_budget_is_that_of_managed_training(name, settings, batches):
    """40 samples in mini-batches of 4 by 4 workers: 2.5 steps per pass, rounded down in the end."""
    joined = Joined(METHODS[name](), looped(**settings))
    assert sum(len(one["losses"]) for one in joined.ranks) == batches


def test_a_slow_worker_takes_fewer_steps_of_a_common_budget_but_as_many_in_lock_step():
    slow = mh.Cluster(workers=4, stragglers=mh.Slow(ranks=[0], factor=1e4))
    free = [len(one["losses"]) for one in Joined(mh.downpour(), looped(epochs=8), slow).ranks]
    assert sum(free) == 80
    assert free[0] < min(free[1:])
    bulk = [len(one["losses"]) for one in Joined(mh.bsp(), looped(epochs=8), slow).ranks]
    assert bulk == [20] * 4


@pytest.mark.parametrize("name", ALIKE)
def test_a_loop_over_epochs_equals_one_long_share(name):
    """32 samples are whole steps, so nothing is rounded; a pipeline that streams is not drained in between."""
    data = task(samples=32).data

    def epochs(hands, losses):
        for _ in range(3):
            loop(hands, losses, data=data)

    apart = Joined(METHODS[name](rule=rules.Momentum(0.05)), epochs)
    whole = Joined(METHODS[name](rule=rules.Momentum(0.05)), looped(data=data, epochs=3))
    assert [len(one["losses"]) for one in apart.ranks] == [len(one["losses"]) for one in whole.ranks]
    assert same(apart.models, whole.models)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_in_a_loop_over_epochs(name):
    def epochs(hands, losses):
        for _ in range(15):
            loop(hands, losses)

    joined = Joined(METHODS[name](), epochs, cluster_for(name))
    assert same(joined.models)
    assert error(DATA, joined.models[0]) < 0.5 * error(DATA, fresh())


def test_every_epoch_has_another_order_also_over_a_new_data_set():
    seen = []

    def program(hands, losses):
        for _ in range(4):
            seen.append([x.tolist() for (x,) in hands.share(TensorDataset(torch.arange(64)), 64)])

    Joined(mh.bsp(), program, mh.Cluster(workers=1))
    assert all(sorted(order[0]) == list(range(64)) for order in seen)
    assert len({tuple(order[0]) for order in seen}) == 4


@pytest.mark.parametrize("name", METHODS)
def test_a_loop_may_end_early(name):
    def program(hands, losses):
        for x, y in hands.share(DATA, 4, epochs=8):
            losses.append(hands.step(x, y))
            if len(losses) == 5:
                break

    joined = Joined(METHODS[name](), program, cluster_for(name))
    assert [len(one["losses"]) for one in joined.ranks] == [5] * 4
    assert same(joined.models)
    assert not same([joined.models[0], fresh()])


def test_a_stream_of_mini_batches_that_ends_early_is_drained():
    """PipeDream of 5 steps, in a loop of 5 and in a longer one that is left; a second loop continues the stream."""

    def program(hands, losses):
        for x, y in hands.share(DATA, 4, steps=20):
            losses.append(hands.step(x, y))
            if len(losses) == 5:
                break

    def and_more(hands, losses):
        program(hands, losses)
        loop(hands, losses, steps=3)

    def in_two_rows(hands, losses):
        loop(hands, losses, steps=5)
        loop(hands, losses, steps=3)

    assert same(Joined(mh.pipedream(), program).models, [managed(mh.pipedream(), steps=5)])
    assert same(Joined(mh.pipedream(), and_more).models, Joined(mh.pipedream(), in_two_rows).models)


@pytest.mark.parametrize("name", METHODS)
def test_a_loader_of_ones_own_needs_no_share(name):
    def program(hands, losses):
        x, y = DATA.tensors
        for start in range(0, 40, 8):
            losses.append(hands.step(x[start : start + 8], y[start : start + 8]))

    cluster = cluster_for(name, servers=1 if name in SERVED else 0)
    joined = Joined(METHODS[name](), program, cluster)
    assert [len(one["losses"]) for one in joined.ranks[:4]] == [5] * 4
    assert same(joined.models)
    assert not same([joined.models[0], fresh()])
    assert all(one["after"] for one in joined.ranks)


def test_an_own_loader_equals_a_share_of_the_same_mini_batches():
    kept = {}

    def keep(hands, losses):
        for x, y in hands.share(DATA, 4, epochs=2):
            kept.setdefault(hands.rank, []).append((x, y))
            hands.step(x, y)

    def replay(hands, losses):
        for x, y in kept[hands.rank]:
            hands.step(x, y)

    assert same(Joined(mh.bsp(), keep).models, Joined(mh.bsp(), replay).models)


def test_all_stages_of_a_pipeline_see_the_same_mini_batches():
    seen = {}

    def program(hands, losses):
        for x, y in hands.share(DATA, 4):
            seen.setdefault(hands.rank, []).append(x)
            hands.step(x, y)

    Joined(mh.gpipe(), program)
    assert all(torch.equal(a, b) for rank in range(1, 4) for a, b in zip(seen[0], seen[rank], strict=True))
    assert len(seen[0]) == 10


# -- kinds of data ----------------------------------------------------------------------------------


class Stream(IterableDataset):
    """The samples of another data set, one after the other."""

    def __init__(self, data=DATA):
        self.data = data

    def __iter__(self):
        return (self.data[i] for i in range(len(self.data)))


def batches_of(strategy, cluster=None, **settings):
    """What each rank gets of some data, without training on it."""
    seen = {}

    def program(hands, losses):
        seen[hands.rank] = list(hands.share(**settings))

    Joined(strategy, program, cluster)
    return [seen[rank] for rank in sorted(seen)]


@pytest.mark.parametrize("name", ["bsp", "ssp"])
def test_each_rank_takes_its_mini_batch_of_every_complete_round_of_a_stream(name):
    """10 samples in mini-batches of 2 by 2 workers: two rounds, the last 2 samples are dropped."""
    data = Stream(TensorDataset(torch.arange(10)))
    ranks = batches_of(METHODS[name](), mh.Cluster(workers=2), dataset=data, batch_size=2, epochs=2)
    lists = [[field.tolist() for (field,) in batches] for batches in ranks]
    assert lists == [[[0, 1], [4, 5]] * 2, [[2, 3], [6, 7]] * 2]


def test_steps_of_a_stream_continue_with_further_passes():
    data = Stream(TensorDataset(torch.arange(10)))
    ranks = batches_of(mh.bsp(), mh.Cluster(workers=2), dataset=data, batch_size=2, steps=3)
    assert [[field.tolist() for (field,) in batches] for batches in ranks] == [
        [[0, 1], [4, 5], [0, 1]],
        [[2, 3], [6, 7], [2, 3]],
    ]


def test_a_stream_is_not_read_further_than_its_steps():
    read = {0: 0, 1: 0}

    def program(hands, losses):
        def endless():
            while True:
                read[hands.rank] += 1
                yield torch.zeros(1)

        losses += list(hands.share(endless(), 2, steps=3))

    joined = Joined(mh.bsp(), program, mh.Cluster(workers=2))
    assert [len(one["losses"]) for one in joined.ranks] == [3, 3]
    assert read == {0: 12, 1: 12}


@pytest.mark.parametrize("name", ["bsp", "ssp", "gpipe", "pipedream"])
def test_every_kind_of_method_learns_from_a_stream(name):
    steps = 80 if name in ("gpipe", "pipedream") else 20
    joined = Joined(METHODS[name](), looped(data=Stream(), steps=steps))
    assert [len(one["losses"]) for one in joined.ranks] == [steps] * 4
    assert same(joined.models)
    assert error(DATA, joined.models[0]) < 0.5 * error(DATA, fresh())


class Listed:
    """Samples of any kind, asked for one by one."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Weighted(nn.Module):
    """Takes more than one input; may return its own loss."""

    def __init__(self):
        super().__init__()
        self.inner = model()

    def forward(self, x, mask, y=None):
        out = self.inner(x * mask)
        return out if y is None else mse_loss(out, y)


MASKED = [(x, torch.ones(4), y) for x, y in DATA]


def test_every_field_of_a_sample_is_passed_on():
    def program(hands, losses):
        for x, mask, y in hands.share(Listed(MASKED), 4, epochs=2):
            losses.append(hands.step(x, mask, y))

    own = Joined(mh.bsp(), program, make=Weighted)
    plain = Joined(mh.bsp(), looped(epochs=2))
    assert same([net.inner for net in own.models], plain.models)


def test_a_field_with_a_name_goes_to_the_model_and_the_last_without_is_the_target():
    def program(hands, losses):
        for x, mask, y in hands.share(Listed(MASKED), 4, epochs=2):
            losses.append(hands.step(x, y, mask=mask))

    own = Joined(mh.bsp(), program, make=Weighted)
    assert same([net.inner for net in own.models], Joined(mh.bsp(), looped(epochs=2)).models)


@pytest.mark.parametrize("loss", [mse_loss, None], ids=["loss", "model's own loss"])
def test_dicts_stay_dicts(loss):
    samples = Listed([{"x": x, "mask": mask, "y": y} for x, mask, y in MASKED])

    def program(hands, losses):
        for batch in hands.share(samples, 4, epochs=2):
            losses.append(hands.step(**batch))

    own = Joined(mh.bsp(), program, make=Weighted, loss=loss)
    assert same([net.inner for net in own.models], Joined(mh.bsp(), looped(epochs=2)).models)


def test_a_sample_that_is_one_tensor_gives_a_tensor():
    (batches,) = batches_of(mh.bsp(), mh.Cluster(workers=1), dataset=list(torch.arange(4)), batch_size=4)
    assert [batch.sort().values.tolist() for batch in batches] == [[0, 1, 2, 3]]


def test_strings_are_passed_on():
    samples = [("a", torch.tensor(0)), ("b", torch.tensor(1))]
    (batches,) = batches_of(mh.bsp(), mh.Cluster(workers=1), dataset=samples, batch_size=2)
    ((words, numbers),) = batches
    assert sorted(zip(words, numbers.tolist(), strict=True)) == [("a", 0), ("b", 1)]


def test_a_collate_function_makes_the_mini_batch():
    ranks = batches_of(mh.bsp(), dataset=DATA, batch_size=4, steps=1, collate=len)
    assert ranks == [[4]] * 4


def test_a_loader_that_shuffles_is_replaced_by_its_data_set():
    loader = DataLoader(DATA, batch_size=4, shuffle=True)
    joined = Joined(mh.bsp(), looped(data=loader, batch_size=None, epochs=2))
    assert same(joined.models, [managed(mh.bsp(), epochs=2)])


def test_the_collate_function_of_a_loader_is_used():
    loader = DataLoader(DATA, batch_size=4, shuffle=True, collate_fn=len)
    assert batches_of(mh.bsp(), dataset=loader, steps=2) == [[4, 4]] * 4


def test_a_loader_of_a_stream_is_replaced_by_its_data_set():
    loader = DataLoader(Stream(), batch_size=4)
    streamed = Joined(mh.bsp(), looped(data=loader, batch_size=None, steps=4))
    assert same(streamed.models, Joined(mh.bsp(), looped(data=Stream(), steps=4)).models)


# -- optimizers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ALIKE, *ONE_HOST, "ad_psgd", "gossip", "easgd asynchronous"])
def test_an_optimizer_takes_the_place_of_the_strategys_rule(name):
    """Those that move no weights at a shard equal their twin with the rule, to the last bit."""
    options = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}
    rule = rules.Torch("AdamW", **options)
    with_rule = Joined(METHODS[name](rule=rule), looped(epochs=2), cluster_for(name))
    given = Joined(
        METHODS[name](),
        looped(epochs=2),
        cluster_for(name),
        optimizer=lambda net: torch.optim.AdamW(net.parameters(), **options),
    )
    assert same(given.models, with_rule.models)
    assert not same([given.models[0], Joined(METHODS[name](), looped(epochs=2), cluster_for(name)).models[0]])


def test_one_worker_with_an_optimizer_is_torch():
    net = fresh()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True)
    seen = []

    def program(hands, losses):
        for x, y in hands.share(DATA, 4, epochs=2):
            seen.append((x, y))
            losses.append(hands.step(x, y))

    joined = Joined(
        mh.bsp(),
        program,
        mh.Cluster(workers=1),
        optimizer=lambda net: torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True),
    )
    for x, y in seen:
        optimizer.zero_grad()
        mse_loss(net(x), y).backward()
        optimizer.step()
    assert same([net], joined.models)


# -- nothing to do ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_block_without_a_step_leaves_the_model_as_it_was(name):
    """With 3 workers, whose mean of equal weights would be rounded."""
    servers, hosts = int(name in SERVED), 1 if name in ONE_HOST else None
    joined = Joined(METHODS[name](), lambda hands, losses: None, mh.Cluster(workers=3, servers=servers, hosts=hosts))
    assert same(joined.models, [fresh()])
    assert all(one["after"] for one in joined.ranks)


@pytest.mark.parametrize("name", [name for name in SERVED if name != "hybrid"])
def test_a_worker_without_data_does_not_hold_up_the_others(name):
    """Only methods out of lock step may have such a worker; a server rank may be the one."""

    def program(hands, losses):
        if hands.rank == 2 or hands.role == "server":
            return
        for start in range(0, 40, 4):
            hands.step(DATA.tensors[0][start : start + 4], DATA.tensors[1][start : start + 4])

    joined = Joined(METHODS[name](), program, cluster_for(name, servers=1))
    assert len(joined.ranks) == 5
    assert same(joined.models)
    assert not same([joined.models[0], fresh()])


# -- losses and errors ------------------------------------------------------------------------------


def on_one_host(*faults, workers=4):
    return mh.Cluster(workers=workers, hosts=1, faults=list(faults))


@pytest.mark.parametrize(
    "name", ["ssp", "downpour", "dc_asgd", "easgd asynchronous", "hogwild", "ad_psgd", "d_psgd", "gossip"]
)
@pytest.mark.parametrize("rank", [0, 2])
def test_the_others_end_with_one_answer_when_a_worker_dies(name, rank):
    whole = Joined(METHODS[name](), looped(epochs=8), on_one_host()).simulation.seconds
    joined = Joined(METHODS[name](), looped(epochs=8), on_one_host(mh.Die(rank, at=whole / 2)))
    assert joined.simulation.lost
    assert len(joined.models) == 3
    assert same(joined.models)
    assert error(DATA, joined.models[0]) < 0.7 * error(DATA, fresh())
    assert [one["hands"].lead for one in joined.ranks] == [True, False, False]


@pytest.mark.parametrize("name", ["ssp", "bsp_server", "bsp", "ad_psgd", "d_psgd", "gossip", "pipedream"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_no_rank_waits_for_ever_whenever_a_worker_is_lost(name, rank):
    """The loss may occur at the beginning, in the loop, in the answer or in its broadcast."""
    strategy = METHODS[name]()
    whole = Joined(strategy, looped(steps=3), on_one_host()).simulation.seconds
    outcomes = set()
    for moment in range(1, 30, 2):
        cluster = on_one_host(mh.Die(rank, at=whole * moment / 30))
        try:
            joined = Joined(strategy, looped(steps=3), cluster)
        except mh.PeerLost as loss:
            assert loss.rank == rank
            outcomes.add("named")
        else:
            assert same(joined.models)
            led = sum(one["hands"].lead for one in joined.ranks)
            assert led == 1 or (led == 0 and rank == 0)
            outcomes.add("continued")
    if name in ("ssp", "ad_psgd", "d_psgd", "gossip"):
        assert outcomes == {"continued"} if rank else "continued" in outcomes
    else:
        assert "named" in outcomes


@pytest.mark.parametrize("name", ["bsp", "bsp_server", "ad_psgd", "d_psgd", "gossip"])
def test_the_lead_may_die_while_all_begin(name):
    """Rank 3 has a slow link: the others leave the barrier before it does."""
    for moment in range(40):
        faults = [mh.SlowLink(3, factor=5), mh.Die(0, at=moment * 25e-6)]
        try:
            joined = Joined(METHODS[name](), looped(steps=3), mh.Cluster(workers=4, faults=faults))
        except mh.PeerLost as loss:
            assert loss.rank == 0
        else:
            assert same(joined.models)


class Broken(Exception):
    """An error in the user's loop."""


@pytest.mark.parametrize("name", METHODS)
def test_an_exception_leaves_the_block_at_once_and_is_reported(name):
    seen = {}

    def run(transport):
        transport.fail = lambda error: seen.update(error=error, at=transport.now())
        net = fresh()
        try:
            with Hands(
                transport, net, strategy=METHODS[name](), loss=mse_loss, budget_for=VirtualSharedBudget
            ) as hands:
                for number, (x, y) in enumerate(hands.share(DATA, 4, epochs=4)):
                    if hands.rank == 1 and number == 2:
                        raise Broken
                    hands.step(x, y)
        except Broken as error:
            assert (seen["error"], seen["at"]) == (error, transport.now())
            mse_loss(net(x), y).backward()
            assert all(p.grad is not None for p in net.parameters())
            raise

    with pytest.raises(Broken):
        simulate(cluster_for(name), run)
    assert seen


def test_an_error_at_the_end_of_the_block_is_reported_too():
    errors = []

    def run(transport):
        transport.fail = errors.append
        with Hands(transport, fresh(), strategy=mh.bsp(), loss=mse_loss) as hands:
            loop(hands, [])
            if hands.rank == 0:
                transport.recv(Tag("never"), frm=0)

    with pytest.raises(mh.PeerLost) as lost:
        simulate(mh.Cluster(workers=2, faults=[mh.Die(0, at=1.0)]), run)
    assert lost.value.rank == 0
    assert errors[-1] is lost.value


def test_a_loss_that_is_no_number_is_named():
    def program(hands, losses):
        loop(hands, losses, data=TensorDataset(DATA.tensors[0] * float("inf"), DATA.tensors[1]))

    with pytest.raises(mh.Diverged):
        Joined(mh.bsp(), program)


# -- misuse -----------------------------------------------------------------------------------------

X, Y = DATA.tensors[0][:4], DATA.tensors[1][:4]
SHUFFLED = partial(DataLoader, DATA, shuffle=True)


def drawn(**settings):
    return DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA, **settings))


def share(**settings):
    return lambda hands, _: list(hands.share(**{"dataset": DATA, "batch_size": 4, **settings}))


def step(*fields, **named):
    return lambda hands, _: hands.step(*fields, **named)


def two_at_once(hands, _):
    for _ in hands.share(DATA, 4):
        for _ in hands.share(DATA, 4):
            pass


def two_begun_together(hands, _):
    for _ in zip(hands.share(DATA, 4), hands.share(DATA, 4), strict=True):
        pass


def enter_again(hands, _):
    with hands:
        pass


def another_size(hands, _):
    hands.step(X, Y)
    hands.step(X[:3], Y[:3])


def join_again(hands, _):
    hands.step(X, Y)
    Hands(hands.transport, hands._training.worker.model, strategy=mh.bsp())


MISUSE = [
    (mh.bsp, share(epochs=2, steps=2), "steps is 2 and epochs is 2, but only one of them can be given"),
    (mh.bsp, share(steps=0), "steps is 0, but must be >= 1"),
    (mh.bsp, share(epochs=0), "epochs is 0, but must be > 0 and finite"),
    (mh.bsp, share(batch_size=0), "batch_size is 0, but must be >= 1"),
    (mh.bsp, share(batch_size=None), "batch_size is missing, but must be >= 1"),
    (mh.bsp, share(dataset=3), "the data set is a int, but must be map-style or iterable"),
    (mh.bsp, share(dataset=[0, 1, 2]), "a data set of 3 samples cannot be shared by 4 workers"),
    (mh.bsp, share(dataset=Stream(), epochs=1.5), "epochs is 1.5, but must be a whole number >= 1 for a stream"),
    (
        mh.bsp,
        share(dataset=iter(DATA), epochs=2),
        "epochs is 2, but must be 1: an iterator can be iterated over only once",
    ),
    (mh.bsp, share(dataset=Stream(), batch_size=11), "in a pass over the stream is 40, but must be >= 44"),
    (mh.bsp, share(dataset=Stream(), batch_size=11, steps=5), "in a pass over the stream is 40, but must be >= 44"),
    (mh.gpipe, step(X, X, Y), "a step has 3 fields, but in a pipeline must have two, unnamed"),
    (mh.gpipe, step(X, y=Y), "a step has 2 fields, but in a pipeline must have two, unnamed"),
    (mh.gpipe, another_size, "batch_size is 3, but must be divisible by micro_batches = 4"),
    (mh.bsp, step(), "the first field of a step is missing, but must be a batch of samples"),
    (mh.bsp, step(3, Y), "the first field of a step is a int without a length, but must be a batch of samples"),
    (mh.bsp, step(X), "a step has 1 field, but must have an input and a target"),
    (mh.bsp, two_at_once, "another share is still running, but only one can"),
    (mh.bsp, two_begun_together, "another share is still running, but only one can"),
    (mh.bsp, enter_again, "these hands have been in use, but a with block needs new ones"),
    (mh.bsp, join_again, "a model can be joined only once at a time"),
    (mh.bsp, share(dataset=SHUFFLED(batch_size=2)), "batch_size is 4, but the loader's is 2: pass one of them"),
    (mh.bsp, share(dataset=SHUFFLED(batch_size=None), batch_size=None), "the loader has a batch sampler of its own"),
    (mh.bsp, share(dataset=DataLoader(DATA, batch_size=4)), "draws by a SequentialSampler, but must shuffle"),
    (mh.bsp, share(dataset=drawn(replacement=True)), "draws by a RandomSampler, but must shuffle"),
    (mh.bsp, share(dataset=drawn(num_samples=8)), "draws by a RandomSampler, but must shuffle"),
]


@pytest.mark.parametrize(("strategy", "program", "message"), MISUSE, ids=[message for *_, message in MISUSE])
def test_misuse_is_refused_with_the_reason(strategy, program, message):
    with pytest.raises(mh.Refused) as refused:
        Joined(strategy(), program)
    assert message in str(refused.value)


@pytest.mark.parametrize("call", [lambda hands: hands.share(DATA, 4), lambda hands: hands.step(X, Y)])
def test_hands_work_only_within_their_block(call):
    def before(transport):
        call(Hands(transport, fresh(), strategy=mh.bsp(), loss=mse_loss))

    with pytest.raises(mh.Refused, match="outside the with block of its hands"):
        simulate(mh.Cluster(workers=1), before)
    (after,) = Joined(mh.bsp(), looped(), mh.Cluster(workers=1)).ranks
    with pytest.raises(mh.Refused, match="outside the with block of its hands"):
        call(after["hands"])
    with pytest.raises(mh.Refused, match="these hands have been in use"):
        after["hands"].__enter__()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out, y: out - y, "the loss is a tensor of shape (4, 2), but must be a tensor of one number"),
        (lambda out, y: 1.0, "the loss is a float, but must be a tensor of one number"),
    ],
)
def test_a_loss_must_be_one_number(loss, message):
    with pytest.raises(mh.Refused) as refused:
        Joined(mh.bsp(), step(X, Y), loss=loss)
    assert message in str(refused.value)


def test_what_a_method_cannot_have_is_refused_at_once():
    with pytest.raises(mh.Refused, match="servers is 1, but must be 0: this method has none"):
        Joined(mh.bsp(), looped(), mh.Cluster(workers=2, servers=1))
    with pytest.raises(mh.Refused, match="the number of hosts is 4, but must be 1"):
        Joined(mh.hogwild(), looped())


def test_a_method_without_a_rule_takes_no_optimizer():
    class Ruleless(Strategy):
        traits = Traits(lockstep=True, on_worker_loss="ends")

        def setup(self, w): ...

        def step(self, w, batch): ...

        def answer(self, w): ...

    with pytest.raises(mh.Refused, match="a Ruleless has no rule that an optimizer could replace"):
        Joined(Ruleless(), looped(), optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1))


def test_the_given_strategy_is_not_touched():
    strategy = mh.bsp(rule=rules.Momentum(0.1))
    before = copy.deepcopy(strategy)
    Joined(strategy, looped())
    assert strategy == before
    assert vars(strategy).keys() == vars(before).keys()


def test_the_elements_that_are_compared_are_inside_a_large_model():
    """Beyond 2^24 not every number of an element is a number of single precision."""
    slot = ParamSlot("w", Span(0, 2**24 - 3, 2**24 + 5), torch.Size([8]), 0)
    assert _sample(DtypeGroup(torch.empty(0), torch.empty(0), [slot])).tolist() == [
        2**24 - 3,
        2**24 - 1,
        2**24 + 1,
        2**24 + 4,
    ]

"""Saving and resuming a user's own loop, in virtual time: a resumed run is the one that was not interrupted."""

import json
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import manyhands as mh
from manyhands import Refused
from manyhands.core.errors import ManyhandsError
from manyhands.run.join import Hands
from manyhands.run.loader_position import together
from manyhands.run.loaders import part_of
from manyhands.run.plain_values import decode, encode
from manyhands.virtual.budget import VirtualSharedBudget
from manyhands.virtual.world import simulate

from .small import METHODS, ONE_HOST, SERVED, task
from .test_prepared import PREPARED, fresh

DATA = task().data
X, Y = DATA.tensors
BATCH, EPOCHS = 4, 3
NEED_TWO = {"hierarchical_server", "k_sync"}
"""Methods that one worker cannot train by."""


def dropping():
    """A model whose passes are random, with a buffer of its own on every rank."""
    return nn.Sequential(nn.Linear(X.shape[1], 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, Y.shape[1]))


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)


def one_cycle(optimizer):
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=1000)


def cluster_for(name, workers=2, servers=0):
    return mh.Cluster(workers=workers, servers=servers, hosts=1 if name in ONE_HOST else None)


def loader(rank=0):
    return DataLoader(DATA, BATCH, shuffle=True)


class Script:
    """A user's script with a prepared loop.

    Args:
        name: the method.
        folder: where it saves and what it loads.
        save_at: the step after which it saves.
        stop_at: the step after which it ends.
    """

    def __init__(self, name="bsp", folder=None, save_at=(), stop_at=math.inf, resume=False, cluster=None, **parts):
        self.name, self.folder, self.save_at, self.stop_at, self.resume = name, folder, save_at, stop_at, resume
        self.cluster = cluster or cluster_for(name)
        self.make, self.optimizer = parts.get("make", dropping), parts.get("optimizer", sgd)
        self.schedule, self.loader = parts.get("schedule", one_cycle), parts.get("loader", loader)
        self.look = parts.get("look", lambda *_: None)

    def __call__(self, transport):
        net = fresh(self.make)
        optimizer, seen = self.optimizer(net), []
        scheduler = self.schedule(optimizer)
        torch.manual_seed(7)
        with Hands(transport, strategy=METHODS[self.name]()) as hands:
            net, optimizer, scheduler, batches = hands.prepare(net, optimizer, scheduler, self.loader(transport.rank))
            extra = hands.load(self.folder) if self.resume else {"epoch": 0, "step": 0}
            self.train(hands, net, optimizer, scheduler, batches, extra, seen)
        return net, seen

    def train(self, hands, net, optimizer, scheduler, batches, extra, seen):
        step = extra["step"]
        for epoch in range(extra["epoch"], EPOCHS):
            for x, y in batches:
                if hands.workers > 1:  # in virtual time all ranks draw from one generator, in any order
                    torch.manual_seed(100 * step + hands.rank)
                loss = mse_loss(net(x), y)
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                seen.append((hands.rank, step, loss.item(), optimizer.param_groups[0]["lr"], x.sum().item()))
                self.look(hands, net, optimizer)
                if step in self.save_at:
                    hands.save(self.folder, extra={"epoch": epoch, "step": step})
                if step == self.stop_at:
                    return

    def run(self):
        return simulate(self.cluster, self).results


def weights(results):
    return [list(net.state_dict().values()) for net, _ in results]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- what was interrupted equals what was not ----------------------------------------------------------


@pytest.mark.parametrize("stop", [3, 5, 14], ids=["in the middle of a pass", "at its end", "in the last pass"])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_resumed_loop_in_lock_step_equals_an_uninterrupted_one(workers, stop, optimizer, tmp_path):
    parts = {"optimizer": optimizer, "cluster": mh.Cluster(workers=workers)}
    whole = Script(**parts).run()
    first = Script(folder=tmp_path, save_at={stop}, stop_at=stop, **parts).run()
    resumed = Script(folder=tmp_path, resume=True, **parts).run()
    for (_, seen), (_, before), (_, later) in zip(whole, first, resumed, strict=True):
        assert seen == before + later
    assert all(same(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))


@pytest.mark.parametrize("name", ["bsp", "bsp_server", "hybrid", "bmuf", "easgd", "d_psgd"])
def test_a_loop_that_saves_equals_one_that_does_not(name, tmp_path):
    cluster = cluster_for(name, servers=name in SERVED)
    plain, saving = (Script(name, tmp_path, save_at=at, cluster=cluster).run() for at in ((), (2, 7, 9)))
    assert all(same(a, b) for a, b in zip(weights(plain)[:2], weights(saving)[:2], strict=True))
    assert len(list(tmp_path.glob("step-*"))) == 2


# -- every method ----------------------------------------------------------------------------------------


def state_now(hands):
    """The state of the method by name, with its weights and its rule's memory, on the lead."""
    found = []
    with torch.no_grad():
        hands._training.run.pause(None, found.append, None)
    return {key: x.clone() for one in found for key, x in {**one.state, **one.weights}.items()}


def saved_and_loaded(name, tmp_path, cluster):
    """What a checkpoint holds of a method after three steps, and what a loop has that loaded it."""

    def program(resume):
        def run(transport):
            net, found = fresh(), None
            optimizer = sgd(net)
            with Hands(transport, strategy=METHODS[name]()) as hands:
                net, optimizer, batches = hands.prepare(net, optimizer, loader())
                if resume:
                    hands.load(tmp_path)
                    hands.barrier()
                    found = state_now(hands)
                else:
                    for _, (x, y) in zip(range(3), batches, strict=False):
                        mse_loss(net(x), y).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    hands.save(tmp_path)
            return found

        return run

    simulate(cluster, program(False))
    saved = mh.load_checkpoint(tmp_path)
    loaded = simulate(cluster, program(True)).results[0]
    return {**saved.state, **saved.weights}, loaded


@pytest.mark.parametrize("name", PREPARED)
def test_every_method_has_after_loading_what_it_had(name, tmp_path):
    saved, loaded = saved_and_loaded(name, tmp_path, cluster_for(name))
    own = {key: x for key, x in saved.items() if not key.startswith("loop/")}
    assert loaded.keys() == own.keys()
    for key, x in own.items():
        torch.testing.assert_close(loaded[key], x, rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("name", [name for name in SERVED if name in PREPARED])
def test_servers_continue_with_the_weights_of_the_checkpoint(name, tmp_path):
    saved, loaded = saved_and_loaded(name, tmp_path, cluster_for(name, servers=1))
    for key in fresh().state_dict():
        assert torch.equal(loaded[key], saved[key])


@pytest.mark.parametrize("name", PREPARED)
def test_every_method_continues_with_another_number_of_workers(name, tmp_path):
    first = Script(name, tmp_path, save_at={3}, stop_at=3).run()
    more = Script(name, tmp_path, resume=True, cluster=cluster_for(name, workers=3)).run()
    fewer = [] if name in NEED_TWO else Script(name, tmp_path, resume=True, cluster=cluster_for(name, workers=1)).run()
    for results in (more, fewer or more):
        assert all(len(seen) >= 2 and all(math.isfinite(loss) for _, _, loss, *_ in seen) for _, seen in results)
        assert not same(weights(results)[0][:1], weights(first)[0][:1])


# -- the data --------------------------------------------------------------------------------------------


def numbers(count):
    return TensorDataset(torch.arange(count))


def flat(batches):
    return [one for (batch,) in batches for one in batch.tolist()]


def state_of(part):
    return part.position.facts(), part.position.began()


def continued(parts, old, make):
    """The parts of a new loader, which continue where these old parts were."""
    facts, began = zip(*map(state_of, old), strict=True)
    found = [part_of(make(), 0, part, parts, True) for part in range(parts)]
    for index, one in enumerate(found):
        one.position.continue_from(facts, index, began[index] if index < len(began) else began[0])
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_pass_continues_with_the_same_batches(workers, after):
    def make():
        return DataLoader(numbers(24), 4, shuffle=True, num_workers=workers)

    whole, old = ([part_of(make(), 0, part, 2, True) for part in range(2)] for _ in range(2))
    expected = [flat(one) + flat(one) for one in whole]
    iterators = [iter(one) for one in old]
    taken = [flat([next(each) for _ in range(after)]) for each in iterators]
    new = continued(2, old, make)
    assert [a + flat(one) + flat(one) for a, one in zip(taken, new, strict=True)] == expected


def test_another_number_of_workers_takes_what_is_left_of_a_pass():
    def make():
        return DataLoader(numbers(24), 2, shuffle=True)

    old = [part_of(make(), 0, part, 2, True) for part in range(2)]
    iterators = [iter(one) for one in old]
    taken = [flat([next(each) for _ in range(3)]) for each in iterators]
    left = [flat(one) for one in continued(3, old, make)]
    assert sorted(one for some in taken + left for one in some) == list(range(24))
    assert [len(one) for one in left] == [4, 4, 4]


def test_a_loader_draws_what_its_own_generator_and_sampler_would_have_drawn():
    def own_generator():
        return DataLoader(numbers(12), 2, shuffle=True, generator=torch.Generator().manual_seed(3))

    def weighted():
        return DataLoader(numbers(12), 2, sampler=WeightedRandomSampler(torch.arange(1, 13), 12))

    for make in (own_generator, weighted):
        torch.manual_seed(5)
        expected = flat(part_of(make(), 0, 0, 1, True))
        torch.manual_seed(5)
        old = part_of(make(), 0, 0, 1, True)
        iterator = iter(old)
        taken = flat([next(iterator), next(iterator)])
        torch.manual_seed(99)
        (new,) = continued(1, [old], make)
        assert taken + flat(new) == expected


def test_a_random_state_is_not_moved_by_a_pass_that_is_continued():
    old = part_of(DataLoader(numbers(12), 2, shuffle=True), 0, 0, 1, True)
    iterator = iter(old)
    next(iterator)
    (new,) = continued(1, [old], lambda: DataLoader(numbers(12), 2, shuffle=True))
    before = torch.get_rng_state()
    next(iter(new))
    assert torch.equal(before, torch.get_rng_state())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(24))


def test_a_stream_continues_too():
    def make():
        return DataLoader(Stream(), 2)

    old = [part_of(make(), 0, part, 2, True) for part in range(2)]
    iterators = [iter(one) for one in old]
    taken = [[next(each).tolist() for _ in range(2)] for each in iterators]
    left = [[batch.tolist() for batch in one] for one in continued(2, old, make)]
    assert taken[0] + left[0] == [[i, i + 1] for i in range(0, 24, 4)]
    assert taken[1] + left[1] == [[i, i + 1] for i in range(2, 24, 4)]


def test_a_pass_that_the_loop_has_left_is_over_unless_the_run_is_being_stopped():
    one = part_of(DataLoader(numbers(12), 2), 0, 0, 1, True)
    for _ in one:
        break
    assert one.position.facts()["taken"] is None
    one.position.keeps_open = lambda: True
    for _ in one:
        break
    assert one.position.facts() == {"passes": 2, "base": 0, "taken": 1, "batches": 6, "batch_size": 2}


def test_workers_in_different_passes_continue_at_their_mean():
    def at(passes, taken):
        return {"passes": passes, "base": 0, "taken": taken, "batches": 10, "batch_size": 4}

    assert together([at(3, 2), at(2, 4)], 4) == at(3, 0) | {"base": 1}
    assert together([at(2, None), at(2, None)], 4) == at(2, None)
    assert together([at(2, 3), at(2, 3)], 8) == at(2, 0) | {"base": 3}


# -- a loop of steps -------------------------------------------------------------------------------------


def stepped(name, cluster, folder=None, save_at=None, resume=False, **share):
    """What the workers of a loop of `hands.step` took, until it saves and ends, or to the end."""
    budgets = []

    def program(transport):
        def budget(total):
            budgets[:] = budgets or [VirtualSharedBudget(total)]
            return budgets[0]

        net, seen = fresh(), []
        with Hands(transport, net, strategy=METHODS[name](), loss=mse_loss, budget_for=budget) as hands:
            extra = hands.load(folder) if resume else {"step": 0}
            for step, (x, y) in enumerate(hands.share(DATA, batch_size=4, **share), extra["step"] + 1):
                hands.step(x, y)
                seen.append((step, x.sum().item()))
                if step == save_at:
                    hands.save(folder, extra={"step": step})
                    break
        return net, seen

    return simulate(cluster, program).results


@pytest.mark.parametrize("name", ["bsp", "bsp_server", "easgd", "d_psgd", "gpipe"])
def test_a_resumed_loop_of_steps_equals_an_uninterrupted_one(name, tmp_path):
    cluster = cluster_for(name, servers=name in SERVED)
    whole = stepped(name, cluster, epochs=2)
    first = stepped(name, cluster, tmp_path, save_at=3, epochs=2)
    resumed = stepped(name, cluster, tmp_path, resume=True, epochs=2)
    for (net, seen), (_, before), (other, later) in zip(whole[:2], first, resumed, strict=False):
        assert seen == before + later
        assert same(net.state_dict().values(), other.state_dict().values())


@pytest.mark.parametrize("name", ["ssp", "downpour", "ad_psgd"])
def test_a_resumed_share_grants_what_is_left_of_the_budget(name, tmp_path):
    cluster = cluster_for(name)
    first = stepped(name, cluster, tmp_path, save_at=4, steps=10)
    resumed = stepped(name, cluster, tmp_path, resume=True, steps=10)
    assert sum(len(seen) for _, seen in first + resumed) == 20


def test_a_share_resumed_by_more_workers_takes_as_many_samples(tmp_path):
    first = stepped("bsp", cluster_for("bsp"), tmp_path, save_at=3, steps=9)
    resumed = stepped("bsp", cluster_for("bsp", workers=3), tmp_path, resume=True, steps=6)
    assert [len(seen) for _, seen in first + resumed] == [3, 3, 4, 4, 4]


# -- what is saved ----------------------------------------------------------------------------------------


def test_every_scheduler_and_value_comes_back_as_it_was():
    optimizer = adamw(fresh())
    schedulers = [
        MultiStepLR(optimizer, [2, 4]),
        ReduceLROnPlateau(optimizer),
        OneCycleLR(optimizer, 0.1, total_steps=9),
        LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    ]
    for one in schedulers:
        state = one.state_dict()
        text = json.dumps(encode(state, "scheduler0"), allow_nan=False)
        assert decode(json.loads(text), {}) == state
    odd = {"tuple": (1, 2.5), "inf": -math.inf, 3: None, "counter": Counter({4: 1}), "x": {"float": "nan"}}
    tensors = {}
    kept = decode(json.loads(json.dumps(encode({**odd, "t": torch.ones(2)}, "here", tensors))), tensors)
    assert kept.pop("t").tolist() == [1, 1]
    assert kept == odd
    assert isinstance(kept["counter"], Counter)


class Odd:
    pass


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"best": torch.ones(1)}, r"extra\['best'\] is a Tensor, .*: float\(x\) or x.tolist"),
        ({"deep": {"er": [Odd()]}}, r"extra\['deep'\]/er/0 is a Odd, but only numbers, strings"),
        ({"odd": {(1, 2): 3}}, r"a key of extra\['odd'\] is a tuple"),
    ],
)
def test_what_is_no_plain_value_is_refused_with_its_key(extra, why, tmp_path):
    def look(hands, net, optimizer):
        with pytest.raises(Refused, match=why):
            hands.save(tmp_path, extra=extra)

    Script(look=look, stop_at=2).run()
    assert not list(tmp_path.iterdir())


def test_a_scheduler_that_cannot_be_saved_is_refused(tmp_path):
    class Factor(Odd):
        def __call__(self, step):
            return 1.0

        def __init__(self):
            self.inner = Odd()

    def look(hands, net, optimizer):
        with pytest.raises(Refused, match="scheduler0/lr_lambdas/0/inner is a Odd"):
            hands.save(tmp_path)

    Script(schedule=lambda optimizer: LambdaLR(optimizer, Factor()), look=look, stop_at=1).run()


def test_a_scaler_is_saved_with_the_loop(tmp_path):
    def run(resume):
        def program(transport):
            net = fresh()
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0 if resume else 1024.0)
            with Hands(transport, strategy=METHODS["bsp"]()) as hands:
                hands.prepare(net, sgd(net), scaler)
                hands.load(tmp_path) if resume else hands.save(tmp_path)
            return scaler.get_scale() if resume else None

        return simulate(cluster_for("bsp"), program).results

    run(False)
    assert run(True) == [1024.0, 1024.0]


def test_random_states_of_python_and_numpy_come_back(tmp_path):
    drawn = []

    def program(transport):
        net = fresh()
        with Hands(transport, strategy=METHODS["bsp"]()) as hands:
            hands.prepare(net, sgd(net))
            if drawn:
                hands.load(tmp_path)
            else:
                random.gauss(0, 1), np.random.randn()
                hands.save(tmp_path)
            drawn.append((random.gauss(0, 1), np.random.randn(), torch.rand(1).item(), random.random()))

    for _ in range(2):
        simulate(mh.Cluster(workers=1), program)
    assert drawn[0] == drawn[1]


# -- what is refused -------------------------------------------------------------------------------------


def refused(tmp_path, why, **parts):
    """Every rank refuses to load, with the same words."""

    def program(transport):
        with pytest.raises(Refused, match=why) as error:
            Script(folder=tmp_path, resume=True, **parts)(transport)
        return str(error.value).splitlines()[0]

    words = simulate(parts.get("cluster") or cluster_for("bsp"), program).results
    assert len(set(words)) == 1


def damage(folder):
    path = next(folder.glob("step-*")) / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def test_a_checkpoint_that_is_missing_or_damaged_is_refused_on_all_ranks(tmp_path):
    refused(tmp_path, "holds no checkpoint, but must be one or a folder of them")
    Script(folder=tmp_path, save_at={2}, stop_at=2).run()
    damage(tmp_path)
    refused(tmp_path, r"weights.safetensors is damaged: its SHA-256 is not that of the manifest")


def test_a_checkpoint_of_another_loop_is_refused_on_all_ranks(tmp_path):
    Script(folder=tmp_path, save_at={2}, stop_at=2).run()
    refused(tmp_path, "the kind of strategy is 'Elastic', but must be 'AllReduce', as in", name="easgd")
    refused(tmp_path, "the optimizers given to prepare are AdamW, but must be SGD", optimizer=adamw)
    refused(tmp_path, "is .* in the model, but must be .* as in the checkpoint", make=lambda: nn.Linear(4, 2))
    with pytest.raises(Refused, match="the form of the loop is 'step', but must be 'prepare'"):
        stepped("bsp", cluster_for("bsp"), tmp_path, resume=True, steps=3)


def test_a_checkpoint_of_train_is_refused(tmp_path):
    mh.train(task(), mh.bsp(), cluster=mh.Cluster(2), steps=4, checkpoint_every=2, out=tmp_path)
    refused(tmp_path / "checkpoints", "was saved by mh.train, but must be a checkpoint of hands.save")


def test_loading_comes_before_the_first_step(tmp_path):
    def look(hands, net, optimizer):
        with pytest.raises(Refused, match="load was called after training had begun, but must be called directly"):
            hands.load(tmp_path)

    Script(look=look, stop_at=1).run()


@pytest.mark.parametrize("which", [0, 1])
def test_a_checkpoint_that_only_one_rank_loads_is_refused(which, tmp_path):
    Script(folder=tmp_path, save_at={2}, stop_at=2).run()

    def program(transport):
        Script(folder=tmp_path, resume=transport.rank == which)(transport)

    with pytest.raises(Refused, match="on all ranks"):
        simulate(cluster_for("bsp"), program)


def test_saving_is_refused_in_the_middle_of_a_step(tmp_path):
    def program(transport):
        net = fresh()
        with Hands(transport, strategy=METHODS["bsp"]()) as hands:
            hands.prepare(net, sgd(net))
            net(X[:4])
            with pytest.raises(Refused, match="save was called between a forward pass"):
                hands.save(tmp_path)

    simulate(cluster_for("bsp"), program)


def test_the_checkpoints_of_another_run_are_not_mixed_with_its_own(tmp_path):
    Script(folder=tmp_path, save_at={2}, stop_at=2).run()
    with pytest.raises(Refused, match=r"nothing was saved: .*step-00000002 is there already: resume from"):
        Script(folder=tmp_path, save_at={1}, stop_at=1).run()
    Script(folder=tmp_path, resume=True, save_at={4}, stop_at=4).run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]


def test_a_rank_that_does_not_save_is_named(tmp_path):
    def look(hands, net, optimizer):
        if hands.rank == 0:
            hands.save(tmp_path)

    with pytest.raises(ManyhandsError, match=r"is in step 2, but rank 0 waits in hands.save after step 1"):
        Script(look=look).run()

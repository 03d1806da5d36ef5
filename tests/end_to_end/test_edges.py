"""Models and data that are not plain, with every method of the catalog: right, or refused; never silently wrong."""

import inspect
import math
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, mse_loss
from torch.utils.data import IterableDataset, TensorDataset

import manyhands as mh
from manyhands import catalog, rules
from manyhands.codecs import Feedback, TopK
from manyhands.strategies.elastic import Elastic
from manyhands.strategies.streaming import Streaming

from .small import chain, losses, task
from .test_optimizers import NOT_PLAIN, SERVED, alone, doubled, method, taken
from .test_own_loop import Joined, same

METHOD = pytest.mark.parametrize("name", sorted(catalog.__all__))
WORKERS, STEPS, BATCH = 3, 6, 8
RULE = rules.Momentum(0.02, weight_decay=0.1)

TIED = "2.weight and 4.weight are one parameter of several stages, which a pipeline that streams would change"
STREAMS = [name for name in catalog.pipelines.__all__ if isinstance(getattr(mh, name)(), Streaming)]
REFUSED = {
    **{(name, "tied"): TIED for name in STREAMS},
    (
        "adaptive_batch",
        "stream without steps",
    ): "steps is missing: milestones are fractions of a run of unknown length, but must be in samples",
}
"""What is refused, and why. Everything else must be right."""


SOME = {"fraction": 0.3, "threshold": 0.1}
"""Of few numbers more must be sent than of many, or nothing is learned in a few steps."""


def make(name, **knobs):
    """A method with those knobs that it has; pipelines of several stages per worker need more layers than are here.

    Filters and channels are those of convolutions, which are not here either.
    """
    knobs |= {"stages": 1} if name == "interleaved" else {}
    knobs |= {"ranks": 1} if name in ("filter_split", "channel_split") else {}
    known = inspect.signature(getattr(mh, name)).parameters
    knobs = SOME | knobs if name in catalog.compressed.__all__ else knobs
    return getattr(mh, name)(**{knob: value for knob, value in knobs.items() if knob in known})


def takes_rules(name):
    return "rule" in inspect.signature(getattr(mh, name)).parameters


def trained(name, model, oddity="", rule=RULE, workers=WORKERS, steps=STEPS, place=None, **settings):
    """A short run; None if it was refused as it must be."""
    data = settings.pop("data", None) or task(samples=37, model=model, batch_size=BATCH, **settings)
    cluster = mh.Cluster(workers=workers, **(place or {}))
    if (name, oddity) in REFUSED:
        with pytest.raises(mh.Refused, match=re.escape(REFUSED[name, oddity])):
            mh.train(data, make(name, rule=rule), cluster=cluster, steps=steps)
        return None
    return mh.train(data, make(name, rule=rule), cluster=cluster, steps=steps)


def begin(model):
    """The weights at the start of a run."""
    torch.manual_seed(0)
    return {name: p.detach().clone() for name, p in model().named_parameters()}


def assert_moved(result, model, unmoved=()):
    for name, p in begin(model).items():
        assert torch.equal(result.weights[name], p) == (name in unmoved), name
        assert result.weights[name].isfinite().all()


# -- parameters -------------------------------------------------------------------------------------


def frozen():
    net = chain(4, 8, 8, 8, 2)
    net[2].requires_grad_(False)
    return net


@METHOD
def test_frozen_parameters_keep_their_bits(name):
    assert_moved(trained(name, frozen), frozen, unmoved=("2.weight", "2.bias"))


def tied():
    net = chain(4, 6, 6, 6, 2)
    net[4].weight = net[2].weight
    return net


class Twice(nn.Module):
    """Two layers with a tanh between them and one weight, written as one."""

    def __init__(self, one, two):
        super().__init__()
        self.weight, self.bias, self.other = one.weight, one.bias, two.bias

    def forward(self, x):
        return linear(torch.tanh(linear(x, self.weight, self.bias)), self.weight, self.other)


def used_twice():
    first, tanh, one, _, two, last_tanh, last = chain(4, 6, 6, 6, 2)
    return nn.Sequential(first, tanh, Twice(one, two), last_tanh, last)


@METHOD
def test_tied_parameters_are_one_and_move_once(name):
    result = trained(name, tied, "tied")
    if result is not None:
        assert_moved(result, tied)
        assert "4.weight" not in result.weights
        twin = trained(name, used_twice)
        pairs = zip(result.weights.values(), twin.weights.values(), strict=True)
        rounding = 1e-6 if name == "zero_bubble" else 0.0  # the two uses are added in another order
        assert all(torch.allclose(one, other, rtol=rounding, atol=rounding) for one, other in pairs)


class Spare(nn.Linear):
    """With a parameter that nothing uses."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.spare = nn.Parameter(torch.full((3,), 0.7))


def unused():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Spare(8, 8), nn.Tanh(), nn.Linear(8, 2))


@METHOD
def test_neither_momentum_nor_decay_moves_an_unused_parameter(name):
    result = trained(name, unused)
    torch.testing.assert_close(result.weights.pop("2.spare"), torch.full((3,), 0.7), rtol=1e-6, atol=0)
    for one, weight in result.weights.items():
        assert not torch.equal(weight, begin(unused)[one])


class Sometimes(nn.Module):
    """Uses its parameter for some mini-batches only; `used` says for which."""

    used: list[bool]

    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x):
        uses = bool(x.mean() > 0)
        Sometimes.used.append(uses)
        return x + self.extra if uses else x


def sometimes():
    return nn.Sequential(Sometimes(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


DATA32 = task().data
DATA = doubled(DATA32)
SOMETIMES = mh.Task(sometimes, DATA, mse_loss, batch_size=4)


def with_momentum(net):
    return torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)


def assert_weights(result, net):
    for name, p in net.named_parameters():
        torch.testing.assert_close(result.weights[name], p.detach(), rtol=0, atol=1e-12, msg=lambda s, n=name: n + s)


def slots(name):
    return [{}, {"hosts": 1}, {"servers": 1}] if name in SERVED else [{}]


@pytest.mark.parametrize("name", [name for name in sorted({*catalog.__all__} - NOT_PLAIN) if takes_rules(name)])
def test_one_worker_skips_what_a_mini_batch_does_not_use_as_torch_does(name):
    for place in slots(name):
        Sometimes.used = []
        expected = alone(with_momentum, taken(), sometimes)
        assert 0 < sum(Sometimes.used) < len(Sometimes.used)
        result = mh.train(SOMETIMES, method(name, rule=RULE), cluster=mh.Cluster(1, **place), steps=6)
        assert_weights(result, expected)


def together(workers, steps):
    """Plain torch: the mean over all workers, of whom some may have used a parameter and others not."""
    Sometimes.used = []
    net = sometimes_at_first()
    optimizer = with_momentum(net)
    for row in taken(workers, steps=steps):
        grads = []
        for x, y in row:
            optimizer.zero_grad()
            mse_loss(net(x), y).backward()
            grads.append([p.grad for p in net.parameters()])
        for p, column in zip(net.parameters(), zip(*grads, strict=True), strict=True):
            found = [g for g in column if g is not None]
            p.grad = sum(found) / workers if found else None
        optimizer.step()
    assert {sum(Sometimes.used[n : n + workers]) for n in range(0, steps * workers, workers)} >= {0, 1, 2}
    return net


def sometimes_at_first():
    torch.manual_seed(0)
    return sometimes()


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *[("bsp", {}), ("bsp", {"hosts": 1}), ("bsp_server", {}), ("bsp_server", {"hosts": 1})],
        *[("bsp_server", {"servers": 2}), ("k_sync", {"servers": 2}), ("adaptive_batch", {})],
    ],
    ids=str,
)
def test_what_only_some_workers_use_in_a_step_moves_by_the_mean_over_all(name, place):
    knobs = {"k_sync": {"k": 2}, "adaptive_batch": {"factor": 1}}.get(name, {})
    strategy = getattr(mh, name)(rule=RULE, **knobs)
    if name == "k_sync":
        strategy.draws_from_all = False
    result = mh.train(SOMETIMES, strategy, cluster=mh.Cluster(2, **place), steps=12)
    assert_weights(result, together(2, 12))


def test_the_inertia_of_eamsgd_rests_while_a_parameter_is_not_used():
    """With alpha = 0 a worker is alone; its x before the last of seven steps."""
    Sometimes.used, steps = [], []

    class Seen(Elastic):
        def step(self, w, batch):
            steps.append(w.named())
            return super().step(w, batch)

    strategy = mh.eamsgd(momentum=0.8, moving_rate=0.0, rule=rules.Sgd(0.02))
    strategy.__class__ = Seen
    mh.train(SOMETIMES, strategy, cluster=mh.Cluster(1), steps=7)
    Sometimes.used = []
    net = sometimes_at_first()
    x = [p.detach().clone() for p in net.parameters()]
    v = [torch.zeros_like(p) for p in x]
    for ((batch, target),) in taken():
        with torch.no_grad():
            for p, a, b in zip(net.parameters(), x, v, strict=True):
                p.copy_(a + 0.8 * b)
        net.zero_grad()
        mse_loss(net(batch), target).backward()
        for p, a, b in zip(net.parameters(), x, v, strict=True):
            if p.grad is not None:
                b.mul_(0.8).sub_(0.02 * p.grad)
                a.add_(b)
    assert 0 < sum(Sometimes.used) < 6
    for weight, expected in zip(steps[-1].values(), x, strict=True):
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-12)


def test_what_a_codec_still_has_of_an_untouched_parameter_is_not_lost():
    """Half of the gradient is sent at first; the rest goes with the second push, which does not touch it."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
            self.calls = 0

        def forward(self, x, y):
            self.calls += 1
            return (torch.tensor([4.0, 3.0]) * self.w).sum() if self.calls == 1 else 1e-3 * self.other.sum()

    method = mh.ssp(rule=rules.Sgd(1.0), codec=Feedback(TopK(0.25)))
    result = mh.train(task(model=First, loss=None), method, cluster=mh.Cluster(1, servers=1), steps=2)
    assert result.weights["w"].tolist() == [-4.0, -3.0]


class Idle(nn.Linear):
    """With two parameters that have a gradient of zero: only decay moves them."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.decays, self.stays = nn.Parameter(torch.full((3,), 0.7)), nn.Parameter(torch.full((3,), 0.7))

    def forward(self, x):
        return super().forward(x) + 0 * (self.decays.sum() + self.stays.sum())


def idle():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Idle(8, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize("name", [name for name in sorted(catalog.__all__) if takes_rules(name)])
def test_groups_with_different_decay_decay_differently(name):
    for place in slots(name):
        decay = rules.by_name({"*.stays": rules.Sgd(0.02), "*": rules.Sgd(0.02, weight_decay=0.5)})
        result = trained(name, idle, rule=decay, place=place)
        torch.testing.assert_close(result.weights["2.stays"], torch.full((3,), 0.7), rtol=1e-6, atol=0)
        assert (result.weights["2.decays"] < 0.699).all()


@METHOD
def test_a_model_that_is_all_frozen_is_refused(name):
    def ice():
        return frozen().requires_grad_(False)

    with pytest.raises(
        mh.Refused, match="the number of parameters to be trained is 0, but must be >= 1: all are frozen"
    ):
        trained(name, ice)


@pytest.mark.parametrize("name", ["bsp", "ssp", "gpipe", "sandblaster"])
def test_a_parameter_that_thaws_during_the_run_is_refused(name):
    class Thawing(nn.Linear):
        def forward(self, x):
            self.weight.requires_grad_(self.bias.requires_grad)
            return super().forward(x)

    def thawing():
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Thawing(8, 8), nn.Tanh(), nn.Linear(8, 2))
        net[2].weight.requires_grad_(False)
        return net

    with pytest.raises(mh.Refused, match=r"2\.weight was frozen when training began, but is to be trained now"):
        trained(name, thawing)


# -- buffers ----------------------------------------------------------------------------------------


class Norm(nn.BatchNorm1d):
    """Known to whoever wants to look at it."""

    made: list["Norm"]

    def __init__(self, size):
        super().__init__(size)
        Norm.made.append(self)


def normed():
    return nn.Sequential(nn.Linear(4, 8), Norm(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))


def measured(norms, key, shares):
    """By hand: what the workers have measured, each with its share, and what the first value still weighs."""
    first, left = float(key == "running_var"), [0.9 ** int(one.num_batches_tracked) for one in norms]
    found = [(getattr(one, key).double() - q * first) / (1 - q) for one, q in zip(norms, left, strict=True)]
    mean = sum(share * x for share, x in zip(shares, found, strict=True)) / sum(shares)
    return (min(left) * first + (1 - min(left)) * mean).float()


@METHOD
def test_statistics_end_as_the_mean_over_all_workers_and_can_be_used(name):
    """Of equally many mini-batches it is the plain mean."""
    Norm.made = []
    points = TensorDataset(torch.randn(12, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(12, 2))
    result = trained(name, normed, test=points, metric=lambda outputs, _: outputs.abs().mean().item())
    ran = [one for one in Norm.made if one.training and one.num_batches_tracked]
    is_one_pipeline = name in catalog.pipelines.__all__ and make(name).replicas(WORKERS) == 1
    assert len(ran) == (1 if is_one_pipeline else WORKERS)
    steps = [sum("loss" in line and line["rank"] == rank for line in result.records) for rank in range(len(ran))]
    is_even = len({int(one.num_batches_tracked) for one in ran}) == len(set(steps)) == 1
    for key in ("running_mean", "running_var"):
        expected = torch.stack([getattr(one, key) for one in ran]).mean(0) if is_even else measured(ran, key, steps)
        torch.testing.assert_close(result.buffers[f"1.{key}"], expected)
        assert expected.isfinite().all() and (expected != (key == "running_var")).all()
    assert result.buffers["1.num_batches_tracked"] == max(one.num_batches_tracked for one in ran)
    assert math.isfinite(result.test_accuracy) and result.test_accuracy > 0


@pytest.mark.parametrize("name", ["ssp", "gossip", "hogwild"])
def test_a_worker_that_took_no_step_has_no_say_in_the_statistics(name):
    """Its mean of 0 and variance of 1 are statistics of nothing."""
    seen = []

    def program(hands, _):
        if hands.rank < 2:
            for x, y in hands.share(DATA32, BATCH, steps=2):
                hands.step(x, y)
            seen.append(hands._training.worker.model[1].running_mean.clone())

    Norm.made = []
    cluster = mh.Cluster(WORKERS, hosts=1 if make(name).traits.one_host else None)
    models = Joined(make(name), program, cluster, normed).models
    assert same(models)
    torch.testing.assert_close(models[2][1].running_mean, torch.stack(seen).mean(0))


# -- numbers ----------------------------------------------------------------------------------------


def in_bf16():
    return chain(4, 6, 6, 2).bfloat16()


def in_float64():
    return chain(4, 6, 6, 2).double()


@pytest.mark.parametrize("model", [in_float64, in_bf16])
@METHOD
def test_other_precisions_stay_what_they_are_and_learn(name, model):
    dtype = next(model().parameters()).dtype
    x, y = (field.to(dtype) for field in task(samples=37).data.tensors)
    data = mh.Task(model, TensorDataset(x, y), mse_loss, batch_size=BATCH)
    result = trained(name, model, rule=rules.Sgd(0.1), steps=12, data=data)
    assert_moved(result, model)
    assert {weight.dtype for weight in result.weights.values()} == {dtype}
    found = losses(result)
    assert sum(found[-6:]) < 0.9 * sum(found[:6])


# -- sparse gradients -------------------------------------------------------------------------------


def embedding(sparse):
    def model():
        return nn.Sequential(
            *[nn.Embedding(12, 3, sparse=sparse), nn.Flatten(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)]
        ).double()

    draw = torch.Generator().manual_seed(3)
    words, y = torch.randint(0, 10, (37, 2), generator=draw), torch.randn(37, 2, generator=draw).double()
    return mh.Task(model, TensorDataset(words, y), mse_loss, batch_size=BATCH)


@METHOD
def test_a_sparse_gradient_does_what_its_dense_twin_does(name):
    """Where only rows are written less time passes, so lock-free workers would meet otherwise: there it is one."""
    workers = 1 if name in ("hogwild", "hogbatch") else WORKERS
    runs = [
        trained(name, None, rule=rules.Sgd(0.1), data=embedding(sparse), workers=workers) for sparse in (True, False)
    ]
    sparse, dense = (run.weights for run in runs)
    for key, weight in dense.items():
        torch.testing.assert_close(sparse[key], weight, rtol=0, atol=1e-12)
    first = begin(embedding(True).model)["0.weight"]
    changed = (sparse["0.weight"] != first).any(1)
    assert changed[:10].any()
    if name != "onebit_sgd":  # which knows no 0: what nobody touches counts as the mean of its column
        assert torch.allclose(sparse["0.weight"][10:], first[10:], rtol=1e-12)


@pytest.mark.parametrize("name", ["bsp", "ssp", "hogwild"])
def test_gradients_that_are_sparse_in_every_dimension_are_right_too(name):
    class Picks(nn.Module):
        def __init__(self, sparse):
            super().__init__()
            self.table, self.sparse = nn.Parameter(torch.ones(3, 4)), sparse

        def forward(self, x, y):
            return torch.gather(self.table, 1, torch.tensor([[1, 1], [0, 2]]), sparse_grad=self.sparse).sum()

    runs = [trained(name, lambda s=sparse: Picks(s), rule=rules.Sgd(0.1), loss=None) for sparse in (True, False)]
    sparse, dense = (run.weights["table"] for run in runs)
    torch.testing.assert_close(sparse, dense)
    assert torch.equal(sparse[2], torch.ones(4)) and (sparse[0] != 1).tolist() == [False, True, False, False]


# -- data -------------------------------------------------------------------------------------------


class Asked:
    """Samples that remember that they were asked for."""

    def __init__(self):
        self.data, self.seen = task(samples=37).data, set()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.seen.add(index)
        return self.data[index]


@METHOD
def test_of_uneven_shares_every_sample_is_seen_and_every_mini_batch_is_full(name):
    samples = Asked()
    data = mh.Task(lambda: chain(4, 8, 8, 2), samples, mse_loss, batch_size=BATCH)
    result = trained(name, None, data=data)
    assert samples.seen == set(range(37))
    replicas = 1 if make(name).replicas(WORKERS) == 1 else WORKERS
    assert result.samples == STEPS * BATCH * replicas


class Stream(IterableDataset):
    """Samples one after the other; some streams know how many there are."""

    def __iter__(self):
        return iter(zip(*task(samples=37).data.tensors, strict=True))


class Counted(Stream):
    def __len__(self):
        return 37


@METHOD
def test_a_stream_is_shared_in_rounds(name):
    """37 samples are one round of 3 mini-batches of 8 and a rest, or 4 mini-batches for a pipeline."""
    seen = {}

    def program(hands, _):
        for x, y in hands.share(Stream(), BATCH, epochs=6):
            seen.setdefault(hands.rank, []).append(x)
            hands.step(x, y)

    def net():
        return chain(4, 8, 8, 2)

    cluster = mh.Cluster(WORKERS, hosts=1 if make(name).traits.one_host else None)
    strategy = make(name, rule=RULE)
    if (name, "stream without steps") in REFUSED:
        with pytest.raises(mh.Refused, match=REFUSED[name, "stream without steps"]):
            Joined(strategy, program, cluster, net)
        return
    models = Joined(strategy, program, cluster, net).models
    x = task(samples=37).data.tensors[0]
    divides = strategy.replicas(WORKERS) == 1
    for rank in range(WORKERS):
        mine = [x[n : n + BATCH] for n in (range(0, 32, BATCH) if divides else [rank * BATCH])] * 6
        assert len(seen[rank]) == len(mine)
        assert all(torch.equal(a, b) for a, b in zip(seen[rank], mine, strict=True))
    assert same(models)
    torch.manual_seed(0)
    assert not same([models[0], net()])


@pytest.mark.parametrize("stream", [Stream(), Counted(), iter([1, 2])], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("field", ["data", "test"])
def test_managed_training_refuses_a_stream(stream, field):
    fields = {"data": task().data, field: stream}
    message = rf"^{field} is a {type(stream).__name__}, but must have a length and an index; your own loop"
    with pytest.raises(mh.Refused, match=message):
        mh.Task(lambda: chain(4, 2), loss=mse_loss, **fields)

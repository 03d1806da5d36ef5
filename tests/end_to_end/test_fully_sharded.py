"""Fully sharded training: the weights of bsp for any model, 1/P of them between steps, and its refusals."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear, mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import manyhands as mh
from branched_models import LENGTH, WORDS, Gpt, UNet
from manyhands.core.errors import ManyhandsError
from manyhands.rules import Adam, Momentum, Sgd, Torch, by_name
from manyhands.rules.chain import chain as chain_of
from manyhands.rules.clip import ClipNorm
from manyhands.run.join import Hands
from manyhands.virtual.world import simulate

from .small import chain, task

double = partial(torch.randn, dtype=torch.float64)


def words(samples=48):
    """Integers and the integers that follow them."""
    x = torch.randint(WORDS, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(x[:, :-1], x[:, 1:])


def vectors(samples=48):
    noise = torch.Generator().manual_seed(1)
    return TensorDataset(double(samples, 6, generator=noise), double(samples, 2, generator=noise))


def images(samples=48):
    noise = torch.Generator().manual_seed(1)
    return TensorDataset(double(samples, 1, 8, 8, generator=noise), torch.arange(samples) % 10)


def token_loss(logits, y):
    return cross_entropy(logits.flatten(0, 1), y.flatten())


class Borrowing(nn.Module):
    """Reads weights of a module that it never calls, ends with a cached view, and has a layer that is not used."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.unused = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(3, 3)
        self.last, self.scale = nn.Linear(5, 2), nn.Parameter(torch.ones(2))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = linear(x, self.middle.weight, self.middle.bias) + self.middle(x)
        x = self.middle(x).relu_()
        return self.last(x) * self.scale


class Attending(nn.Module):
    """Torch's attention reads the weights of an output layer that it never calls; its results are a tuple."""

    def __init__(self):
        super().__init__()
        self.widen = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 4, batch_first=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        x = self.widen(x).unflatten(1, (1, 8))
        x = self.attention(x, x, x)[0]
        return self.last(self.recurrent(x)[0][:, -1])


class Checkpointing(nn.Module):
    """A part whose forward pass is computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = chain(6, 8, 8, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.last(checkpoint(self.inner, x, use_reentrant=False))


def frozen():
    model = chain(6, 5, 4, 2)
    model[2].requires_grad_(False)
    return model


def noisy():
    """Dropout and statistics."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 2))


def weighed(model):
    """A loss that reads weights outside of any module."""
    return lambda out, y: mse_loss(out, y) + 0.1 * model["now"][0].weight.square().sum()


MODELS = {
    "chain": (lambda: chain(6, 5, 4, 2), vectors, mse_loss),
    "noisy": (noisy, vectors, mse_loss),
    "frozen": (frozen, vectors, mse_loss),
    "borrowing": (Borrowing, vectors, mse_loss),
    "attending": (Attending, vectors, mse_loss),
    "checkpointing": (Checkpointing, vectors, mse_loss),
    "convolutions": (UNet, images, cross_entropy),
    "transformer": (partial(Gpt, rate=0.1), words, token_loss),
    "tied": (partial(Gpt, tied=True), words, token_loss),
}


def made(name, **settings):
    build, data, loss = MODELS[name]
    return mh.Task(lambda: build().double(), data(), loss, batch_size=4, name=name, **settings)


def difference(one, other):
    return max((one.weights[name] - other.weights[name]).abs().max().item() for name in one.weights)


def train(task, strategy, workers=2, **settings):
    cluster = mh.Cluster(workers=workers, hosts=settings.pop("hosts", None), jitter=0.2)
    return mh.train(task, strategy, cluster=cluster, **{"steps": 4, "seed": 3, **settings})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_any_model_is_trained_as_by_bsp(name, workers):
    bsp, sharded = (train(made(name), make(lr=0.1), workers) for make in (mh.bsp, partial(mh.fully_sharded, unit=1)))
    assert difference(bsp, sharded) < 1e-12
    if workers == 2:
        assert bsp.weights_sha256 == sharded.weights_sha256, "there is one order of two terms"


@pytest.mark.parametrize("name", ["chain", "borrowing", "transformer"])
def test_units_and_what_is_kept_change_no_bit(name):
    ways = [{"unit": 1}, {"unit": 1, "keep": True}, {"unit": 50}, {}]
    assert len({train(made(name), mh.fully_sharded(lr=0.1, **way), 3).weights_sha256 for way in ways}) == 1


def test_a_loss_may_read_weights():
    held = {}

    def build():
        held["now"] = chain(6, 5, 2).double()
        return held["now"]

    task = mh.Task(build, vectors(), weighed(held), batch_size=4)
    bsp, sharded = (train(task, make(lr=0.1), 1) for make in (mh.bsp, partial(mh.fully_sharded, unit=1)))
    assert difference(bsp, sharded) < 1e-12


RULES = {
    "momentum": lambda: Momentum(0.1),
    "adam": lambda: Adam(0.01),
    "torch": lambda: Torch("AdamW", lr=0.01),
    "by name": lambda: by_name({"*.bias": Adam(0.01), "*": Sgd(0.1)}),
}


@pytest.mark.parametrize("name", RULES)
def test_elementwise_rules(name):
    bsp, sharded = (
        train(made("chain"), make(rule=RULES[name]()), 3) for make in (mh.bsp, partial(mh.fully_sharded, unit=1))
    )
    assert difference(bsp, sharded) < 1e-12


def saved_and_resumed(tmp_path, workers):
    strategy = partial(mh.fully_sharded, rule=Adam(0.01), unit=1)
    train(made("chain"), strategy(), workers[0], batch_size=12 // workers[0], steps=2, out=tmp_path, checkpoint_every=2)
    return train(made("chain"), strategy(), workers[1], batch_size=12 // workers[1], steps=4, resume=tmp_path)


@pytest.mark.parametrize("workers", [(2, 3), (3, 1), (1, 4), (4, 2)])
def test_other_numbers_of_workers_resume(tmp_path, workers):
    """Of mini-batches of 12 samples, whoever computes them; which ones is a matter of the shares of data."""
    resumed = saved_and_resumed(tmp_path, workers)
    assert resumed.steps == 4 and all(bool(x.isfinite().all()) for x in resumed.weights.values())


@pytest.mark.parametrize("first", [mh.bsp, partial(mh.fully_sharded, unit=1)])
def test_bsp_and_fully_sharded_continue_from_each_other(tmp_path, first):
    second = mh.bsp if first is not mh.bsp else partial(mh.fully_sharded, unit=1)
    whole = train(made("noisy"), mh.bsp(rule=Adam(0.01)), 3, steps=4, out=tmp_path / "a", checkpoint_every=2)
    train(made("noisy"), first(rule=Adam(0.01)), 3, steps=2, out=tmp_path / "b", checkpoint_every=2)
    resumed = train(made("noisy"), second(rule=Adam(0.01)), 3, steps=4, resume=tmp_path / "b")
    assert difference(whole, resumed) < 1e-12


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path):
    whole = train(
        made("noisy"), mh.fully_sharded(rule=Adam(0.01), unit=1), 3, steps=4, out=tmp_path / "a", checkpoint_every=2
    )
    train(made("noisy"), mh.fully_sharded(rule=Adam(0.01), unit=1), 3, steps=2, out=tmp_path / "b", checkpoint_every=2)
    resumed = train(made("noisy"), mh.fully_sharded(rule=Adam(0.01), unit=1), 3, steps=4, resume=tmp_path / "b")
    assert whole.weights_sha256 == resumed.weights_sha256


# -- a user's own loop -----------------------------------------------------------------------------

X, Y = (field.float() for field in vectors().tensors)
ROWS = {0: 6, 1: 2, 2: 3}


def fresh():
    torch.manual_seed(2)
    return chain(6, 5, 4, 2)


def rows(rank, step):
    start = 11 * step % 30 + sum(ROWS[other] for other in range(rank))
    return X[start : start + ROWS[rank]], Y[start : start + ROWS[rank]]


def test_unequal_mini_batches_count_by_samples():
    def program(transport):
        net = fresh()
        with Hands(transport, model=net, loss=mse_loss, strategy=mh.fully_sharded(lr=0.1, unit=1)) as hands:
            for step in range(4):
                hands.step(*rows(hands.rank, step))
        return net

    alone = fresh()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(4):
        x, y = (torch.cat(parts) for parts in zip(*(rows(rank, step) for rank in range(3)), strict=True))
        optimizer.zero_grad()
        mse_loss(alone(x), y).backward()
        optimizer.step()
    for net in simulate(mh.Cluster(3), program).results:
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q)


def test_the_answer_in_a_loop_is_the_whole_model_and_training_continues():
    def program(transport):
        net = fresh()
        with Hands(transport, model=net, loss=mse_loss, strategy=mh.fully_sharded(lr=0.1, unit=1)) as hands:
            hands.step(X[:4], Y[:4])
            assert all(bool(p.isnan().all()) for p in net.parameters()), "a mistake shows"
            with hands.answer() as model:
                seen = [p.detach().clone() for p in model.parameters()]
            assert all(bool(p.isnan().all()) for p in net.parameters())
            hands.step(X[4:8], Y[4:8])
        return seen, [p.detach().clone() for p in net.parameters()]

    alone = fresh()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    models = []
    for start in (0, 4):
        optimizer.zero_grad()
        mse_loss(alone(X[start : start + 4]), Y[start : start + 4]).backward()
        optimizer.step()
        models.append([p.detach().clone() for p in alone.parameters()])
    for found in simulate(mh.Cluster(2), program).results:
        for mine, theirs in zip(found, models, strict=True):
            for p, q in zip(mine, theirs, strict=True):
                torch.testing.assert_close(p, q)


def test_a_loop_with_its_own_backward_is_refused():
    def program(transport):
        net = fresh()
        with Hands(transport, strategy=mh.fully_sharded()) as hands:
            hands.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

    with pytest.raises(mh.Refused, match="a worker has the weights of a module only while it runs"):
        simulate(mh.Cluster(2), program)


# -- what is stored and sent -----------------------------------------------------------------------


def held(result):
    return max(line["bytes"] for line in result.records if "held" in line)


def test_a_worker_stores_its_share():
    """Weights, gradients and two moments of Adam, and the memory for one unit's gradients."""
    task = mh.Task(lambda: chain(*[123] * 9), TensorDataset(torch.randn(32, 123), torch.randn(32, 123)), mse_loss)
    unit = 4 * 124 * 123
    bsp, sharded = (
        held(train(task, make(rule=Adam(0.01)), 4, batch_size=4))
        for make in (mh.bsp, partial(mh.fully_sharded, unit=1))
    )
    assert bsp >= 4 * 8 * unit and 4 * 8 * unit / 4 <= sharded < 4 * 8 * unit / 4 + unit + 2000


@pytest.mark.parametrize(("keep", "gathers"), [(False, 2), (True, 1)])
def test_bytes_of_a_step(keep, gathers):
    """Each of L layers is gathered once in each pass, but for the last one, and its gradient is scattered once."""
    P, L, layer = 3, 4, 12 * 11
    task = mh.Task(lambda: chain(*[11] * (L + 1)), TensorDataset(torch.randn(64, 11), torch.randn(64, 11)), mse_loss)
    runs = [
        train(task, mh.fully_sharded(unit=1, keep=keep), P, batch_size=4, steps=steps).bytes_sent for steps in (3, 4)
    ]
    gathered = layer * (L * gathers - (not keep))
    scattered = layer * L
    sums = 8 * (2 * L + 2)
    step = runs[1] - runs[0]
    expected = 4 * (gathered + scattered) * (P - 1) + 2 * sums * (P - 1)
    assert step == pytest.approx(expected, rel=0.05)


def test_a_model_of_sizes_only_takes_the_time_of_bsp_if_links_are_fast():
    """VGG-16: half of the weights and gradients, and the memory for the gradients of its largest layer."""
    settings = {"cluster": mh.Cluster(workers=2, bandwidth="1000Gbit", latency="0us"), "steps": 2}
    bsp, sharded = (mh.train("vgg16", make(), **settings) for make in (mh.bsp, mh.fully_sharded))
    m, largest = 4 * 138_357_544, 4 * 4096 * (25_088 + 1)
    assert held(sharded) == pytest.approx(2 * m / 2 + largest, rel=1e-4) and held(bsp) == pytest.approx(2 * m, rel=1e-4)
    assert sharded.seconds == pytest.approx(bsp.seconds, rel=0.01)


# -- refusals and losses ---------------------------------------------------------------------------


class Branching(nn.Module):
    """Which of two layers of equal size runs depends on the data, so ranks may differ."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.last((self.one if x.sum() > 0 else self.other)(x))


def test_workers_that_run_different_modules_are_noticed():
    def program(transport):
        net = Branching()
        with Hands(transport, model=net, loss=mse_loss, strategy=mh.fully_sharded(unit=1)) as hands:
            hands.step(X[:4].abs(), Y[:4])
            hands.step(X[:4].abs() * (1 - 2 * hands.rank), Y[:4])

    with pytest.raises(ManyhandsError, match="the workers gathered different modules in step 1"):
        simulate(mh.Cluster(2), program)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rule": chain_of(ClipNorm(1.0), Sgd(0.1))}, "needs whole tensors, of which a worker has slices only"),
        ({"rule": Torch("Adafactor", lr=0.01)}, "needs whole tensors, of which a worker has slices only"),
        ({"unit": 0}, "unit is 0, but must be >= 1"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(mh.Refused, match=message):
        train(task(), mh.fully_sharded(**settings))


def test_teams_are_refused():
    with pytest.raises(
        mh.Refused, match="fully-sharded cannot be trained over teams of ranks: it divides the parameters"
    ):
        train(task(), mh.fully_sharded(), 4, team=mh.piped(2))


@pytest.mark.parametrize("moment", range(1, 40, 3))
def test_a_lost_worker_ends_the_run(moment):
    """Whatever it was about to do: between two modules, in either pass."""
    lost = mh.Cluster(workers=3, faults=[mh.Die(1, at=moment * 1e-5)], latency="10us")
    with pytest.raises(mh.PeerLost, match="rank 1 is lost"):
        mh.train(task(), mh.fully_sharded(unit=1), cluster=lost, steps=50)

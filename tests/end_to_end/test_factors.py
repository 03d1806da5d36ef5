"""Factors with models that are not plain, and with what can happen to a run: right, and never silently wrong."""

import copy
import io
import logging

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.core.errors import ManyhandsError
from manyhands.core.flat import Flat
from manyhands.core.port import Tag
from manyhands.rules import Adam, Momentum, Sgd, by_name
from manyhands.run.join import Hands
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.factors.factors import Factors, unpacked
from manyhands.strategies.factors.linear_layer import find_layers
from manyhands.virtual.world import simulate

RULE = Momentum(0.05, weight_decay=0.1)
WIDTH = 12


def data(samples=48, dtype=torch.float64):
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(samples, WIDTH, generator=draw)
    return TensorDataset(x.to(dtype), (x @ torch.randn(WIDTH, 6, generator=draw)).to(dtype))


def train(model, strategy=None, workers=3, steps=6, batch_size=2, dtype=torch.float64, train=None, **where):
    """A short run; a model that takes x and y is its own loss."""
    own = issubclass(model, PeerModel) if isinstance(model, type) else False
    task = mh.Task(lambda: model().to(dtype), data(dtype=dtype), None if own else mse_loss, batch_size)
    cluster = mh.Cluster(workers=workers, **where)
    return mh.train(task, strategy or Factors(RULE), cluster=cluster, steps=steps, seed=2, **(train or {}))


def chosen(result):
    """Every word of the choice, by step, with ranks that all say the same."""
    lines = [line for line in result.records if "by_factors" in line]
    found = {}
    for line in lines:
        said = set(line["by_factors"]), set(line["by_all_reduce"]), set(line["without_factors"])
        assert found.setdefault(line["step"], said) == said
    return found


def assert_as_bsp(model, by_factors=(), by_all_reduce=(), without=(), **settings):
    """The result is that of bsp, and only these layers went this way and that."""
    result = train(model, **settings)
    assert chosen(result) == {1: (set(by_factors), set(by_all_reduce), set(without))}
    close(result, train(model, AllReduce(RULE), **settings))


def close(one, other):
    assert one.weights.keys() == other.weights.keys()
    for name, w in one.weights.items():
        torch.testing.assert_close(w, other.weights[name], rtol=0, atol=1e-12)


class PeerModel(nn.Module):
    """A model with a loss of its own, two layers and something between them."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 10), nn.Linear(10, 6)

    def forward(self, x, y):
        return mse_loss(self.two(torch.tanh(self.one(x))), y)


BOTH = "one.weight", "two.weight"


# -- how a layer is called ------------------------------------------------------------------------------


class Positions(PeerModel):
    """Every sample has three positions: six rows of factors for two samples."""

    def forward(self, x, y):
        x = torch.stack([x, 2 * x, x - 1], 1)
        return mse_loss(self.two(torch.tanh(self.one(x))).sum(1), y)


class OneByOne(PeerModel):
    """A layer that takes a plain vector, and as many times as there are samples."""

    def forward(self, x, y):
        return sum(mse_loss(self.two(torch.tanh(self.one(input=a))), b) for a, b in zip(x, y, strict=True))


class Again(PeerModel):
    """A layer whose output goes into it once more."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(10, 10)

    def forward(self, x, y):
        return mse_loss(self.two(self.again(torch.tanh(self.again(self.one(x))))), y)


class InPlace(PeerModel):
    """What a layer gives is overwritten."""

    def forward(self, x, y):
        return mse_loss(self.two(self.one(x).mul_(2).tanh_()), y)


class Sum(PeerModel):
    """The gradient of an output is one number, seen everywhere."""

    def forward(self, x, y):
        return self.two(self.one(x)).sum() / 10


class Checkpointed(PeerModel):
    """The first layer is computed twice, the second time in the backward pass."""

    def forward(self, x, y):
        return mse_loss(self.two(checkpoint(lambda x: torch.tanh(self.one(x)), x, use_reentrant=False)), y)


class Dropped(PeerModel):
    """h is what is left after dropout."""

    def forward(self, x, y):
        return mse_loss(self.two(nn.functional.dropout(self.one(x), 0.4)), y)


@pytest.mark.parametrize("model", [PeerModel, OneByOne, InPlace, Sum, Checkpointed, Dropped])
def test_both_layers_go_by_factors(model):
    assert_as_bsp(model, BOTH)


def test_rows_are_samples_times_positions():
    """K (12 + 10) <= 2 * 120 / P and K (10 + 6) <= 2 * 60 / P."""
    assert_as_bsp(Positions, by_all_reduce=BOTH, batch_size=2, workers=3)
    assert_as_bsp(Positions, ["one.weight"], ["two.weight"], batch_size=1, workers=3)
    assert_as_bsp(Positions, BOTH, batch_size=1, workers=2)


def test_rows_of_all_calls_count():
    assert_as_bsp(Again, ["one.weight", "two.weight", "again.weight"], batch_size=1)
    assert_as_bsp(Again, ["one.weight", "two.weight"], ["again.weight"], batch_size=2)


class Some(PeerModel):
    """Only samples with a positive beginning count, so factors have other numbers of rows everywhere, or none."""

    def forward(self, x, y):
        used = x[:, 0] > 0
        return (self.two(torch.tanh(self.one(x[used]))) - y[used]).square().sum() / 10


@pytest.mark.parametrize("where", [{}, {"hosts": 1}], ids=str)
def test_workers_may_have_other_numbers_of_rows(where):
    assert_as_bsp(Some, BOTH, steps=9, **where)


class Sometimes(PeerModel):
    """One layer is used by some workers in some steps only: by nobody in some."""

    used: list[bool]

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(10, 10)

    def forward(self, x, y):
        h = torch.tanh(self.one(x))
        Sometimes.used.append(bool(x[0, 0] > 0.3))
        return mse_loss(self.two(self.extra(h) if Sometimes.used[-1] else h), y)


def test_what_is_not_used_in_a_step_does_not_change():
    """Momentum and decay move it in no such step, as in bsp."""
    Sometimes.used = []
    assert_as_bsp(Sometimes, [*BOTH, "extra.weight"], steps=12, workers=2)
    assert {sum(Sometimes.used[n : n + 2]) for n in range(0, 24, 2)} == {0, 1, 2}


class Never(PeerModel):
    """With a layer that nobody uses."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(10, 10)


def test_a_layer_that_is_never_used_keeps_its_bits():
    assert_as_bsp(Never, [*BOTH, "spare.weight"])
    result = train(Never)
    torch.manual_seed(2)
    assert torch.equal(result.weights["spare.weight"], Never().double().spare.weight)


# -- whose parameters they are --------------------------------------------------------------------------


class NoBias(PeerModel):
    def __init__(self):
        super().__init__()
        self.two = nn.Linear(10, 6, bias=False)


class FrozenBias(PeerModel):
    def __init__(self):
        super().__init__()
        self.two.bias.requires_grad_(False)


@pytest.mark.parametrize("model", [NoBias, FrozenBias])
def test_without_a_bias_too(model):
    assert_as_bsp(model, BOTH)


class FrozenWeight(PeerModel):
    def __init__(self):
        super().__init__()
        self.two.weight.requires_grad_(False)


class Tied(PeerModel):
    """A layer and its transposed twin; two layers with one weight; an embedding that is also a layer."""

    def __init__(self):
        super().__init__()
        self.three, self.four = nn.Linear(10, 10), nn.Linear(10, 10)
        self.table, self.five = nn.Embedding(8, 10), nn.Linear(10, 8)
        self.four.weight, self.five.weight = self.three.weight, self.table.weight

    def forward(self, x, y):
        h = self.four(torch.tanh(self.three(self.one(x))))
        h = h + self.table((x[:, 0] > 0).long())
        return mse_loss(self.two(h), y) + self.five(h).square().mean()


class TiedBias(PeerModel):
    def __init__(self):
        super().__init__()
        self.three, self.four = nn.Linear(10, 10), nn.Linear(10, 10)
        self.four.bias = self.three.bias

    def forward(self, x, y):
        return mse_loss(self.two(self.four(torch.tanh(self.three(self.one(x))))), y)


class Normed(PeerModel):
    """The weight of a layer is made of other parameters."""

    def __init__(self):
        super().__init__()
        self.mid = nn.utils.parametrizations.weight_norm(nn.Linear(10, 10))

    def forward(self, x, y):
        return mse_loss(self.two(self.mid(self.one(x))), y)


@pytest.mark.parametrize("model", [Tied, TiedBias, Normed])
def test_what_is_not_a_layers_own_is_dense(model):
    assert_as_bsp(model, BOTH)


def test_a_frozen_weight_has_no_factors():
    assert_as_bsp(FrozenWeight, ["one.weight"])


def test_a_task_that_knows_its_gradient_has_no_factors():
    def gradient(model, x, y):
        off = model(x) - y
        return off.square().mean(), {"weight": off.T @ x, "bias": off.sum(0)}

    task = mh.Task(lambda: nn.Linear(WIDTH, 6).double(), data(), batch_size=2, gradient=gradient)
    runs = [mh.train(task, one(RULE), cluster=mh.Cluster(3), steps=3) for one in (Factors, AllReduce)]
    close(*runs)
    assert chosen(runs[0]) == {}


@pytest.mark.parametrize(
    "rule", [by_name({"two.*": Adam(0.01), "*": RULE}), by_name({"*.bias": Sgd(0.1), "*": RULE})], ids=["two", "bias"]
)
def test_parameters_may_lie_apart(rule):
    factors = train(PeerModel, Factors(rule))
    assert chosen(factors) == {1: ({*BOTH}, set(), set())}
    close(factors, train(PeerModel, AllReduce(rule)))


class Mixed(PeerModel):
    """Two kinds of numbers."""

    def to(self, *_):
        self.one.double()
        return self

    def forward(self, x, y):
        return mse_loss(self.two(torch.tanh(self.one(x)).float()), y.float())


def test_two_kinds_of_numbers_are_two_vectors():
    result = train(Mixed)
    assert chosen(result) == {1: ({*BOTH}, set(), set())}
    dense = train(Mixed, AllReduce(RULE))
    for name, w in result.weights.items():
        torch.testing.assert_close(w, dense.weights[name], rtol=1e-5, atol=1e-6)


# -- what is not made up of factors ---------------------------------------------------------------------


class Penalty(PeerModel):
    """The loss has a small term of its own for some of the weights."""

    size = 1e-9

    def forward(self, x, y):
        return super().forward(x, y) + self.size * self.two.weight[0].sum()


class OneWeight(PeerModel):
    """The same for one weight, and a very small one."""

    def forward(self, x, y):
        return super().forward(x, y) + 1e-9 * self.two.weight[2, 3]


class OwnBias(PeerModel):
    """The same for the bias."""

    def forward(self, x, y):
        return super().forward(x, y) + 1e-9 * self.two.bias.sum()


class Around(PeerModel):
    """The weight is used past its layer."""

    def forward(self, x, y):
        return mse_loss(nn.functional.linear(self.one(x), self.two.weight, self.two.bias), y)


class Both(PeerModel):
    """The weight is used through its layer and past it."""

    def forward(self, x, y):
        return super().forward(x, y) + nn.functional.linear(x[:, :10], self.two.weight).square().mean()


class Squared(nn.Linear):
    """What this layer gives is not what a linear layer gives."""

    def forward(self, x):
        return super().forward(x).square()


class Shrinks(nn.Linear):
    """Nor is this, which has other rows."""

    def forward(self, x):
        return super().forward(x.view(-1, 2, self.in_features).sum(1)).repeat(2, 1)


class Odd(PeerModel):
    kind = Squared

    def __init__(self):
        super().__init__()
        self.two = self.kind(10, 6)


class Odder(Odd):
    kind = Shrinks


class Scaled(PeerModel):
    """Somebody else's hook changes the gradient of the weight."""

    def __init__(self):
        super().__init__()
        self.two.weight.register_hook(lambda g: 2 * g)


class Clipped(PeerModel):
    """Or what comes back to the layer."""

    def forward(self, x, y):
        out = self.two(torch.tanh(self.one(x)))
        out.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return mse_loss(out, y)


@pytest.mark.parametrize("model", [Penalty, OneWeight, OwnBias, Around, Both, Odd, Odder, Scaled, Clipped])
def test_a_gradient_from_elsewhere_is_noticed(model):
    assert_as_bsp(model, ["one.weight"], without=["two.weight"])


def test_attention_reads_weights_past_their_layer():
    class Attends(PeerModel):
        def __init__(self):
            super().__init__()
            self.mid = nn.MultiheadAttention(10, 2, batch_first=True)

        def forward(self, x, y):
            h = self.one(x)[:, None]
            return mse_loss(self.two(self.mid(h, h, h)[0][:, 0]), y)

    assert_as_bsp(Attends, BOTH, without=["mid.out_proj.weight"])


class Warms(PeerModel):
    """A term that comes in the third step, and only on workers whose x begins with a positive number."""

    pending_ranks: list[bool]

    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x, y):
        self.steps += 1
        loss = super().forward(x, y)
        if self.steps == 3:
            Warms.pending_ranks.append(bool(x[0, 0] > 0))
            loss = loss + Warms.pending_ranks[-1] * 1e-3 * self.two.weight.square().sum()
        return loss


@pytest.mark.parametrize("where", [{}, {"hosts": 1}, {"jitter": 0.5}], ids=str)
def test_it_is_noticed_in_the_step_in_which_it_comes_and_all_agree(where, caplog):
    Warms.pending_ranks = []
    with caplog.at_level(logging.INFO, "manyhands"):
        result = train(Warms, **where)
    assert 0 < sum(Warms.pending_ranks) < len(Warms.pending_ranks) == 3
    assert chosen(result) == {1: ({*BOTH}, set(), set()), 3: ({"one.weight"}, set(), {"two.weight"})}
    assert [one.args["without_factors"] for one in caplog.records] == [[], ["two.weight"]], "one word each, of the lead"
    close(result, train(Warms, AllReduce(RULE)))


def test_half_precision_is_dense():
    result = train(PeerModel, dtype=torch.bfloat16)
    assert chosen(result) == {}
    assert result.weights_sha256 == train(PeerModel, AllReduce(RULE), dtype=torch.bfloat16).weights_sha256


def test_so_it_is_under_autocast():
    class Casts(PeerModel):
        def forward(self, x, y):
            with torch.autocast("cpu", torch.bfloat16):
                out = self.two(torch.tanh(self.one(x)))
            return mse_loss(out.float(), y)

    result, dense = (train(Casts, one, dtype=torch.float32) for one in (None, AllReduce(RULE)))
    assert chosen(result) == {1: (set(), set(), {*BOTH})}
    for name, w in result.weights.items():
        torch.testing.assert_close(w, dense.weights[name])


# -- copies and hooks -----------------------------------------------------------------------------------


class Copies(PeerModel):
    """A copy of a layer runs in every step, and has a gradient of its own; it is saved and read again, too."""

    def forward(self, x, y):
        twin = copy.deepcopy(self.two)
        torch.save(self.two, io.BytesIO())
        h = torch.tanh(self.one(x))
        return mse_loss(self.two(h), y) + twin(h.detach() + 1).square().mean()


def test_a_copy_of_a_layer_is_another_one():
    assert_as_bsp(Copies, BOTH)


def own_loop(strategy, look=None):
    """What every rank of a user's own loop ends with; `look` runs the model between two steps."""

    def program(transport):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, 6)).double()
        with Hands(transport, model, strategy=strategy, loss=mse_loss, seed=2) as hands:
            for x, y in hands.share(data(), 2, steps=6):
                hands.step(x, y)
                x.zero_()
                if look is not None:
                    look(model, y)
        return model

    return simulate(mh.Cluster(workers=3), program).results


def test_in_ones_own_loop_mini_batches_may_be_overwritten_and_the_model_run_between_steps():
    def look(model, y):
        model(torch.ones(5, WIDTH).double()).sum()

    models, dense = own_loop(Factors(RULE), look), own_loop(AllReduce(RULE))
    for ours, theirs in zip(models, dense, strict=True):
        assert not any(module._forward_hooks for module in ours.modules())
        for a, b, first in zip(ours.parameters(), theirs.parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
            assert torch.equal(a, first)


# -- slow, lost, resumed --------------------------------------------------------------------------------


def test_a_straggler_changes_nothing():
    even, slow = (train(PeerModel, stragglers=some) for some in ([], mh.Slow(ranks=[0], factor=5)))
    assert slow.weights_sha256 == even.weights_sha256


@pytest.mark.parametrize("rank", [0, 2])
def test_a_lost_worker_ends_the_run(rank):
    whole = train(PeerModel)
    with pytest.raises(mh.PeerLost, match=f"rank {rank} is lost"):
        train(PeerModel, faults=[mh.Die(rank, whole.seconds / 2)])


@pytest.mark.parametrize("model", [PeerModel, Warms])
@pytest.mark.parametrize("rule", [RULE, Adam(0.01)], ids=str)
def test_a_resumed_run_equals_one_that_never_stopped(model, rule, tmp_path):
    """What was measured, and noticed in the third step, stays."""
    Warms.pending_ranks = []
    saving = {"out": tmp_path, "checkpoint_every": 4}
    never = train(model, Factors(rule), steps=7)
    train(model, Factors(rule), steps=4, train=saving)
    again = train(model, Factors(rule), steps=7, train={**saving, "resume": tmp_path})
    if model is PeerModel:  # the other one counts its steps from where it was made
        assert again.weights_sha256 == never.weights_sha256
    assert chosen(again) == {}


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 3), (3, 1)])
def test_other_numbers_of_workers_can_continue_from_it(before, after, tmp_path):
    found = []
    for strategy, folder in ((Factors(RULE), "factors"), (AllReduce(RULE), "dense")):
        saving = {"out": tmp_path / folder, "checkpoint_every": 4}
        train(PeerModel, strategy, before, steps=4, train=saving)
        found.append(train(PeerModel, strategy, after, steps=16, train={**saving, "resume": tmp_path / folder}))
    close(*found)


# -- messages -------------------------------------------------------------------------------------------


class Letter:
    """What came from rank 7."""

    frm, tag = 7, Tag("factors")

    def __init__(self, meta, *tensors):
        self.meta, self.tensors = meta, tensors


WRONG = {
    "too few layers": ((2,), [(2, 10), (2, WIDTH)]),
    "too many layers": ((2, 0, 0), [(2, 10), (2, WIDTH)]),
    "too few tensors": ((2, 1), [(2, 10), (2, WIDTH)]),
    "too many tensors": ((2, 0), [(2, 10), (2, WIDTH), (1, 6), (1, 10)]),
    "other rows": ((3, 0), [(2, 10), (2, WIDTH)]),
    "other widths": ((2, 0), [(2, WIDTH), (2, 10)]),
    "vectors": ((2, 0), [(20,), (2 * WIDTH,)]),
}


def small_layers():
    model = PeerModel().double()
    return find_layers(model, Flat(dict(model.named_parameters())))


@pytest.mark.parametrize("wrong", WRONG)
def test_factors_that_do_not_fit_are_refused(wrong):
    meta, shapes = WRONG[wrong]
    letter = Letter(meta, *(torch.zeros(shape, dtype=torch.float64) for shape in shapes))
    with pytest.raises(ManyhandsError, match=r"rank 7 sent \(.*\) rows that do not fit 2 layers here"):
        unpacked(letter, small_layers())


def test_so_are_other_numbers_and_what_is_right_is_not():
    one, two = layers = small_layers()
    single = [torch.zeros(2, 10), torch.zeros(2, WIDTH)]
    with pytest.raises(ManyhandsError, match="rank 7"):
        unpacked(Letter((2, -1), *single), layers)
    found = unpacked(Letter((2, -1), *(x.double() for x in single)), layers)
    assert (found[one][0].shape, found[one][1].shape, found[two]) == ((2, 10), (2, WIDTH), None)

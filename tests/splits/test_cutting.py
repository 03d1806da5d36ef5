"""Stages of any module compute what the module computes, to the last bit, and so do their backward passes."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn.functional import relu

import manyhands as mh
from branched_models import LENGTH, WIDTH, WORDS, Branching, Gpt, UNet
from manyhands.core.errors import ManyhandsError, Refused
from manyhands.core.work import work_of
from manyhands.splits import layers
from manyhands.splits.cutting import cut, run
from manyhands.splits.timed_cuts import fastest
from manyhands.tasks import load
from manyhands.tasks.resnet_small import SmallResNet


def words(count):
    return torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(count))


def rows(*shape):
    return lambda count: (torch.randn(count, *shape, generator=torch.Generator().manual_seed(count)),)


MODELS = {
    "gpt": (Gpt, lambda count: (words(count),)),
    "gpt with its loss": (Gpt, lambda count: (words(count), words(count).roll(1, 1))),
    "tied gpt": (lambda: Gpt(tied=True), lambda count: (words(count),)),
    "gpt with dropout": (lambda: Gpt(rate=0.3), lambda count: (words(count),)),
    "resnet": (SmallResNet, rows(1, 8, 8)),
    "u-net": (UNet, rows(1, 8, 8)),
    "branching": (Branching, rows(4)),
}
every_model = pytest.mark.parametrize("name", MODELS)
two_or_three = pytest.mark.parametrize("count", [2, 3])


def made(name):
    torch.manual_seed(1)
    build, batch = MODELS[name]
    return build(), batch


def one_process(model, fields):
    torch.manual_seed(5)
    out = model(*fields)
    out.square().sum().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters()}


def own_rank_for_each_stage(model, batch, fields, count, **settings):
    """As if each stage was another process: copies of the model, no common graph, errors handed back."""
    stages = [cut(copy.deepcopy(model), batch(2), count, **settings)[index] for index in range(count)]
    received, passes = [], []
    torch.manual_seed(5)
    for stage in stages:
        leaves = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in received]
        out = stage(fields, leaves)
        received = list(out) if isinstance(out, tuple) else [out]
        passes.append((stage, leaves, received))
    found, errors = {}, [2 * received[0].detach()]
    for stage, leaves, sent in reversed(passes):
        pairs = [(x, e) for x, e in zip(sent, errors, strict=True) if e is not None and x.requires_grad]
        named = dict(stage.named_parameters())
        inputs = [*named.values(), *(x for x in leaves if x is not None and x.requires_grad)]
        grads = torch.autograd.grad([x for x, _ in pairs], inputs, [e for _, e in pairs], allow_unused=True)
        for name, g in zip(named, grads, strict=False):
            found.setdefault(name, []).append(g)
        back = iter(grads[len(named) :])
        errors = [next(back) if x is not None and x.requires_grad else None for x in leaves]
    return received[0].detach(), found, stages


def summed(gradients):
    present = [g for g in gradients if g is not None]
    return sum(present[1:], present[0]) if present else None


@two_or_three
@every_model
def test_stages_compute_what_the_model_computes(name, count):
    model, batch = made(name)
    fields = batch(2)
    out, found, _ = own_rank_for_each_stage(model, batch, fields, count)
    expected, gradients = one_process(model, fields)
    assert torch.equal(out, expected)
    assert found.keys() == gradients.keys()
    for parameter, g in gradients.items():
        mine = summed(found[parameter])
        assert (mine is None) == (g is None), parameter
        assert g is None or torch.allclose(mine, g, rtol=1e-5, atol=1e-6), parameter


@every_model
def test_other_batch_sizes_and_evaluation(name):
    model, batch = made(name)
    stages = cut(model, batch(2), 3)
    for fields in (batch(5), batch(1 if name != "resnet" else 3), batch(5)):
        for training in (True, False):
            model.train(training)
            torch.manual_seed(5)
            expected = model(*fields)
            torch.manual_seed(5)
            assert torch.equal(run(stages, fields), expected)
    with torch.no_grad():
        assert not run(stages, batch(5)).requires_grad


@every_model
def test_a_stage_reads_only_its_own_parameters(name):
    model, batch = made(name)
    fields = batch(4)
    expected, _ = one_process(copy.deepcopy(model), fields)
    received = ()
    torch.manual_seed(5)
    for index in range(3):
        other = copy.deepcopy(model)
        stage = cut(other, batch(2), 3)[index]
        own = {id(p) for p in stage.parameters()}
        for p in other.parameters():
            if id(p) not in own:
                p.data = p.data.new_full((1,), float("nan")).expand(p.shape)
        received = stage(fields, received)
    assert torch.equal(received, expected)


@every_model
def test_the_model_remains_as_it_is(name):
    model, batch = made(name)
    before = {name: dict(vars(one)) for name, one in model.named_modules()}
    values = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.get_rng_state()
    stages = cut(model, batch(2), 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, values[name]) for name, x in model.state_dict().items())
    run(stages, batch(4))
    assert {name: vars(one).keys() for name, one in model.named_modules()} == {
        name: attributes.keys() for name, attributes in before.items()
    }


def test_every_parameter_belongs_to_the_stages_that_use_it():
    model, batch = made("tied gpt")
    first, *_ = stages = cut(model, batch(2), 3)
    assert {name for name, users in first.own.tensors.items() if len(users) > 1} == {"words.weight"}
    assert first.own.tensors["words.weight"] == {0, 2}
    assert [any(p is model.words.weight for p in stage.parameters()) for stage in stages] == [True, False, True]
    assert sum(p.numel() for stage in stages for p in stage.parameters()) == (
        sum(p.numel() for p in model.parameters()) + model.words.weight.numel()
    )


def test_running_statistics_move_once():
    model, batch = made("resnet")
    stages = cut(model, batch(2), 2)
    run(stages, batch(4))
    counters = [x.item() for name, x in model.named_buffers() if name.endswith("num_batches_tracked")]
    assert counters and set(counters) == {1}
    named = [name for stage in stages for name, _ in stage.named_buffers()]
    assert sorted(named) == sorted(name for name, _ in model.named_buffers())


# -- what travels -------------------------------------------------------------------------------------


def carried(model, batch, **settings):
    plan = cut(model, batch(2), len(settings["at"]) + 1, **settings)[0].plan
    return [[str(key) for key in keys] for keys in plan.carried]


def test_only_activations_travel_between_blocks():
    assert carried(*made("gpt"), at=["h.1", "h.3"]) == [[], []]


def test_a_skip_travels_over_two_cuts():
    outer, inner = "the result of relu in the model", "the result of relu in the model, call 2"
    assert carried(*made("u-net"), at=["middle", "last"]) == [[outer], []]
    assert carried(*made("u-net"), at=["norm", "up"]) == [[inner, outer], [outer]]


def test_the_activation_does_not_travel_twice():
    """The input of the attention is normalised; that of the block is needed behind it."""
    assert carried(*made("gpt"), at=["h.1.before"]) == [[]]
    assert carried(*made("gpt"), at=["h.1.attention"]) == [["the result of h.0"]]


def test_the_value_that_a_branch_looks_at_travels():
    model, batch = made("branching")
    assert all("gt in the model" in keys[0] for keys in carried(model, batch, at=["second", "third"]))
    stages = cut(model, batch(2), 3)
    taken = set()
    for count in range(2, 30):
        fields = batch(count)
        taken.add((model.first(fields[0]).tanh().mean() > 0).item())
        assert torch.equal(run(stages, fields), model(*fields))
    assert taken == {True, False}, "both ways"


def test_random_numbers_are_drawn_by_one_stage():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            noise, kept = torch.rand(4), torch.zeros(4).bernoulli_(0.5)
            return self.last(self.first(x) * kept) + noise[:2]

    model = Noisy()
    stages = cut(model, (torch.randn(2, 4),), 2)
    torch.manual_seed(3)
    expected = model(torch.ones(3, 4))
    torch.manual_seed(3)
    assert torch.equal(run(stages, (torch.ones(3, 4),)), expected)


def test_what_a_stage_writes_in_place_is_its_own_copy():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act, self.last = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)

        def forward(self, x):
            x = self.first(x)
            return self.last(self.act(x) + 1)

    torch.manual_seed(0)
    model, batch = InPlace(), rows(4)
    _, found, stages = own_rank_for_each_stage(model, batch, batch(3), 2, at=["act"])
    assert stages[0].plan.written == {(1, 0)}
    _, gradients = one_process(model, batch(3))
    assert all(torch.equal(found[name][0], g) for name, g in gradients.items())


def test_a_chain_is_cut_as_its_layers_are():
    torch.manual_seed(0)
    chain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    x, (first, last) = torch.randn(7, 6), layers.stages(chain, 2)
    mine, theirs = cut(chain, (x,), 2, at=[str(len(first))]), last(first(x))
    assert torch.equal(run(mine, (x,)), theirs)
    assert [[id(p) for p in stage.parameters()] for stage in mine] == [
        [id(p) for p in stage.parameters()] for stage in (first, last)
    ]


# -- where a model is cut -----------------------------------------------------------------------------


@pytest.mark.parametrize("balance", ["work", "parameters"])
def test_equal_blocks_are_divided_equally(balance):
    model = Gpt(layers=6)
    assert cut(model, (words(2),), 2, balance=balance)[0].plan.cuts == ("h.3",)


def test_where_parameters_are_is_not_where_the_work_is():
    task = load("resnet-small")
    model = task.build(0)
    by_work, by_parameters = (
        [sum(p.numel() for p in stage.parameters()) for stage in cut(model, task.example_inputs(), 2, balance=balance)]
        for balance in ("work", "parameters")
    )
    assert max(by_parameters) < max(by_work)


def test_the_work_of_a_tied_layer_is_where_it_is_computed():
    work = work_of(mh.Task(lambda: Gpt(tied=True), [(words(2)[0],)], None).build(0)).modules
    assert work["head"].forward == 2 * LENGTH * WIDTH * WORDS
    assert work["words"].forward == 2 * WIDTH * WORDS, "an estimate, because it computes no product"


class Slow(nn.Module):
    """Equal layers, of which the last one waits in both passes; no work is counted for that."""

    class Waiting(nn.Linear):
        def forward(self, x):
            for _ in range(300):
                x = x + 0.0
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([*(nn.Linear(4, 4) for _ in range(5)), self.Waiting(4, 4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_measured_seconds_choose_other_cuts_than_work():
    model, x = Slow(), torch.randn(2, 4)
    assert cut(model, (x,), 2)[0].plan.cuts == ("layers.3",)
    names, seconds = fastest(model, (x,), 2, samples=8)
    assert names == ("layers.5",) and 0 < seconds[0] < seconds[1]


# -- what is refused ----------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.between, self.last = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.cell(self.between(self.cell(x))))


class Hidden(nn.Module):
    """A module leaves a value in an attribute, and the model reads it after the next module."""

    class Layer(nn.Linear):
        def forward(self, x):
            self.penalty = (x * self.weight.sum()).sum()
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), self.Layer(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.second(self.first(x))) + self.second.penalty


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.first(x))


class Lottery(Two):
    def forward(self, x):
        return super().forward(x) * random.random()


class Wrapped(nn.Module):
    """A module returns an object that is neither a tensor nor a container of tensors."""

    class Boxed:
        def __init__(self, x):
            self.x = x

    class Layer(nn.Linear):
        def forward(self, x):
            return Wrapped.Boxed(super().forward(x))

    def __init__(self):
        super().__init__()
        self.first, self.last = self.Layer(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.first(x).x)


class Written(nn.Module):
    """A value of the first layer is written into a tensor that the model makes."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        y = torch.zeros(len(x), 4)
        y[:] = self.first(x)
        return self.last(relu(y))


@pytest.mark.parametrize(
    ("model", "at", "why"),
    [
        (Recurrent, ["between"], "cannot be cut at between: cell is called before and behind it"),
        (Recurrent, ["cell"], "cannot be cut at cell: it is called 2 times in a forward pass"),
        (Hidden, ["last"], "the stages compute another result 0 than the model: a value passes"),
        (Lottery, ["last"], "the forward pass draws from Python's random"),
        (Wrapped, ["last"], "first returns a Boxed, but must return tensors"),
        (Written, ["last"], "the result of __setitem__ in the model writes a value of an earlier stage into a tensor"),
        (Two, ["fist"], "there is no module to cut at 'fist': "),
        (Two, ["first"], "cannot be cut at first: nothing that is trained comes before it"),
        (Two, ["last", "last"], r"the number of names in cut is 2, but must be 1 for 2 stages"),
    ],
)
def test_a_cut_that_cannot_work_is_refused(model, at, why):
    with pytest.raises(Refused, match=why):
        cut(model(), (torch.randn(2, 4),), 2, at)


def test_near_names_are_suggested():
    with pytest.raises(Refused, match=r"there is no module to cut at 'h\.22': did you mean h\.2"):
        cut(Gpt(), (words(2),), 2, ["h.22"])


def test_more_stages_than_cuts_are_refused():
    with pytest.raises(Refused, match="the number of stages is 4, but must be <= 2, into which the model can be cut"):
        cut(Two(), (torch.randn(2, 4),), 4)


def test_another_way_than_for_the_example_is_computed_or_refused():
    """Behind the cut a value is needed that was not needed for the example."""

    class Shortcut(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.first(x)
            z = self.last(y.tanh())
            return z + y if x.sum() > 0 else z

    model = Shortcut()
    stages = cut(model, (-torch.ones(2, 4),), 2)
    assert torch.equal(run(stages, (-torch.ones(3, 4),)), model(-torch.ones(3, 4)))
    with pytest.raises(ManyhandsError, match="stage 1 needs the result of first, which stage 0 computes"):
        run(stages, (torch.ones(3, 4),))

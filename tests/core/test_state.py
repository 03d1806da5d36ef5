"""State by name: what was saved of weight slices can be loaded into any other slices, bit for bit."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from manyhands.core.errors import Refused
from manyhands.core.flat import Flat, Span
from manyhands.core.rule import Remembers, UpdateContext
from manyhands.core.state import add, join, load_vectors, named, restore, section, state_slices, under
from manyhands.core.vector_ops import UNCHARGED
from manyhands.core.weight_slice import WeightSlice
from manyhands.rules import Adam, ClipNorm, ClipValue, Momentum, RmsProp, Sgd, Torch, chain

RULES = {
    "sgd": lambda: Sgd(0.1),
    "momentum": lambda: Momentum(0.1),
    "adam": lambda: Adam(0.01),
    "chain": lambda: chain(Momentum(0.1), Adam(0.01)),
    "chain that ends in torch": lambda: chain(Momentum(0.1), Torch("AdamW", lr=0.01)),
    "chain in a chain": lambda: chain(ClipValue(0.1), chain(Momentum(0.1), Torch("SGD", lr=0.01, momentum=0.9))),
    **{
        name: lambda name=name: Torch(name, lr=0.01)
        for name in ("Adam", "NAdam", "RAdam", "ASGD", "Rprop", "Adagrad", "Adadelta")
    },
    "SGD": lambda: Torch("SGD", lr=0.01, momentum=0.9),
}
WHOLE = {
    "Adafactor": lambda: Torch("Adafactor", lr=0.01),
    "chain that needs whole tensors": lambda: chain(ClipNorm(1.0), Adam(0.01)),
}
RULE = pytest.mark.parametrize("rule", {**RULES, **WHOLE})
CUTS = {"uncut": [], "in two": [11], "anywhere": [1, 2, 17, 24], "at a parameter's end": [20]}


def model():
    """A matrix, a vector, a single number: 26 coordinates."""
    layer = nn.Linear(4, 5)
    layer.scale = nn.Parameter(torch.tensor(2.0))
    layer.bias.data.fill_(0.5)
    return layer


class Model:
    """A model's weights in slices with these cuts, and a rule that updates them."""

    def __init__(self, rule, cuts):
        torch.manual_seed(0)
        self.flat = Flat(dict(model().named_parameters()))
        (part,) = self.flat.groups
        self.total = part.weights.numel()
        if not rule.elementwise:
            cuts = [p.span.stop for p in self.flat.slots[:-1]]
        self.vector = part.weights.clone()
        edges = [0, *cuts, self.total]
        spans = [Span(0, *edge) for edge in pairwise(edges)]
        self.slices = [WeightSlice(UNCHARGED, s, self.vector[s.start : s.stop], self.flat.slots, rule) for s in spans]

    def step(self, seed, untouched=()):
        g = torch.randn(self.total, generator=torch.Generator().manual_seed(seed))
        for weight_slice in self.slices:
            at = UpdateContext(weight_slice.weights, samples=seed)
            weight_slice.update(g[weight_slice.span.start : weight_slice.span.stop].clone(), at, untouched)

    def state(self):
        return join(state_slices(self.slices, self.flat.slots))

    def restore(self, saved):
        restore(self.slices, self.flat.slots, saved)


@RULE
@pytest.mark.parametrize("after", CUTS)
@pytest.mark.parametrize("before", CUTS)
def test_state_survives_being_cut_at_other_places(rule, before, after):
    rule = {**RULES, **WHOLE}[rule]
    one = Model(rule(), CUTS[before])
    for seed in range(3):
        one.step(seed)
    one.step(3, untouched={0})
    two = Model(rule(), CUTS[after])
    two.vector.copy_(one.vector)
    two.restore({name: value.clone() for name, value in one.state().items()})
    for seed in range(4, 8):
        one.step(seed)
        two.step(seed)
    assert torch.equal(one.vector, two.vector)
    mine, other = one.state(), two.state()
    assert mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


@RULE
def test_what_is_restored_does_not_share_memory_with_what_was_saved(rule):
    one = Model({**RULES, **WHOLE}[rule](), [])
    one.step(0)
    saved = {name: value.clone() for name, value in one.state().items()}
    kept = {name: value.clone() for name, value in saved.items()}
    two = Model({**RULES, **WHOLE}[rule](), [])
    two.restore(saved)
    two.step(1)
    assert all(torch.equal(saved[name], kept[name]) for name in saved)


def test_names_say_whose_state_it_is_and_whether_it_can_be_cut():
    adam, torch_adam = Model(Adam(0.1), [11]), Model(Torch("Adam", lr=0.1), [11])
    for one in (adam, torch_adam):
        one.step(0)
    parameters = ["weight", "bias", "scale"]
    assert sorted(adam.state()) == sorted(f"{name}/{key}" for name in parameters for key in ("m", "v", ":updates"))
    keys = ("Adam.exp_avg", "Adam.exp_avg_sq", "Adam.step:", ":updates")
    assert sorted(torch_adam.state()) == sorted(f"{name}/{key}" for name in parameters for key in keys)
    sizes = {name: tuple(value.shape) for name, value in torch_adam.state().items() if name.startswith("weight/")}
    assert sizes == dict(zip((f"weight/{key}" for key in keys), [(20,), (20,), (), ()], strict=True))


def test_update_counts_are_kept_per_parameter():
    one = Model(Adam(0.1), [11])
    one.step(0)
    one.step(1, untouched={1})
    counts = {name: int(value) for name, value in one.state().items() if name.endswith(":updates")}
    assert counts == {"weight/:updates": 2, "bias/:updates": 1, "scale/:updates": 2}
    two = Model(Adam(0.1), [])
    two.restore(one.state())
    assert list(two.slices[0].counts) == [2, 1, 2]


def test_the_state_of_another_rule_is_refused():
    one = Model(Momentum(0.1), [])
    with pytest.raises(Refused, match="the rule remembers m of weight in the checkpoint, but must remember m, v"):
        Model(Adam(0.1), []).restore(one.state())
    with pytest.raises(Refused, match="remembers m of weight in the checkpoint, but must remember nothing"):
        Model(Sgd(0.1), []).restore(one.state())
    by_rule = r"the optimizer is Adam, but must be the rule whose memory 'v' was saved"
    with pytest.raises(Refused, match=by_rule):
        Model(Torch("Adam", lr=0.1), []).restore(Model(RmsProp(0.1), []).state())
    torch_adam = Model(Torch("Adam", lr=0.1), [])
    torch_adam.step(0)
    with pytest.raises(Refused, match="the optimizer is AdamW, but must be Adam, whose memory was saved"):
        Model(Torch("AdamW", lr=0.1), []).restore(torch_adam.state())


def test_names_of_parameters_may_have_colons_and_slashes():
    layer = nn.Module()
    layer.register_parameter("a:b/c", nn.Parameter(torch.arange(3.0)))
    flat = Flat(dict(layer.named_parameters()))
    slices = [WeightSlice(UNCHARGED, Span(0, 0, 2), torch.zeros(2), flat.slots, Momentum(0.1))]
    slices += [WeightSlice(UNCHARGED, Span(0, 2, 3), torch.zeros(1), flat.slots, Momentum(0.1))]
    for one in slices:
        one.update(torch.ones_like(one.weights), UpdateContext(one.weights))
    saved = join(state_slices(slices, flat.slots))
    assert torch.equal(saved["a:b/c/m"], torch.ones(3))
    restore(slices, flat.slots, {**saved, "a:b/c/m": torch.tensor([4.0, 5.0, 6.0])})
    assert torch.equal(join(state_slices(slices, flat.slots))["a:b/c/m"], torch.tensor([4.0, 5.0, 6.0]))


# -- optimizers of torch ------------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """Counts its steps as a plain number, and has state that is not a tensor."""

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            memory = self.state[p]
            memory["steps"] = memory.get("steps", 0) + 1
            memory["rate"], memory["odd"] = 0.1, True


class Listing(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["seen"] = [1]


class Moving(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["momentum"] += 0.1


def test_plain_numbers_of_an_optimizer_are_restored_with_their_types():
    weights = [torch.zeros(3), torch.zeros(3)]
    rules = [Torch(Counting, lr=0.1), Torch(Counting, lr=0.1)]
    for rule, w in zip(rules, weights, strict=True):
        assert isinstance(rule, Remembers)
        rule.init(w)
    rules[0](torch.ones(3), UpdateContext(weights[0]))
    rules[1].remember(weights[1], rules[0].memory_of(weights[0]))
    (optimizer,) = rules[1]._optimizers.values()
    (memory,) = optimizer.state.values()
    assert {name: memory[name] for name in ("steps", "rate", "odd")} == {"steps": 1, "rate": 0.1, "odd": True}
    assert [type(memory[name]) for name in ("steps", "rate", "odd")] == [int, float, bool]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Listing, r"Listing\.seen of the optimizer is a list, but must be a tensor or a number to be saved"),
        (Moving, r"the optimizer has moved its own momentum to 0\.1, but must leave it at 0 to be saved"),
    ],
)
def test_an_optimizer_whose_state_cannot_be_saved_is_refused(kind, message):
    weights, rule = torch.zeros(3), Torch(kind, lr=0.1)
    rule.init(weights)
    assert rule.memory_of(weights) == {}
    rule(torch.ones(3), UpdateContext(weights))
    with pytest.raises(Refused, match=message):
        rule.memory_of(weights)


def test_a_changed_learning_rate_is_not_saved():
    weights, rule = torch.zeros(3), Torch("SGD", lr=lambda samples: 0.1 / (1 + samples))
    rule.init(weights)
    rule(torch.ones(3), UpdateContext(weights, samples=9))
    assert rule.memory_of(weights) == {}


class Secretive:
    """Has state that it does not expose."""

    elementwise, needs = True, frozenset({"owner"})

    def init(self, weights):
        return {}

    def __repr__(self):
        return "Secretive()"


def test_a_rule_that_does_not_expose_its_state_is_refused():
    with pytest.raises(Refused, match=r"Secretive\(\) keeps its state to itself"):
        Model(Secretive(), []).state()


def test_so_is_a_chain_with_such_a_rule():
    with pytest.raises(Refused, match=r"Secretive\(\) keeps its state to itself"):
        Model(chain(Momentum(0.1), Secretive()), []).state()


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (lambda: chain(ClipValue(1.0), Adam(0.01)), r"0\.m was saved, but no rule of .* remembers such a thing"),
        (lambda: chain(Momentum(0.1)), r"1\.m, 1\.v was saved, but no rule of .* remembers such a thing"),
        (
            lambda: chain(Momentum(0.1), Adam(0.01), Momentum(0.1)),
            "remembers 0.m, 1.m, 1.v of .*, but must remember 0.m, 1",
        ),
    ],
)
def test_another_chain_is_refused(after, message):
    one = Model(chain(Momentum(0.1), Adam(0.01)), [])
    one.step(0)
    with pytest.raises(Refused, match=message):
        Model(after(), []).restore(one.state())


def test_a_rule_of_torch_says_what_it_is():
    assert repr(Torch("AdamW", lr=0.01, weight_decay=0.1)) == "Torch(AdamW, lr=0.01, weight_decay=0.1)"


# -- vectors and sections -----------------------------------------------------------------------------


def test_vectors_are_saved_and_placed_by_parameter():
    slots = Flat(dict(model().named_parameters())).slots
    vectors = [torch.arange(26.0)]
    saved = {name: x.clone() for name, x in named(slots, vectors).items()}
    assert {name: len(x) for name, x in saved.items()} == {slot.name: slot.span.numel for slot in slots}
    del saved["bias"]
    empty = [torch.zeros(26)]
    load_vectors(slots, empty, saved)
    add(slots, empty, saved)
    add(slots, empty, {})
    bias = next(one.span for one in slots if one.name == "bias")
    doubled = 2 * vectors[0]
    doubled[bias.start : bias.stop] = 0
    assert torch.equal(empty[0], doubled)


def test_a_section_has_what_was_saved_under_its_name():
    saved = {"worker1/x/w": torch.zeros(1), "worker11/x/w": torch.ones(1), "rule/w/m": torch.ones(2)}
    assert list(section(saved, "worker1")) == ["x/w"] and not section(saved, "worker1")["x/w"].any()
    assert list(under("rule", section(saved, "rule"))) == ["rule/w/m"]
    assert section({"step": torch.tensor(3)}, "step") == {"": torch.tensor(3)}

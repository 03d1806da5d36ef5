"""WeightSlice: updates by a rule equal torch's own, also with untouched parameters and with cut parameters."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from manyhands.core.flat import Flat, Span
from manyhands.core.rule import UpdateContext
from manyhands.core.vector_ops import UNCHARGED
from manyhands.core.weight_slice import WeightSlice, replica_slices
from manyhands.rules import Adam, Momentum, Sgd, Torch

STEPS = 12


class Branches(nn.Module):
    """Three parameters per branch, of which a step uses only some."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 5)
        self.left = nn.Linear(5, 3)
        self.right = nn.Linear(5, 3)

    def forward(self, x, used):
        y = torch.tanh(self.trunk(x))
        return sum(getattr(self, branch)(y).square().sum() for branch in used)


USED = [["left", "right"], ["left"], ["right"], ["left"], ["left", "right"], ["left"]]
ALWAYS = [["left", "right"]]


def twins(seed=0):
    torch.manual_seed(seed)
    model = Branches().double()
    twin = Branches().double()
    twin.load_state_dict(model.state_dict())
    return model, twin


def batch(number):
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def by_torch(twin, optimizer, used):
    """Train with torch alone; a parameter that was not used has no gradient and is skipped."""
    for number in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        twin(batch(number), used[number % len(used)]).backward()
        optimizer.step()


def by_slices(model, flat, slices, used):
    for number in range(STEPS):
        flat.open()
        model(batch(number), used[number % len(used)]).backward()
        flat.close()
        untouched = flat.untouched()
        for weight_slice in slices:
            g = flat.grad(weight_slice.span)
            weight_slice.update(g, UpdateContext(weight_slice.weights, samples=number), untouched)


def assert_equal(model, twin):
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")


def make_flat(model):
    return Flat(dict(model.named_parameters()))


RULES = {
    "adam": (Adam(0.05), lambda ps: torch.optim.Adam(ps, lr=0.05)),
    "adamw": (
        Adam(0.05, weight_decay=0.1, decoupled=True),
        lambda ps: torch.optim.AdamW(ps, lr=0.05, weight_decay=0.1),
    ),
    "momentum": (Momentum(0.01, 0.9), lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9)),
    "momentum with decay": (
        Momentum(0.01, 0.9, weight_decay=0.1),
        lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, weight_decay=0.1),
    ),
    "torch adam": (Torch("Adam", lr=0.05), lambda ps: torch.optim.Adam(ps, lr=0.05)),
}
rules = pytest.mark.parametrize(("rule", "optimizer"), RULES.values(), ids=RULES.keys())
use = pytest.mark.parametrize("used", [USED, ALWAYS], ids=["in turn", "always"])
CUTS = [0, 3, 20, 22, 41, 61]
"""61 weights: trunk 20 + 5, left 15 + 3, right 15 + 3."""


@rules
@use
def test_a_replica_equals_torch_also_when_parameters_are_unused_in_some_steps(rule, optimizer, used):
    model, twin = twins()
    flat = make_flat(model)
    by_slices(model, flat, replica_slices(UNCHARGED, flat, rule), used)
    by_torch(twin, optimizer(twin.parameters()), used)
    assert_equal(model, twin)


@rules
@use
def test_an_elementwise_rule_may_be_cut_anywhere(rule, optimizer, used):
    model, twin = twins()
    flat = make_flat(model)
    spans = [Span(0, start, stop) for start, stop in pairwise(CUTS)]
    slices = [WeightSlice(UNCHARGED, span, flat.weights(span), flat.slots, rule) for span in spans]
    by_slices(model, flat, slices, used)
    by_torch(twin, optimizer(twin.parameters()), used)
    assert_equal(model, twin)
    assert [weight_slice.param_ids for weight_slice in slices] == [[0], [0], [1], [1, 2, 3], [3, 4, 5]]


@use
def test_a_rule_that_is_not_elementwise_gets_whole_shapes(used):
    knobs = {"lr": 0.05, "weight_decay": 0.0}
    model, twin = twins()
    flat = make_flat(model)
    rule = Torch("Adafactor", **knobs)
    assert not rule.elementwise
    (weight_slice,) = replica_slices(UNCHARGED, flat, rule)
    by_slices(model, flat, [weight_slice], used)
    by_torch(twin, torch.optim.Adafactor(twin.parameters(), **knobs), used)
    assert_equal(model, twin)


class Spy:
    """A rule that notes what it is given."""

    needs = frozenset()

    def __init__(self, elementwise=True):
        self.elementwise = elementwise
        self.seen = []

    def init(self, weights):
        return {"memory": torch.zeros_like(weights)}

    def __call__(self, g, at):
        self.seen.append((tuple(g.shape), tuple(at.weights.shape), tuple(at.state["memory"].shape), at.updates))
        at.state["memory"].add_(1)
        return torch.ones_like(g)


def spied(elementwise, *untouched):
    """What the rule saw in a few updates, the weight slice, and its weights."""
    model, _ = twins()
    flat = make_flat(model)
    flat.groups[0].weights.zero_()
    rule = Spy(elementwise)
    (weight_slice,) = replica_slices(UNCHARGED, flat, rule)
    for marks in untouched:
        weight_slice.update(torch.zeros(61, dtype=torch.float64), UpdateContext(weight_slice.weights), frozenset(marks))
    return rule.seen, weight_slice, flat


def test_all_weights_are_one_update_while_all_are_touched():
    seen, weight_slice, _ = spied(True, (), ())
    assert seen == [((61,), (61,), (61,), 1), ((61,), (61,), (61,), 2)]
    assert list(weight_slice.counts) == [2] * 6
    assert weight_slice.weights.tolist() == [2.0] * 61


def test_after_a_skipped_update_every_parameter_has_its_own_count():
    seen, weight_slice, flat = spied(True, (), (0, 2), ())
    sizes = [20, 5, 15, 3, 15, 3]
    assert [shape for shape, *_ in seen] == [(61,), (5,), (3,), (15,), (3,), *[(n,) for n in sizes]]
    assert [updates for *_, updates in seen] == [1, 2, 2, 2, 2, 2, 3, 2, 3, 3, 3]
    assert list(weight_slice.counts) == [2, 3, 2, 3, 3, 3]
    assert [float(value.unique()) for value in flat.named().values()] == [2.0, 3.0, 2.0, 3.0, 3.0, 3.0]


def test_counts_that_are_equal_again_make_one_update_again():
    seen, weight_slice, _ = spied(True, (0,), (1, 2, 3, 4, 5), ())
    assert seen[-1] == ((61,), (61,), (61,), 2)
    assert list(weight_slice.counts) == [2] * 6


def test_whole_shapes_are_given_always_and_skipped_alone():
    seen, weight_slice, _ = spied(False, (), (0, 1, 2, 3, 4))
    shapes = [(5, 4), (5,), (3, 5), (3,), (3, 5), (3,)]
    assert seen == [(shape, shape, shape, 1) for shape in shapes] + [((3,), (3,), (3,), 2)]
    assert list(weight_slice.counts) == [1, 1, 1, 1, 1, 2]


def test_counts_and_state_may_be_in_memory_of_the_caller():
    model, _ = twins()
    flat = make_flat(model)
    given, counts = {}, [7, 7, 7]

    def allocate(name, fresh):
        given[name] = torch.full_like(fresh, 5)
        return given[name]

    span = Span(0, 10, 27)
    rule = Spy()
    weight_slice = WeightSlice(UNCHARGED, span, flat.weights(span), flat.slots, rule, allocate, counts)
    assert weight_slice.param_ids == [0, 1, 2]
    weight_slice.update(torch.zeros(17, dtype=torch.float64), UpdateContext(weight_slice.weights))
    weight_slice.update(torch.zeros(17, dtype=torch.float64), UpdateContext(weight_slice.weights), {1})
    assert counts == [9, 8, 9]
    assert [updates for *_, updates in rule.seen] == [8, 9, 9]
    assert list(given) == ["memory"]
    assert given["memory"].tolist() == [7.0] * 10 + [6.0] * 5 + [7.0] * 2


def test_every_dtype_group_of_a_model_has_a_slice_that_may_have_other_weights():
    model = nn.ModuleDict({"short": nn.Linear(2, 2), "long": nn.Linear(2, 1).double()})
    flat = make_flat(model)
    mine, others = (
        replica_slices(UNCHARGED, flat, Sgd(0.1)),
        replica_slices(UNCHARGED, flat, Sgd(0.1), [torch.zeros(6), torch.zeros(3).double()]),
    )
    assert [weight_slice.span for weight_slice in mine] == [Span(0, 0, 6), Span(1, 0, 3)]
    assert [weight_slice.weights is part.weights for weight_slice, part in zip(mine, flat.groups, strict=True)] == [
        True,
        True,
    ]
    before = flat.named()
    for weight_slice in others:
        weight_slice.update(torch.ones_like(weight_slice.weights), UpdateContext(weight_slice.weights))
        assert weight_slice.weights.unique().tolist() == pytest.approx([-0.1])
    assert all(torch.equal(value, before[name]) for name, value in flat.named().items())


def test_weights_that_require_a_gradient_are_updated_without_one():
    w = torch.ones(3, requires_grad=True)
    flat = Flat({"w": nn.Parameter(torch.zeros(3))})
    weight_slice = WeightSlice(UNCHARGED, Span(0, 0, 3), w, flat.slots, Sgd(1.0))
    weight_slice.update(torch.ones(3), UpdateContext(w))
    assert w.tolist() == [0.0] * 3
    assert w.is_leaf


def test_sizes_only_are_never_updated():
    with torch.device("meta"):
        flat = make_flat(Branches())
    rule = Spy()
    (weight_slice,) = replica_slices(UNCHARGED, flat, rule)
    weight_slice.update(torch.empty(61, device="meta"), UpdateContext(weight_slice.weights))
    assert rule.seen == []
    assert list(weight_slice.counts) == [0] * 6

"""Rules by name: an exact name, then the first pattern that matches; none is left over."""

import pytest
import torch
from torch import nn

from manyhands.core.errors import ManyhandsError, Refused
from manyhands.core.flat import Flat, Span
from manyhands.core.param_groups import groups, rule_for
from manyhands.core.rule import UpdateContext
from manyhands.core.vector_ops import UNCHARGED
from manyhands.core.weight_slice import WeightSlice, replica_slices
from manyhands.rules import Adam, ClipValue, Momentum, Sgd, Torch, by_name, chain

DECAYS, PLAIN = Sgd(0.5, weight_decay=0.5), Sgd(0.5)


def net():
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def test_the_first_pattern_that_fits_counts_and_a_name_before_any():
    rule = by_name({"*.bias": PLAIN, "*": DECAYS, "1.bias": Adam(0.1)})
    assert [rule.kind(name) for name in ("0.bias", "0.weight", "1.bias", "bias")] == [0, 1, 2, 1]
    assert rule.chosen(rule.kind("1.bias")) == Adam(0.1)


def test_a_parameter_without_a_rule_is_refused():
    with pytest.raises(Refused, match=r"^0\.weight has no rule, but must match one of the patterns \*\.bias$"):
        groups(by_name({"*.bias": PLAIN}), net())


def test_a_frozen_parameter_needs_no_rule():
    model = net()
    model[0].weight.requires_grad_(False)
    model[1].weight.requires_grad_(False)
    assert groups(by_name({"*.bias": PLAIN}), model) == [["0.bias", "1.bias"]]


@pytest.mark.parametrize("patterns", [("*.bais", "*"), ("*", "*.bias")])
def test_a_rule_that_no_parameter_is_left_for_is_refused(patterns):
    first, second = patterns
    lost = first if first == "*.bais" else second
    with pytest.raises(Refused) as refused:
        groups(by_name({first: PLAIN, second: DECAYS}), net())
    assert f"is for {lost}, but no parameter of the model has such a name" in str(refused.value)


def test_none_and_nested_ones_are_refused():
    with pytest.raises(Refused, match="the number of rules by name is 0"):
        by_name({})
    with pytest.raises(Refused, match="put all patterns into one by_name"):
        by_name({"*": by_name({"*": PLAIN})})


def test_it_is_as_demanding_as_the_most_demanding():
    rule = by_name({"*.bias": Torch("Adafactor", lr=0.1), "*": PLAIN})
    assert (rule.elementwise, rule.needs) == (False, frozenset({"owner"}))
    assert by_name({"*": PLAIN}).elementwise
    assert list(by_name({"*.bias": Momentum(0.1), "*": PLAIN}).init(torch.zeros(2))) == ["0.m"]


def test_a_gradient_without_a_name_has_no_rule():
    with pytest.raises(ManyhandsError, match="without a name"):
        by_name({"*": PLAIN})(torch.ones(1), UpdateContext(torch.ones(1)))


def test_parameters_of_one_rule_are_a_dtype_group():
    model = net()
    rule = by_name({"*.bias": PLAIN, "*": DECAYS})
    flat = Flat(dict(model.named_parameters()), groups(rule, model))
    assert [[slot.name for slot in group.slots] for group in flat.groups] == [
        ["0.weight", "1.weight"],
        ["0.bias", "1.bias"],
    ]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for weight_slice, group in zip(replica_slices(UNCHARGED, flat, rule), flat.groups, strict=True):
        weight_slice.update(group.grad, UpdateContext(weight_slice.weights))
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name] if name.endswith("bias") else before[name] * 0.75)


def test_parameters_of_a_dtype_group_must_have_one_rule():
    flat = Flat(dict(net().named_parameters()))
    with pytest.raises(Refused, match=r"0\.weight|1\.weight and .*bias are in one group, but must not be"):
        WeightSlice(
            UNCHARGED, Span(0, 0, 3), flat.groups[0].weights[:3], flat.slots, by_name({"*.bias": PLAIN, "*": DECAYS})
        )


def test_a_link_of_a_chain_may_choose():
    rule = chain(ClipValue(1.0), by_name({"*.bias": PLAIN, "*": DECAYS}))
    assert rule_for(rule, ["0.bias", "1.bias"]).links == (ClipValue(1.0), PLAIN)
    assert rule_for(rule, ["0.weight"]).links == (ClipValue(1.0), DECAYS)
    plain = chain(ClipValue(1.0), PLAIN)
    assert rule_for(plain, ["0.weight", "0.bias"]) is plain
    with pytest.raises(Refused, match="no parameter of the model has such a name"):
        groups(chain(ClipValue(1.0), by_name({"*.bais": PLAIN, "*": DECAYS})), net())


def test_buckets_of_several_dtype_groups_are_in_the_order_their_gradients_become_ready():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    flat = Flat(dict(model.named_parameters()), groups(by_name({"*.bias": PLAIN, "*": DECAYS}), model))
    weights, biases = (flat.groups[n].slots for n in (0, 1))
    spans = [slot.span for slot in reversed(weights)]
    assert flat.buckets(8 * 8 * 4) == [*spans[:2], Span(1, 0, 24), spans[2]]
    assert biases[0].name == "0.bias"

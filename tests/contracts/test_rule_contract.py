"""What every rule and every learning rate schedule promises, tested over the EXAMPLES of manyhands/rules."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from part_modules import check_module, classes_with, examples, members_of, modules, public_members

from manyhands import rules
from manyhands.core.rule import (
    OPTIONAL,
    Chooses,
    Corrects,
    LooksAhead,
    Moves,
    PerGradient,
    Remembers,
    Rule,
    Scales,
    Skips,
    UpdateContext,
    Uphill,
    corrects,
    scales,
    skips,
)

N = 1003
CUTS = [(0, 7), (7, 420), (420, N)]
BATCH = 32
NAMES = ["fc.weight", "fc.bias"]

MODULES = modules(rules)
EXAMPLES = {name: example for name, example in examples(rules).items() if hasattr(example, "init")}
SCHEDULES = {name: example for name, example in examples(rules).items() if not hasattr(example, "init")}
TWINS = {name: twin for module in MODULES.values() for name, twin in getattr(module, "TWINS", {}).items()}


def resolved(name, rule):
    """A rule that chooses is applied as the rules that it has chosen."""
    if not isinstance(rule, Chooses):
        return {name: rule}
    kinds = {rule.kind(parameter): parameter for parameter in NAMES}
    if len(kinds) == 1:
        return {name: rule.chosen(*kinds)}
    return {f"{name}, {parameter}": rule.chosen(kind) for kind, parameter in kinds.items()}


RULES = {key: rule for name, example in EXAMPLES.items() for key, rule in resolved(name, example).items()}


def those(condition):
    """The rules for which a test applies."""
    found = {name: rule for name, rule in RULES.items() if condition(rule)}
    return pytest.mark.parametrize("rule", found.values(), ids=found.keys())


every = those(lambda rule: True)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)

# -- the table -----------------------------------------------------------------------------------------

PARTS = {name: classes_with(module, "init", "__call__") for name, module in MODULES.items()}
RATES = {name: classes_with(module, "__call__") for name, module in MODULES.items()}
KINDS = [kind for kinds in PARTS.values() for kind in kinds]


@pytest.mark.parametrize("name", [name for name, kinds in PARTS.items() if kinds])
def test_a_module_with_a_rule_has_examples_and_is_exported(name):
    check_module(rules, MODULES[name], PARTS[name])


@pytest.mark.parametrize("name", [name for name, kinds in RATES.items() if kinds and not PARTS[name]])
def test_a_module_with_a_schedule_has_examples_and_is_exported(name):
    check_module(rules, MODULES[name], RATES[name])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_public_member_is_in_the_protocol_or_in_the_table(kind):
    assert public_members(kind) <= members_of(Rule) | set(OPTIONAL)


def test_the_table_lists_the_members_of_the_optional_protocols():
    optional = [Moves, Skips, Scales, Uphill, PerGradient, Corrects, Chooses, Remembers, LooksAhead]
    listed = {(meaning.partition(":")[0], name) for name, meaning in OPTIONAL.items()}
    assert listed == {(protocol.__name__, name) for protocol in optional for name in members_of(protocol)}


# -- a few steps ---------------------------------------------------------------------------------------


def start(dtype=torch.float64):
    return torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=dtype)


def gradients(dtype=torch.float64, steps=20):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(N, generator=generator, dtype=dtype) for _ in range(steps)]


def context(rule, weights, state, t):
    """Update t of four workers, with the old weights only if the rule needs them."""
    seen = weights * 0.9 if "seen" in rule.needs else None
    return UpdateContext(weights, state, t + 1, t * BATCH, lag=t % 4, rank=t % 4, workers=4, seen=seen)


def train(rule, w, steps, spans=((0, N),)):
    """Apply a rule to views of w; returns its states, one per view."""
    rule = copy.deepcopy(rule)
    states = [rule.init(w[a:b]) for a, b in spans]
    for t, g in enumerate(steps):
        for (a, b), state in zip(spans, states, strict=True):
            before = w[a:b].clone()
            step = rule(g[a:b].clone(), context(rule, w[a:b], state, t))
            if step is not None:
                assert torch.equal(w[a:b], before), "only a rule that returns None moves the weights"
                w[a:b] += step
    return states


def train_with_torch(name, knobs, w, steps):
    w = torch.nn.Parameter(w.clone())
    lr = knobs["lr"] if callable(knobs["lr"]) else lambda samples: knobs["lr"]
    optimizer = getattr(torch.optim, name)([w], **{**knobs, "lr": lr(0)})
    for t, g in enumerate(steps):
        optimizer.param_groups[0]["lr"] = lr(t * BATCH)
        w.grad = g.clone()
        optimizer.step()
    return w.detach()


@pytest.mark.parametrize("name", TWINS)
def test_equals_torch_optim(name):
    kind, knobs = TWINS[name]
    rule, w = copy.deepcopy(RULES[name]), start()
    state = rule.init(w)
    for t, g in enumerate(gradients()):
        step = rule(g.clone(), UpdateContext(w, state, t + 1, t * BATCH))
        if step is not None:
            w += step
    assert (w - start()).abs().max() > 1e-3
    torch.testing.assert_close(w, train_with_torch(kind, knobs, start(), gradients()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in MODULES if PARTS[name]])
def test_a_rule_that_says_it_equals_torch_has_a_twin(name):
    says = "qual to `torch.optim" in MODULES[name].__doc__
    assert not says or getattr(MODULES[name], "TWINS", None), "give TWINS: example -> class and arguments"


@every
def test_the_state_is_shaped_like_the_weights(rule):
    for weights in torch.zeros(7), torch.zeros(3, 4, dtype=torch.float64):
        state = copy.deepcopy(rule).init(weights)
        assert all((x.shape, x.dtype) == (weights.shape, weights.dtype) for x in state.values())


@every
@dtypes
def test_weights_move_and_stay_finite(rule, dtype):
    w = start(dtype)
    train(rule, w, gradients(dtype))
    assert w.isfinite().all() and not torch.equal(w, start(dtype))


@those(lambda rule: rule.elementwise)
@dtypes
def test_elementwise_rules_may_be_cut_anywhere(rule, dtype):
    whole, cut = start(dtype), start(dtype)
    (state,) = train(rule, whole, gradients(dtype))
    states = train(rule, cut, gradients(dtype), CUTS)
    assert torch.equal(whole, cut)
    for name, x in state.items():
        assert torch.equal(x, torch.cat([part[name] for part in states]))


@those(lambda rule: "owner" not in rule.needs)
def test_all_memory_is_in_the_state(rule):
    w, resumed = start(), start()
    train(rule, w, gradients())
    state = rule.init(resumed)
    for t, g in enumerate(gradients()):
        state = {name: x.clone() for name, x in state.items()}  # as from a checkpoint
        fresh = pickle.loads(pickle.dumps(rule))
        resumed += fresh(g.clone(), context(rule, resumed, state, t))
    assert torch.equal(w, resumed)


@every
def test_what_a_rule_needs_is_one_of_two_things(rule):
    assert rule.needs <= {"seen", "owner"}
    assert "owner" not in rule.needs or isinstance(rule, Remembers), "such a memory could not be saved"


# -- optional methods ----------------------------------------------------------------------------------


@those(skips)
def test_a_gradient_of_zero_is_no_step(rule):
    w = start()
    (state,) = train(rule, w, gradients())
    before = {name: x.clone() for name, x in state.items()}
    step = rule(torch.zeros_like(w), context(rule, w, state, 20))
    assert not step.any()
    assert all(torch.equal(x, before[name]) for name, x in state.items())


@those(scales)
@dtypes
def test_a_step_that_scales_is_the_gradient_times_a_number(rule, dtype):
    w, (g, *_) = start(dtype), gradients(dtype)
    at = context(rule, w, rule.init(w), 3)
    assert torch.equal(rule(g.clone(), at), g * rule.scale(at))


@those(lambda rule: isinstance(rule, Moves) and rule.can_move(torch.zeros(1)))
@dtypes
def test_a_move_is_the_step_added_to_the_last_bit(rule, dtype):
    w, moved, copied = start(dtype), start(dtype), torch.zeros(N, dtype=dtype)
    state, other = rule.init(w), rule.init(w)
    for t, g in enumerate(gradients(dtype)):
        before = g.clone()
        w += rule(g.clone(), context(rule, w, state, t))
        rule.move(g, context(rule, moved, other, t), copied if t % 2 else None)
        assert torch.equal(g, before), "the gradient is only read"
        assert torch.equal(w, moved)
        assert t % 2 == 0 or torch.equal(copied, w)
    assert all(torch.equal(x, other[name]) for name, x in state.items())


@those(corrects)
def test_correcting_and_stepping_is_applying(rule):
    w, (g, *_) = start(), gradients()
    one, two = rule.init(w), rule.init(w)
    step = rule(g.clone(), context(rule, w, one, 3))
    corrected = rule.correct(g.clone(), context(rule, w, two, 3))
    assert torch.equal(step, rule.step(corrected, context(rule, w, two, 3)))
    assert not torch.equal(corrected, g), "the staleness matters"


@those(lambda rule: isinstance(rule, Remembers) and "owner" in rule.needs)
def test_a_memory_outside_of_the_state_can_be_saved_and_restored(rule):
    w = start()
    first, second = copy.deepcopy(rule), copy.deepcopy(rule)
    first.init(w)
    for t, g in enumerate(gradients()):
        first(g.clone(), context(first, w, {}, t))
    resumed = w.clone()
    second.init(resumed)
    second.remember(resumed, {name: x.clone() for name, x in first.memory_of(w).items()})
    for t, g in enumerate(gradients(), start=20):
        first(g.clone(), context(first, w, {}, t))
        second(g.clone(), context(second, resumed, {}, t))
    assert torch.equal(w, resumed)


@pytest.mark.parametrize("name", [name for name, rule in EXAMPLES.items() if isinstance(rule, Chooses)])
def test_a_rule_that_chooses_has_one_for_every_parameter(name):
    rule = EXAMPLES[name]
    rule.check(NAMES)
    for parameter in NAMES:
        chosen = rule.chosen(rule.kind(parameter))
        assert callable(chosen) and chosen.needs <= rule.needs
        assert rule.elementwise <= chosen.elementwise


@those(lambda rule: isinstance(rule, LooksAhead))
def test_the_outcome_is_like_the_weights_and_changes_nothing(rule):
    w = start()
    (state,) = train(rule, w, gradients())
    before = [x.clone() for x in (w, *state.values())]
    outcome = rule.outcome(context(rule, w, state, 20))
    assert (outcome.shape, outcome.dtype) == (w.shape, w.dtype)
    assert all(map(torch.equal, before, (w, *state.values())))


# -- learning rates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_a_function_of_samples(name):
    rate, copied = SCHEDULES[name], pickle.loads(pickle.dumps(SCHEDULES[name]))
    values = [rate(n) for n in range(0, 5000, 10)]
    assert values == [copied(n) for n in range(0, 5000, 10)], "no memory: a resumed run has the same rates"
    assert all(0 <= value < math.inf for value in values) and any(values)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_rises_and_then_falls(name):
    values = [SCHEDULES[name](n) for n in range(0, 5000, 10)]
    signs = [math.copysign(1, b - a) for a, b in itertools.pairwise(values) if abs(b - a) > 1e-12]
    assert [sign for sign, _ in itertools.groupby(signs)] in ([1.0], [-1.0], [1.0, -1.0])

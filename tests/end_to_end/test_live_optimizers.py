"""The rule that is made of a user's optimizer: the same class, its options as they are, or a refusal."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from manyhands.core.errors import Refused
from manyhands.core.rule import UpdateContext
from manyhands.run.live_optimizers import LiveOptimizers

KINDS = [
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"betas": (0.8, 0.9), "eps": 1e-6, "amsgrad": True}),
    ("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("AdamW", {"weight_decay": 0.3, "maximize": True}),
    ("Adagrad", {"initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    ("RMSprop", {"alpha": 0.8, "centered": True, "momentum": 0.5}),
    ("NAdam", {"momentum_decay": 0.01}),
    ("Adafactor", {}),
]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def named(model):
    return dict(model.named_parameters())


def recreate(optimizer, parameters):
    return LiveOptimizers([optimizer], parameters).rule


def refusal(optimizer, model):
    with pytest.raises(Refused) as refused:
        recreate(optimizer, named(model))
    return str(refused.value)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_recreated_optimizer_moves_weights_as_the_original_does(kind, options):
    weight = nn.Parameter(torch.randn(4, 3))
    moved = weight.detach().clone()
    optimizer = getattr(torch.optim, kind)([weight], lr=0.05, **options)
    rule = recreate(optimizer, {"weight": weight})
    state = rule.init(moved)
    for number in range(3):
        g = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        weight.grad = g.clone()
        optimizer.step()
        rule(g.clone(), UpdateContext(moved, state, updates=number + 1))
    assert torch.equal(moved, weight)


def test_an_optimizer_made_of_named_parameters_is_accepted():
    model = net()
    assert recreate(torch.optim.SGD(model.named_parameters(), lr=0.25), named(model)).lr == 0.25


def test_a_rate_that_is_a_tensor_is_a_number():
    model = net()
    assert recreate(torch.optim.SGD(model.parameters(), lr=torch.tensor(0.25)), named(model)).lr == 0.25


def test_every_group_has_a_rule_whose_options_can_change_by_themselves():
    model = net()
    biases, weights = ([layer.bias for layer in model], [layer.weight for layer in model])
    optimizer = torch.optim.SGD([{"params": weights, "weight_decay": 0.1}, {"params": biases}], lr=0.1)
    live = LiveOptimizers([optimizer], named(model))
    assert [names for names, _ in live.rule.groups] == [("0.weight", "1.weight"), ("0.bias", "1.bias")]
    assert [one.knobs["weight_decay"] for _, one in live.rule.groups] == [0.1, 0]
    optimizer.param_groups[1]["lr"] = 0.5
    before = live.options.values
    assert [a == b for a, b in zip(before, live.read(), strict=True)].count(False) == 1


def test_an_option_that_is_no_number_cannot_change():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    live = LiveOptimizers([optimizer], named(model))
    optimizer.param_groups[0]["nesterov"] = True
    with pytest.raises(Refused, match="nesterov of the optimizer is True now, but must stay False during a run"):
        live.read()


def test_frozen_parameters_may_be_missing_or_there():
    model = net()
    model[0].requires_grad_(False)
    assert recreate(torch.optim.SGD(model[1].parameters(), lr=0.1), named(model)).lr == 0.1
    assert recreate(torch.optim.SGD(model.parameters(), lr=0.1), named(model)).lr == 0.1


def test_parameters_of_another_model_are_refused():
    model = net()
    message = refusal(torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(7, 2))], lr=0.1), model)
    assert message == "the optimizer has parameters of shape (7, 2), but must have those of the model only"


def test_parameters_that_are_missing_are_named():
    model = net()
    message = refusal(torch.optim.SGD(model[0].parameters(), lr=0.1), model)
    assert message.startswith("the optimizer lacks 1.weight, 1.bias, but must have every parameter")


@pytest.mark.parametrize(("kind", "options"), [("SGD", {"momentum": 0.9}), ("Adam", {}), ("Adagrad", {})])
def test_an_optimizer_that_has_stepped_is_refused(kind, options):
    model = net()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert refusal(optimizer, model).startswith("the optimizer has already stepped, but must be new")


@pytest.mark.parametrize("made", [lambda one: StepLR(one, 10), lambda one: OneCycleLR(one, 0.2, total_steps=9)])
def test_an_optimizer_may_have_a_scheduler(made):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = made(optimizer)
    live = LiveOptimizers([optimizer], named(model))
    optimizer.step()
    for _ in range(3):
        scheduler.step()
    assert live.read()[0] == scheduler.get_last_lr()[0]


def test_an_option_that_is_no_argument_of_the_class_is_refused():
    class Fixed(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr=lr)

    model = net()
    optimizer = Fixed(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["momentum"] = 0.9
    assert refusal(optimizer, model) == "momentum of a Fixed is 0.9, but its class has no such argument"

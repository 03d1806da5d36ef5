"""An optimizer made again: the same class, the same options, or a refusal that names what would be lost."""

import pytest
import torch
from torch import nn

from manyhands.core.errors import Refused
from manyhands.core.rule import UpdateContext
from manyhands.rules.optimizer import recreate

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


def test_groups_with_the_same_options_are_one():
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
    rule = recreate(torch.optim.SGD(groups, lr=0.25, momentum=0.5), named(model))
    assert (rule.lr, rule.knobs["momentum"]) == (0.25, 0.5)


def test_groups_with_different_options_have_a_rule_each():
    model = net()
    biases, weights = ([layer.bias for layer in model], [layer.weight for layer in model])
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases[:1]}, {"params": biases[1:]}]
    rule = recreate(torch.optim.SGD(groups, lr=0.1), named(model))
    assert [names for names, _ in rule.groups] == [("0.weight", "1.weight"), ("0.bias", "1.bias")]
    assert [one.knobs["weight_decay"] for _, one in rule.groups] == [0.1, 0]
    assert rule.kind("1.bias") == 1


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


def test_an_optimizer_with_a_scheduler_is_refused():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    assert refusal(optimizer, model).startswith("the optimizer has a scheduler, which would not reach the weights")


def test_an_optimizer_with_hooks_is_refused():
    model = net()
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        getattr(optimizer, register)(lambda *_: None)
        assert refusal(optimizer, model).startswith("the optimizer has hooks on its steps, but must have none")


def test_an_option_that_is_no_argument_of_the_class_is_refused():
    class Fixed(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr=lr)

    model = net()
    optimizer = Fixed(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["momentum"] = 0.9
    assert refusal(optimizer, model) == "momentum of a Fixed is 0.9, but its class has no such argument"

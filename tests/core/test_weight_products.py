"""Weight products: the gradients of layers that are computed apart are those of autograd."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from manyhands.core.flat import Flat
from manyhands.core.weight_products import LARGE, Convolution, Linear, Shape, WeightProducts, layers_apart, weigh

F64 = {"dtype": torch.float64}


class Tied(nn.Module):
    """One weight in two layers, and once more outside of a layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6, **F64)

    def forward(self, x):
        return self.layer(self.layer(x)) + x * self.layer.weight.sum()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(6, 6, **F64), nn.Tanh(), nn.Linear(6, 6, **F64))

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=False)


class Own(nn.Linear):
    """Computes in its own way."""

    def forward(self, x):
        return 2 * super().forward(x)


class Inner(nn.Module):
    """Its output is a gradient that it computes in the forward pass, of the input and of a weight."""

    def __init__(self, create_graph, layer):
        super().__init__()
        self.layer, self.create_graph = layer, create_graph

    def forward(self, x):
        with torch.enable_grad():
            h = x.detach().requires_grad_()
            of = [h, *self.layer.parameters()]
            found = torch.autograd.grad(self.layer(h).pow(3).sum(), of, create_graph=self.create_graph)
        return self.layer(x).flatten(1) * (1 + sum(g.square().mean() for g in found))


def frozen(module, name):
    getattr(module, name).requires_grad_(False)
    return module


MODELS = {
    "linear": lambda: (nn.Linear(6, 4, **F64), (5, 6)),
    "without bias": lambda: (nn.Linear(6, 4, bias=False, **F64), (5, 6)),
    "positions": lambda: (nn.Linear(6, 4, **F64), (5, 3, 6)),
    "frozen bias": lambda: (frozen(nn.Linear(6, 4, **F64), "bias"), (5, 6)),
    "frozen weight": lambda: (frozen(nn.Linear(6, 4, **F64), "weight"), (5, 6)),
    "tied": lambda: (Tied(), (5, 6)),
    "weight norm": lambda: (weight_norm(nn.Linear(6, 4, **F64)), (5, 6)),
    "norm between": lambda: (
        nn.Sequential(nn.Linear(6, 6, **F64), nn.LayerNorm(6, **F64), nn.Linear(6, 2, **F64)),
        (5, 6),
    ),
    "a forward of its own": lambda: (Own(6, 4, **F64), (5, 6)),
    **{
        f"gradients inside, {graph}": partial(lambda graph: (Inner(graph, nn.Linear(6, 4, **F64)), (5, 6)), graph)
        for graph in (False, True)
    },
    **{
        f"convolution, gradients inside, {graph}": partial(
            lambda graph: (Inner(graph, nn.Conv2d(2, 3, 3, **F64)), (5, 2, 6, 6)), graph
        )
        for graph in (False, True)
    },
    "without bias, gradients inside": lambda: (Inner(True, nn.Linear(6, 4, bias=False, **F64)), (5, 6)),
    "checkpoint": lambda: (Checkpointed(), (5, 6)),
    "convolution": lambda: (nn.Conv2d(2, 4, 3, stride=2, padding=1, **F64), (5, 2, 8, 8)),
    "groups": lambda: (nn.Conv2d(4, 4, 3, dilation=2, groups=2, bias=False, **F64), (5, 4, 9, 9)),
    "padding by name": lambda: (nn.Conv2d(2, 4, 3, padding="same", **F64), (5, 2, 8, 8)),
    "padded apart": lambda: (nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular", **F64), (5, 2, 8, 8)),
    "one picture": lambda: (nn.Conv2d(2, 4, 3, **F64), (2, 8, 8)),
}


def gradients(module, x, later, scale=1.0):
    """Two passes in one step: the flat gradients by name, the error of the input, and which parameters were touched."""
    flat = Flat(dict(module.named_parameters()))
    flat.scale = scale
    flat.open(by_hooks=False)
    weights = [flat.parameter(slot) for slot in flat.slots]
    slots = {id(weight): slot for weight, slot in zip(weights, flat.slots, strict=True)}
    for _ in range(2):
        x = x.detach().requires_grad_()
        products = [] if later else None
        layers = WeightProducts(flat, layers_apart(module, splits=products is not None), slots, products)
        with layers:
            out = module(x)
        with layers.propagating():
            *grads, error = torch.autograd.grad(out.square().sum(), [*weights, x], allow_unused=True)
        for slot, g in zip(flat.slots, grads, strict=True):
            if g is not None:
                flat.put(slot, g)
        weigh(products or [])
    flat.close()
    return {slot.name: flat.gradient_of(slot).clone() for slot in flat.slots}, error, flat.untouched()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_are_those_of_autograd(name, later, monkeypatch):
    monkeypatch.setattr("manyhands.core.weight_products.LARGE", 0)
    torch.manual_seed(1)
    module, shape = MODELS[name]()
    x = torch.randn(shape, **F64, requires_grad=True)
    module(x).square().sum().backward()
    expected = {name: 2 * 0.5 * p.grad for name, p in module.named_parameters() if p.requires_grad}
    expected_error = x.grad.clone()
    found, error, untouched = gradients(module, x, later, scale=0.5)
    assert found.keys() == expected.keys() and not untouched
    assert all(torch.allclose(g, expected[name], rtol=1e-12, atol=1e-12) for name, g in found.items())
    assert torch.allclose(error, expected_error, rtol=1e-12, atol=1e-12)


def watched(module):
    """Which of the two functions of ours computed a pass of `module`."""
    flat = Flat(dict(module.named_parameters()))
    slots = {id(flat.parameter(slot)): slot for slot in flat.slots}
    x = torch.randn(3, module.weight.shape[1])
    with WeightProducts(flat, layers_apart(module, splits=False), slots, None):
        return "LinearBackward" in type(module(x).grad_fn).__name__


def test_a_small_weight_is_left_to_autograd():
    assert not watched(nn.Linear(LARGE // 512, 511))
    assert watched(nn.Linear(LARGE // 512, 512))


def test_a_weight_with_a_hook_is_left_to_autograd_and_the_hook_is_called(monkeypatch):
    monkeypatch.setattr("manyhands.core.weight_products.LARGE", 0)
    module = nn.Linear(6, 4, **F64)
    module.weight.register_hook(lambda g: 3 * g)
    x = torch.randn(5, 6, **F64)
    found, *_ = gradients(module, x, later=True)
    plain = nn.Linear(6, 4, **F64)
    plain.load_state_dict(module.state_dict())
    plain(x).square().sum().backward()
    assert torch.allclose(found["weight"], 2 * 3 * plain.weight.grad)
    assert torch.allclose(found["bias"], 2 * plain.bias.grad)


def test_a_layer_that_did_not_run_is_untouched():
    module = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3)})
    flat = Flat(dict(module.named_parameters()))
    slots = {id(flat.parameter(slot)): slot for slot in flat.slots}
    flat.open(by_hooks=False)
    products = []
    layers = WeightProducts(flat, layers_apart(module, splits=True), slots, products)
    with layers:
        out = module["used"](torch.randn(2, 3))
    with layers.propagating():
        torch.autograd.grad(out.sum(), [flat.parameter(slot) for slot in flat.slots], allow_unused=True)
    weigh(products)
    flat.close()
    names = {slot.name for slot in flat.slots if slot.param_id in flat.untouched()}
    assert names == {"unused.weight", "unused.bias"}


@pytest.mark.parametrize("kind", [Linear, Convolution])
def test_no_error_is_computed_for_data(kind, monkeypatch):
    """Nothing is multiplied by the weight if the input needs no gradient."""
    x = torch.randn(2, 3) if kind is Linear else torch.randn(2, 3, 5, 5)
    weight = torch.randn((4, 3) if kind is Linear else (4, 3, 3, 3), requires_grad=True)
    taken = []
    extra = () if kind is Linear else (Shape((1, 1), (0, 0), (1, 1), 1),)
    out = kind.apply(x, weight, None, *extra, lambda delta, x, _: not taken.append((delta, x)))
    reference = functional.linear(x, weight) if kind is Linear else functional.conv2d(x, weight)
    assert torch.equal(out, reference)
    assert torch.autograd.grad(out.sum(), weight, allow_unused=True) == (None,)
    assert len(taken) == 1

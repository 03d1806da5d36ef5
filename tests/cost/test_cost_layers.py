"""The table of layers has the sizes, the work and the parallelism of each of them, and None for what is not known."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.cost.layers import kind_of, model_cost, work_depth
from manyhands.tasks import load


def cost_of(model, x, **settings):
    return model_cost(mh.Task(lambda: model, TensorDataset(x, torch.zeros(len(x))), mse_loss, **settings), 8)


def test_a_chain_of_layers():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5))
    cost = cost_of(model, torch.zeros(3, 3, 8, 8))
    conv, relu, pool, flat, linear = cost.layers
    assert [layer.kind for layer in cost.layers] == [
        "convolution",
        "activation",
        "pooling",
        "Flatten",
        "fully connected",
    ]
    assert [layer.output for layer in cost.layers] == [(4, 6, 6), (4, 6, 6), (4, 3, 3), (36,), (5,)]
    assert [layer.parameters for layer in cost.layers] == [112, 0, 0, 0, 185]
    assert [layer.multiply_adds for layer in cost.layers] == [4 * 27 * 36, 0, 0, 0, 180]
    assert [layer.work.total for layer in cost.layers] == [4 * 4 * 27 * 36, 0, 0, 0, 6 * 180]
    assert cost.multiply_adds == 4 * 27 * 36 + 180
    assert conv.storage == 4 * (2 * 112 + 8 * (3 * 64 + 4 * 36))
    assert linear.storage == 4 * (2 * 185 + 8 * (36 + 5))
    assert cost.storage == sum(layer.storage for layer in cost.layers)
    assert [layer.depth for layer in (conv, relu, pool, linear)] == [2 + 2 + 2, 1, 2, 6]
    assert conv.parallelism == 8 * conv.multiply_adds / 6 and linear.parallelism == 8 * 180 / 6
    assert relu.parallelism == 8 * 4 * 36 and pool.parallelism == 8 * 4 * 9 * 4 / 2
    assert (flat.depth, flat.parallelism) == (None, None)


def test_a_layer_that_is_called_twice_has_both_calls():
    layer = nn.Linear(4, 4)
    one, tanh = cost_of(nn.Sequential(layer, nn.Tanh(), layer), torch.zeros(3, 4)).layers
    assert one.multiply_adds == 2 * 16 and one.storage == 4 * (2 * 20 + 8 * 2 * (4 + 4))
    assert tanh.storage == 4 * 8 * (4 + 4)


def test_positions_of_a_sequence_are_samples_of_a_fully_connected_layer():
    assert work_depth(nn.Linear(6, 5), (8, 10, 5)).work == 8 * 10 * 6 * 5


def test_depths_of_normalisation_depend_on_the_batch():
    cost = cost_of(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.zeros(3, 4))
    norm = cost.layers[1]
    assert (norm.kind, norm.depth, norm.parallelism, norm.multiply_adds) == ("batch norm", 3, 8 * 4 / 3, 0)
    assert norm.work.total == 6 * 8, "estimated from its parameters"


def test_shares_by_kind():
    cost = cost_of(nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 3)), torch.zeros(3, 1, 3, 3))
    conv, linear = 2 * 2 * 4 * 2 * 4, 3 * 2 * 8 * 3
    assert list(cost.kinds) == ["fully connected", "convolution", "Flatten"]
    assert cost.kinds["convolution"] == pytest.approx((10 / 37, conv / (conv + linear)))


def test_what_is_not_counted_is_not_known():
    cost = model_cost(load("rbm"))
    (model,) = cost.layers
    assert (model.kind, model.parameters, model.name) == ("Boltzmann", 64 * 64 + 128, "")
    assert (model.output, model.multiply_adds, model.storage, model.depth) == (None,) * 4
    assert cost.multiply_adds is None and cost.storage is None
    assert "without autograd" in cost.work.why_estimated


def test_the_work_that_a_task_gives_is_divided_by_the_counted_shares():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    cost = cost_of(model, torch.zeros(3, 4), work=136.0)
    assert [layer.work.total for layer in cost.layers] == [64, 72] and cost.work.total == 136
    assert cost.multiply_adds == 32 + 24


def test_a_tied_parameter_is_counted_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert [layer.parameters for layer in cost_of(model, torch.zeros(3, 4)).layers] == [20, 4]


def test_classes_without_a_formula_keep_their_names():
    assert kind_of(nn.GRU(2, 2)) == "GRU" and work_depth(nn.Dropout(), (4, 2)) is None


@pytest.mark.parametrize(
    ("name", "parameters", "multiply_adds", "of_parameters", "of_work"),
    [
        ("vgg16", 138_357_544, 15_470_264_320, 0.10635, 0.99199),
        ("alexnet", 60_965_224, 724_406_816, 0.03829, 0.91495),
        ("googlenet", 6_998_552, 1_582_671_872, 0.85354, 0.99934),
    ],
)
def test_convolutions_have_few_parameters_and_most_of_the_work(name, parameters, multiply_adds, of_parameters, of_work):
    cost = model_cost(load(name))
    assert (cost.parameters, cost.multiply_adds) == (parameters, multiply_adds)
    assert cost.kinds["convolution"] == pytest.approx((of_parameters, of_work), abs=5e-6)

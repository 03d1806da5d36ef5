"""Layers divided by samples or by neurons: the volumes of the literature, and the cheapest of all plans."""

import random
from itertools import pairwise, product

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.cost.layer_split import BETWEEN, END, LayerSize, cheapest, data_wins_from, possible, sent
from manyhands.cost.layers import model_cost
from manyhands.cost.placement import placement
from manyhands.tasks import load


def chain(*widths):
    """Fully connected layers with biases."""
    return [LayerSize((a + 1) * b, a, b) for a, b in pairwise(widths)]


@pytest.mark.parametrize("case", range(100))
def test_no_other_plan_sends_less(case):
    draw = random.Random(case)
    layers = [
        LayerSize(draw.randint(1, 500), draw.randint(1, 60), draw.randint(1, 60), draw.random() < 0.8)
        for _ in range(draw.randint(1, 6))
    ]
    samples, ranks = draw.randint(1, 60), draw.randint(2, 4)
    every = {ways: sent(layers, ways, samples, ranks) for ways in product(*map(possible, layers))}
    found = cheapest(layers, samples, ranks)
    assert found.sent == min(every.values()) and every[found.ways] == found.sent
    assert found.joins == tuple(BETWEEN[pair][0] for pair in zip(found.ways, (*found.ways[1:], END), strict=True))


def test_a_layer_by_layer_split_sends_each_width_once_in_each_direction():
    """DistBelief: T N (P - 1) / P per rank and pass; the last layer's error is not sent."""
    layers, T, P = chain(6, 5, 4, 3), 10, 4
    assert sent(layers, ("out",) * 3, T, P) == T * (5 + 5 + 4 + 4 + 3) * 3 / 4


def test_pairs_send_about_half_of_what_gathering_sends():
    """Two ranks, 5 samples of 8 bytes a number, all bytes of both ranks together."""
    layers = [LayerSize(*(8 * x for x in one[:3])) for one in chain(7, 24, 8, 8)]
    assert 2 * sent(layers, ("out", "out", "out"), 5, 2) == 2880
    assert 2 * sent(layers, ("out", "in", "out"), 5, 2) == 1600


def test_a_pair_of_a_transformer_sends_two_widths_in_each_direction():
    """Hidden width 4 d: gathering sends 4 d + d in each pass, the pair 2 d."""
    d, P = 6, 2
    layers = chain(d, 4 * d, d) * 2
    gathered, paired = (sent(layers, ways, 1, P) * P / (P - 1) for ways in (("out",) * 4, ("out", "in") * 2))
    assert gathered == 5 * d + 5 * d + (5 * d + 4 * d) and paired == 2 * d + 2 * d + 2 * d
    assert cheapest(layers, 1, P).ways == ("out", "in") * 2


def test_one_weird_trick_of_alexnet():
    """K = 8 workers with b = 128: K b F activations instead of two times the weights of the fully connected layers."""
    cost = model_cost(load("alexnet"))
    K, b = 8, 128
    fc6, fc7, fc8 = [layer for layer in cost.layers if layer.kind == "fully connected"]
    F = fc6.input_bytes // 4
    assert (F, K * b * F) == (9216, 9_437_184)
    assert fc6.parameters + fc7.parameters + fc8.parameters == 58_631_144
    found = placement(model_cost(load("alexnet"), b), K)
    by_name = {layer.name: layer for layer in found.layers}
    assert by_name[fc6.name].examples == 2 * 4 * 9_437_184 * 7 / 8, "there, and their errors back"
    assert sum(by_name[one.name].data for one in (fc6, fc7, fc8)) == 2 * 4 * 58_631_144 * 7 / 8
    assert [layer.way for layer in found.layers] == ["data"] * 5 + ["out", "out", "in"]
    assert found.layers[4].join == "examples gathered" and found.cheapest < 0.3 * found.data


def test_convolutions_are_divided_by_samples_and_fully_connected_layers_by_neurons_in_vgg16():
    found = placement(model_cost(load("vgg16")), 4)
    ways = [(layer.kind, layer.way == "data") for layer in found.layers]
    assert ways == [("convolution", True)] * 13 + [("fully connected", False)] * 3


def test_the_batch_size_decides():
    layer, P = LayerSize(7 * 4, 6, 4), 2
    bound = data_wins_from(layer, P)
    assert bound == 4, "28 weights over 4 outputs of 2 ranks"
    assert 2 * layer.weights <= bound * P * 2 * layer.outputs
    assert 2 * layer.weights > (bound - 1) * P * 2 * layer.outputs
    layers = chain(6, 4, 6, 4)
    small, large = (cheapest(layers, P * b, P).ways for b in (1, 1000))
    assert "data" not in small and set(large) == {"data"}
    assert data_wins_from(LayerSize(9, 1, 1, splits=False), P) is None


def test_other_layers_are_all_reduced_in_every_plan():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    task = mh.Task(lambda: model, TensorDataset(torch.zeros(3, 4), torch.zeros(3)), mse_loss)
    found = placement(model_cost(task, 1), 2)
    first, norm, _ = found.layers
    assert (norm.gathered, norm.summed, norm.examples, norm.data_wins_from, norm.way) == (None,) * 4 + ("data",)
    assert norm.data == 4 * 2 * 12 / 2 and found.data == sum(layer.data for layer in found.layers)
    assert (first.way, first.join) == ("out", "kept apart")
    assert found.cheapest == norm.data + 2 * 3 * 4 * 2 / 2, "the sums of three outputs of two samples"


def test_stages_only_of_a_chain():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 2), nn.Tanh()), nn.Linear(2, 4), nn.Linear(4, 4))
    task = mh.Task(lambda: model, TensorDataset(torch.zeros(3, 4), torch.zeros(3, 4)), mse_loss)
    stages = placement(model_cost(task), 2).stages
    assert stages.first == ("2",) and stages.bytes == 4 * 4
    assert placement(model_cost(task), 4).stages is None, "three layers"
    assert placement(model_cost(load("googlenet")), 2).stages is None


def test_one_worker_is_refused():
    with pytest.raises(mh.Refused, match="workers is 1, but must be >= 2"):
        placement(model_cost(load("alexnet")), 1)


def bytes_of_a_step(strategy, widths, samples, workers):
    """Of all ranks in virtual time: of a run, beyond those of one that is a step shorter."""

    def model():
        return nn.Sequential(*[part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.Tanh())][:-1])

    data = TensorDataset(torch.randn(100, widths[0]), torch.randn(100, widths[-1]))
    task = mh.Task(model, data, mse_loss, batch_size=samples)
    runs = [mh.train(task, strategy, cluster=mh.Cluster(workers=workers), steps=steps).bytes_sent for steps in (2, 3)]
    return runs[1] - runs[0]


@pytest.mark.parametrize("workers", [2, 4])
def test_the_formulas_are_what_slices_send(workers):
    widths, samples = (8, 24, 16, 8, 8), 20
    layers = [LayerSize(*(4 * x for x in one[:3])) for one in chain(*widths)]
    gathered, paired = (workers * sent(layers, ways, samples, workers) for ways in (("out",) * 4, ("out", "in") * 2))
    assert bytes_of_a_step(mh.neuron_split(), widths, samples, workers) == gathered
    row_biases = 4 * (16 + 8) * (workers - 1)
    assert bytes_of_a_step(mh.tensor_parallel(), widths, samples, workers) == paired + row_biases

"""The formulas for work and depth agree with counting, and with numbers computed by hand."""

from math import prod

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d

from manyhands.core.work_counter import SAMPLES, count_work
from manyhands.cost.compute import (
    ImageShape,
    WorkDepth,
    activation,
    batch_norm,
    convolution,
    fft_convolution,
    fully_connected,
    im2col,
    layer_storage,
    lg,
    pooling,
    winograd_convolution,
    winograd_products,
)


@pytest.mark.parametrize(("n", "depth"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (1024, 10), (1025, 11)])
def test_a_sum_has_the_depth_of_a_tree(n, depth):
    assert lg(n) == depth


def test_average_parallelism():
    assert WorkDepth(39, 7).parallelism == pytest.approx(5.57, abs=0.005), "the example of the reference"
    assert WorkDepth(5, 0).parallelism == 5


def test_a_fully_connected_layer_agrees_with_counting():
    samples, inputs, outputs = 6, 20, 12
    passes = fully_connected(samples, inputs, outputs)
    work = count_work(nn.Sequential(nn.Linear(1, inputs), nn.Linear(inputs, outputs)), [torch.zeros(SAMPLES, 1)])["1"]
    counted = [samples * one / 2 for one in (work.forward, work.to_weights, work.to_input)]
    assert [one.work for one in passes] == counted == [6 * 20 * 12] * 3
    assert [one.depth for one in passes] == [5, 3, 4]


@pytest.mark.parametrize(("groups", "stride", "kernel"), [(1, 1, (3, 3)), (2, 2, (5, 3)), (4, 1, (1, 2))])
def test_a_direct_convolution_agrees_with_counting(groups, stride, kernel):
    layer = nn.Conv2d(4, 8, kernel, stride, groups=groups)
    output = layer(torch.zeros(SAMPLES, 4, 11, 13)).shape
    counted = count_work(layer, [torch.zeros(SAMPLES, 4, 11, 13)])[""].forward
    found = convolution(4, output, kernel, groups)
    assert found.work == SAMPLES * counted / 2
    assert found.depth == lg(4 // groups) + lg(kernel[0]) + lg(kernel[1])
    assert im2col(4, output, kernel, groups) == found


def test_the_first_layer_of_vgg():
    assert convolution(3, (1, 64, 224, 224), (3, 3)) == (86_704_128, 2 + 2 + 2)


def test_a_convolution_by_fourier_transforms():
    image = ImageShape(2, 3, 8, 8)
    assert fft_convolution(image, 5) == (64 * 6 * (15 + 6 + 10) + 64 * 2 * 3 * 5, 2 * 6 + 2)
    assert fft_convolution(image, 5, per_point=2.5).work == 2.5 * 64 * 6 * 31 + 1920


def test_winograds_tiles_have_the_size_of_their_inputs():
    """F(2 x 2, 3 x 3) has tiles of 4 x 4: alpha = m + r - 1."""
    image = ImageShape(1, 3, 8, 7)
    found = winograd_convolution(image, 5, tile=2, kernel=3)
    tiles = 4 * 4
    assert found.work == 4 * (9 + 12 + 32 + 8 + 4) + 5 * 3 * tiles
    assert found.depth == 2 * 2 + 4 * 2 + 2


def test_winograd_needs_fewer_multiplications_by_the_known_factor():
    direct = convolution(3, (1, 5, 8, 8), (3, 3)).work
    assert direct / winograd_products(ImageShape(1, 3, 8, 8), 5, tile=2, kernel=3) == 36 / 16
    assert direct / winograd_products(ImageShape(1, 3, 8, 8), 5, tile=4, kernel=3) == 4


def test_minimal_filtering_with_these_sizes_is_a_convolution():
    """F(2, 3) by hand: four products instead of six."""
    d, g = torch.tensor([3.0, -1.0, 4.0, 2.0]), torch.tensor([2.0, 5.0, -3.0])
    m1, m4 = (d[0] - d[2]) * g[0], (d[1] - d[3]) * g[2]
    m2, m3 = (d[1] + d[2]) * (g[0] + g[1] + g[2]) / 2, (d[2] - d[1]) * (g[0] - g[1] + g[2]) / 2
    expected = conv2d(d.view(1, 1, 1, 4), g.view(1, 1, 1, 3)).flatten()
    assert torch.equal(torch.stack([m1 + m2 + m3, m2 - m3 - m4]), expected)


def test_layers_without_products():
    shape = (32, 64, 112, 112)
    assert pooling(shape, (2, 2)) == (4 * prod(shape), 2)
    assert pooling(shape, (3, 3)).depth == 4
    assert activation(prod(shape)) == (prod(shape), 1)
    assert batch_norm(32, prod(shape)) == (prod(shape), 5)


def test_storage_is_weights_outputs_and_two_gradients():
    assert layer_storage(weights=10, inputs=4, outputs=7) == 10 + 7 + 10 + 4

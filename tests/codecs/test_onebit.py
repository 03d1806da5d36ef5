"""One bit: the pinned example, the error of the two means, and which numbers share them."""

import pytest
import torch
from round_trip import through

from manyhands.codecs import Feedback, OneBit
from manyhands.core.errors import BadPayload

G = [[1, -2], [3, 0], [-4, 5], [0, -1]]


pytestmark = pytest.mark.usefixtures("with_or_without_kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_example_of_the_docstring(dtype):
    g = torch.tensor(G, dtype=dtype)
    bits, means = OneBit().encode(g, None)
    assert bits.tolist() == [0b01101101], "the first bit is the lowest"
    assert means.dtype == dtype
    assert means.tolist() == [-4, -1.5, pytest.approx(4 / 3), 2.5], "those of bit 0, then those of bit 1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_two_steps_with_feedback(dtype):
    g, codec = torch.tensor(G, dtype=dtype), Feedback(OneBit())
    e = codec.memory(g)
    first = through(codec, g, e)
    expected = torch.tensor([[4 / 3, -1.5], [4 / 3, 2.5], [-4, 2.5], [4 / 3, -1.5]], dtype=dtype)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(e, torch.tensor([[-1 / 3, -0.5], [5 / 3, -2.5], [0, 2.5], [-4 / 3, 0.5]], dtype=dtype))
    torch.testing.assert_close(e.sum(0), torch.zeros(2, dtype=dtype), rtol=0, atol=1e-6)
    second = through(codec, g, e)
    expected = [[8 / 3, -11 / 6], [8 / 3, -11 / 6], [-8 / 3, 7.5], [-8 / 3, -11 / 6]]
    torch.testing.assert_close(second, torch.tensor(expected, dtype=dtype))


def test_what_is_lost_is_nothing_on_the_average_of_each_column_and_sign():
    x = torch.randn(50, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lost = x - through(OneBit(), x)
    for sign in x >= 0, x < 0:
        assert (lost * sign).sum(0).abs().max() < 1e-12


def test_two_values_per_column_are_exact():
    x = torch.tensor([[2.0, -1.0], [-3.0, 0.5], [2.0, 0.5]])
    assert torch.equal(through(OneBit(), x), x)


def test_an_empty_mean_is_0():
    _, means = OneBit().encode(torch.tensor([[1.0, -1.0], [2.0, -2.0]]), None)
    assert means.tolist() == [0, -1.5, 1.5, 0]


@pytest.mark.parametrize(
    ("shape", "block", "groups"),
    [
        ((4096,), 0, 1),
        ((4097,), 0, 2),
        ((1000,), 100, 10),
        ((1001,), 100, 11),
        ((10, 100), 0, 100),
        ((10, 100), 100, 10),
        ((10, 5, 20), 0, 100),
        ((1000, 1), 0, 1),
        ((1000, 1), 10, 100),
        ((0,), 0, 0),
        ((0, 3), 0, 0),
        ((1, 3), 0, 3),
    ],
)
def test_which_numbers_share_two_means(shape, block, groups):
    x, codec = torch.ones(shape), OneBit(block)
    bits, means = codec.encode(x, None)
    assert (bits.numel(), means.numel()) == (-(-x.numel() // 8), 2 * groups)
    assert torch.equal(through(codec, x), x)


def test_a_matrix_of_four_dimensions_has_the_columns_of_its_flat_one():
    x = torch.randn(6, 3, 2, 2)
    assert torch.equal(through(OneBit(), x).view(6, 12), through(OneBit(), x.view(6, 12)))


def test_a_mean_on_the_wrong_side_is_refused():
    bits, means = OneBit().encode(torch.tensor(G, dtype=torch.float32), None)
    for wrong in means.flip(0), -means:
        with pytest.raises(BadPayload, match="negative"):
            OneBit().decode((bits, wrong), torch.empty(4, 2))


def test_bits_beyond_the_last_number_are_refused():
    with pytest.raises(BadPayload, match="the last byte is 12, but its last 5 codes must be 0"):
        OneBit().decode((torch.tensor([12], dtype=torch.uint8), torch.tensor([0.0, 1.0])), torch.empty(3))

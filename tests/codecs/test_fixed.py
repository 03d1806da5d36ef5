"""Fixed point: the pinned example for any random number, and its ends."""

import numpy as np
import pytest
import torch
from round_trip import through

from manyhands.codecs import Fixed, noise
from manyhands.core.errors import BadPayload


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("u", "rounded"),
    [(0.1, [0.5, -0.25, 1.75, -2]), (0.5, [0.25, -0.25, 1.75, -2]), (0.9, [0.25, -0.5, 1.75, -2])],
)
def test_the_pinned_example(monkeypatch, dtype, u, rounded):
    monkeypatch.setattr(noise, "uniform", lambda seeds, first, count: np.full(count, u * 2**24, np.float32))
    assert through(Fixed(2, 2), torch.tensor([0.3, -0.3, 5, -9], dtype=dtype)).tolist() == rounded


def test_the_mean_is_right():
    torch.manual_seed(0)
    x = torch.tensor([0.3, -0.3]).repeat(20_000)
    mean = through(Fixed(2, 2), x).view(-1, 2).mean(0)
    torch.testing.assert_close(mean, torch.tensor([0.3, -0.3]), rtol=0, atol=0.005)


@pytest.mark.parametrize(
    ("codec", "dtype"), [(Fixed(), torch.int16), (Fixed(4, 4), torch.int8), (Fixed(4, 5), torch.int16)]
)
def test_multiples_of_a_step_stay(codec, dtype):
    step, most = 2.0**-codec.fraction, 2 ** (codec.integer + codec.fraction - 1) - 1
    x = torch.tensor([-most - 1, -most, -1, 0, 1, most]) * step
    assert codec.encode(x, None)[0].dtype == dtype
    assert torch.equal(through(codec, x), x)


def test_numbers_out_of_range_are_clamped():
    x = torch.tensor([1e30, -1e30, 2.0, 1.99999])
    assert through(Fixed(), x).tolist() == [2 - 2**-14, -2, 2 - 2**-14, 2 - 2**-14]


def test_a_number_out_of_range_is_refused():
    for whole in (8,), (-9,):
        with pytest.raises(BadPayload, match=f"{whole[0]} to {whole[0]}, but must be >= -8 and <= 7"):
            Fixed(2, 2).decode((torch.tensor(whole, dtype=torch.int8),), torch.empty(1))

"""TernGrad: the pinned example, how its codes lie in bytes, clipping, and a scale that workers share."""

import math

import pytest
import torch
from round_trip import through

from manyhands.codecs import Qsgd, TernGrad
from manyhands.core.errors import BadPayload

G = [0.1, -0.4, 0.2, 0.0, 0.3]


pytestmark = pytest.mark.usefixtures("with_or_without_kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_four_neighbours_share_a_byte(dtype):
    x = torch.tensor([1, -1, 0, 1, -1], dtype=dtype)
    codes, scale = TernGrad(clip=0).encode(x, None)
    assert codes.tolist() == [146, 84]
    assert (scale.dtype, scale.tolist()) == (dtype, [1.0])
    assert torch.equal(through(TernGrad(clip=0), x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_mean_is_right(dtype):
    torch.manual_seed(0)
    g, codec = torch.tensor(G, dtype=dtype), TernGrad()
    sent = through(codec, g.repeat(4000)).view(-1, 5)
    assert set(sent.flatten().unique().tolist()) == {-g[1].abs().item(), 0.0, g[1].abs().item()}
    chance = sent.ne(0).double().mean(0)
    torch.testing.assert_close(chance, torch.tensor([0.25, 1, 0.5, 0, 0.75]).double(), rtol=0, atol=0.04)
    assert (chance[1], chance[3]) == (1, 0)
    torch.testing.assert_close(sent.mean(0), g, rtol=0, atol=0.016)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_clips_before_it_scales(dtype):
    g = torch.tensor(G, dtype=dtype)
    sigma = 0.24166091947189142
    assert TernGrad(clip=2.5).scale(g, None).item() == pytest.approx(0.4), "2.5 σ = 0.604152 is more than any"
    assert TernGrad(clip=1.0).scale(g, None).item() == pytest.approx(sigma)
    for none in 0, math.inf:
        assert TernGrad(clip=none).scale(g, None).item() == pytest.approx(0.4)
    sent = through(TernGrad(clip=1.0), g)
    assert sent[1].item() == pytest.approx(-sigma), "whatever is clipped is always sent"


@pytest.mark.parametrize("x", [[5.0], [5.0] * 9, [-0.3] * 5000], ids=["one", "nine", "many"])
def test_numbers_that_are_all_alike_are_not_clipped_away(x):
    x = torch.tensor(x)
    assert torch.equal(through(TernGrad(), x), x)


@pytest.mark.parametrize("numel", [0, 1, 9])
def test_nothing_stays_nothing(numel):
    x = torch.zeros(numel)
    codes, scale = TernGrad().encode(x, None)
    assert scale.tolist() == [0]
    assert torch.equal(through(TernGrad(), x), x)
    assert all(code == 0b01010101 for code in codes.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_whose_squares_are_none_are_not_clipped(dtype):
    x = torch.full((100,), torch.finfo(dtype).max ** 0.75, dtype=dtype)
    x[::3] = 0
    assert torch.equal(TernGrad().scale(x, None), x.max().view(1))
    assert torch.equal(through(TernGrad(), x), x)


def test_two_values_are_exact():
    x = torch.tensor([0.7, -0.7] * 50_000)
    assert torch.equal(through(TernGrad(clip=0), x), x), "a chance of 1 is one"


def test_workers_can_share_a_scale():
    torch.manual_seed(0)
    codec, gradients = TernGrad(clip=2.5), [torch.randn(4001) * spread for spread in (1, 3)]
    scale = torch.stack([codec.scale(g, None) for g in gradients]).max()
    s = float(scale)
    total = torch.zeros(4001)
    for g in gradients:
        payload = codec.encode_at(g, None, scale)
        assert payload[1].tolist() == [s]
        out = torch.empty(4001)
        codec.decode(payload, out)
        assert set(out.unique().tolist()) == {-s, 0, s}
        clipped = g.clamp(-codec.scale(g, None), codec.scale(g, None))
        assert abs((out - clipped).mean()) < 5 * math.sqrt(s**2 / 4001), "each is clipped at its own level"
        total += out
    assert len(total.unique()) == 5, "2 P + 1 levels"


def test_its_own_scale_changes_nothing():
    for codec in TernGrad(), TernGrad(clip=0):
        x = torch.randn(1001)
        torch.manual_seed(1)
        alone = codec.encode(x, None)
        torch.manual_seed(1)
        assert all(map(torch.equal, alone, codec.encode_at(x, None, codec.scale(x, None))))


def test_without_clipping_it_is_qsgd_with_one_level():
    x = torch.randn(1001)
    torch.manual_seed(3)
    ternary = TernGrad(clip=0).encode(x, None)
    torch.manual_seed(3)
    assert all(map(torch.equal, ternary, Qsgd(levels=1, bucket=1001, norm="max").encode(x, None)))


def test_a_code_out_of_range_is_refused():
    for codes, message in (
        ([3, 84], "a code is 3, but must be 0, 1 or 2"),
        ([146, 4], "the last byte is 4, but its last 3 codes must be 1"),
    ):
        with pytest.raises(BadPayload, match=message):
            TernGrad().decode((torch.tensor(codes, dtype=torch.uint8), torch.ones(1)), torch.empty(5))

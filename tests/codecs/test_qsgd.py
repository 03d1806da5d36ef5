"""QSGD: levels and chances of the pinned example, norms of buckets, and the smaller code of the paper."""

import math

import numpy as np
import pytest
import torch
from round_trip import through

from manyhands.codecs import Elias, Qsgd, elias
from manyhands.codecs.streams import to_bytes, windows
from manyhands.core.errors import BadPayload

V = [3.0, -4.0, 0.0, 0.0]


pytestmark = pytest.mark.usefixtures("with_or_without_kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("levels", "low", "chances", "variance", "bound"),
    [(4, [2, 3, 0, 0], [0.4, 0.2, 0, 0], 0.625, 6.25), (1, [0, 0, 0, 0], [0.6, 0.8, 0, 0], 10, 50)],
)
def test_the_pinned_example(dtype, levels, low, chances, variance, bound):
    v = torch.tensor(V, dtype=dtype)
    torch.manual_seed(levels)
    sent = through(Qsgd(levels, bucket=4), v.repeat(4000)).view(-1, 4).double()
    up = (sent.abs() * levels / 5).round() - torch.tensor(low)
    assert set(up.flatten().unique().tolist()) <= {0.0, 1.0}
    torch.testing.assert_close(up.mean(0), torch.tensor(chances).double(), rtol=0, atol=0.05)
    assert sent.sub(v).square().sum(1).mean().item() == pytest.approx(variance, rel=0.1)
    assert variance <= bound == min(4 / levels**2, 2 / levels) * 25


@pytest.mark.parametrize(("levels", "bits", "nbytes"), [(1, 2, 2), (2, 4, 3), (7, 4, 3), (8, 8, 5), (127, 8, 5)])
def test_as_many_bits_as_the_levels_need(levels, bits, nbytes):
    codec = Qsgd(levels, bucket=2)
    codes, norms = codec.encode(torch.randn(5), None)
    assert (codes.numel(), norms.numel()) == (nbytes, 3)
    assert codec.nbytes(torch.empty(8)) == bits + 4 * 4


def test_numbers_on_a_level_stay_there():
    x = torch.tensor([4.0, -3.0, 0.0, 1.0, -2.0])
    codec = Qsgd(levels=4, norm="max")
    assert all(torch.equal(through(codec, x), x) for _ in range(20))
    codes, norms = codec.encode(x, None)
    assert (codes.tolist(), norms.tolist()) == ([8 | 1 << 4, 4 | 5 << 4, 2 | 4 << 4], [4.0])


def test_each_bucket_has_its_own_norm():
    x = torch.tensor([3.0, 4.0, 0.0, 0.0, -6.0, 8.0, 5.0])
    assert Qsgd(bucket=2).encode(x, None)[1].tolist() == [5, 0, 10, 5]
    assert Qsgd(bucket=2, norm="max").encode(x, None)[1].tolist() == [4, 0, 8, 5]
    assert Qsgd(bucket=100).encode(x, None)[1].tolist() == [pytest.approx(math.sqrt(150))]


def test_with_many_levels_it_is_nearly_exact():
    x = torch.randn(1000)
    assert (through(Qsgd(127, bucket=8, norm="max"), x) - x).abs().max() <= x.abs().max() / 127


@pytest.mark.parametrize("numel", [100, 512, 700])
def test_the_bounds_of_the_paper(numel):
    torch.manual_seed(0)
    x = torch.randn(numel)
    for s in 1, 7, 127:
        sent = torch.stack([through(Qsgd(s, bucket=numel), x) for _ in range(50)])
        d = numel
        assert (sent - x).square().sum(1).mean() <= min(d / s**2, math.sqrt(d) / s) * x.square().sum()
        assert sent.ne(0).sum(1).double().mean() <= s * (s + math.sqrt(d))


def test_a_code_beyond_the_levels_is_refused():
    with pytest.raises(BadPayload, match="a code is larger than 14"):
        Qsgd(7).decode((torch.tensor([0x7F], dtype=torch.uint8), torch.ones(1)), torch.empty(2))
    with pytest.raises(BadPayload, match="the last byte is 23, but its last 1 codes must be 7"):
        Qsgd(7).decode((torch.tensor([0x17], dtype=torch.uint8), torch.ones(1)), torch.empty(1))


# -- Elias ---------------------------------------------------------------------------------------------

OMEGA = {
    1: "0",
    2: "100",
    3: "110",
    4: "101000",
    7: "101110",
    8: "1110000",
    16: "10100100000",
    100: "1011011001000",
}


def text(bits):
    return "".join(map(str, bits))


@pytest.mark.parametrize("n", OMEGA)
def test_code_words(n):
    (code,), (length,) = elias.omega(np.array([n]))
    assert format(code, f"0{length}b") == OMEGA[n]
    bits = np.array([*map(int, OMEGA[n]), 1, 1], np.uint8)
    value, size = elias.omegas(bits)
    assert (value[0], size[0]) == (n, len(OMEGA[n]))


def test_code_words_are_read_as_they_were_written():
    numbers = np.arange(1, 3000)
    codes, lengths = elias.omega(numbers)
    bits = elias.written(codes, lengths)
    value, size = elias.omegas(bits)
    slots = np.cumsum(lengths) - lengths
    assert (value[slots] == numbers).all()
    assert (size[slots] == lengths).all()


def test_the_pinned_stream():
    bits = elias.coded(np.array([2, -3, 0, 1]))
    assert text(bits) == "001000111010000"
    where, levels = elias.decoded(np.append(bits, 0).astype(np.uint8), 3)
    assert (where.tolist(), levels.tolist()) == ([0, 1, 3], [2, -3, 1])


def test_windows_by_hand():
    bits = np.array([1, 0, 1, 1], np.uint8)
    assert (windows(bits) >> 28).tolist() == [0b1011, 0b0110, 0b1100, 0b1000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("levels", "bucket"), [(1, 512), (7, 512), (127, 64)])
@pytest.mark.parametrize("numel", [0, 1, 9, 5000])
def test_elias_sends_the_same_levels(dtype, levels, bucket, numel):
    x, codec = torch.randn(numel, dtype=dtype), Qsgd(levels, bucket)
    torch.manual_seed(2)
    plain = through(codec, x)
    torch.manual_seed(2)
    assert torch.equal(through(Elias(codec), x), plain)


def test_elias_is_smaller_where_most_is_0():
    x = torch.randn(100_000)
    nbytes = sum(part.nbytes for part in Elias(Qsgd(1, 512)).encode(x, None))
    assert nbytes < Qsgd(1, 512).nbytes(x) / 1.5
    assert nbytes == pytest.approx(Elias(Qsgd(1, 512)).nbytes(x), rel=0.4)


def test_a_long_stream_is_read_piece_by_piece(monkeypatch):
    x = torch.randn(3000)
    payload = Elias().encode(x, None)
    expected, out = torch.empty(3000), torch.empty(3000)
    Elias().decode(payload, expected)
    monkeypatch.setattr(elias, "READ_BITS", 50)
    Elias().decode(payload, out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("count", "stream", "message"),
    [
        (3, "001000111010000", None),
        (2, "001000111010000", "its numbers end at bit 10"),
        (4, "001000111010000", "ends before the last"),
        (5, "001000111010000", "nonzero levels is 5, but must be >= 0 and <= 4"),
        (-1, "001000111010000", "nonzero levels is -1, but must be >= 0 and <= 4"),
        (3, "00100011101000000", "its numbers end at bit 15"),
        (3, "0010001110100001", "its numbers end at bit 15"),
        (1, "10101000", "the last index 4, but must be <= 7, < 4"),
        (1, "001110000", "the highest level is 8"),
        (1, "1" * 64, "ends before the last"),
        (1, "11" + "1111" + "1" + "0" * 15 + "1" + "0" * 600, "holds a code that is too long"),
    ],
)
def test_a_broken_stream_is_refused(count, stream, message):
    bits = to_bytes(np.array([*map(int, stream)], np.uint8))
    payload, out = (torch.tensor([count], dtype=torch.int32), bits, torch.full((1,), 7.0)), torch.full((4,), 9.0)
    if message is None:
        Elias().decode(payload, out)
        torch.testing.assert_close(out, torch.tensor([2.0, -3.0, 0.0, 1.0]))
        return
    with pytest.raises(BadPayload, match=message):
        Elias().decode(payload, out)
    assert (out == 9).all()

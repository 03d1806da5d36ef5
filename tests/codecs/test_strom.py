"""Strom's threshold, by the pinned example, and the code of its gaps."""

import numpy as np
import pytest
import torch
from round_trip import through

from manyhands.codecs import Rice, Strom, rice
from manyhands.codecs.streams import to_bytes
from manyhands.core.errors import BadPayload, Refused

STEPS = [([0.3, -0.7, 0.1, 1.2], [3, 6], [0, -0.5, 0, 0.5]), ([0.3, -0.1, 0.1, 0.1], [0, 6], [0.5, 0, 0, 0.5])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_pinned_example(dtype):
    codec, r = Strom(0.5), torch.zeros(4, dtype=dtype)
    for g, words, update in STEPS:
        payload = codec.encode(torch.tensor(g, dtype=dtype), r)
        assert (payload[0].dtype, payload[0].tolist()) == (torch.int32, words)
        out = torch.empty_like(r)
        codec.decode(payload, out)
        assert out.tolist() == update
    assert r.tolist() == pytest.approx([0.1, -0.3, 0.2, 0.3])


def test_only_what_is_more_than_the_threshold_is_sent_and_once_per_step():
    codec, r = Strom(0.5), torch.zeros(3)
    assert codec.encode(torch.tensor([0.5, -0.5, 0.0]), r)[0].numel() == 0
    assert codec.encode(torch.tensor([1.5, 0.0, 0.0]), r)[0].tolist() == [0]
    assert r.tolist() == [1.5, -0.5, 0.0]


def test_a_word_has_no_room_for_a_longer_vector():
    with pytest.raises(Refused, match=r"the length of a vector is 1073741824, but must be < 2\*\*30"):
        Strom(1).encode(torch.empty(2**30, device="meta"), torch.empty(2**30, device="meta"))


@pytest.mark.parametrize(
    ("words", "message"),
    [([-2], "a word is -2, but must be >= 0"), ([8], "indices are 4 to 4"), ([4, 2], "indices"), ([2, 3], "indices")],
)
def test_broken_words_are_refused(words, message):
    with pytest.raises(BadPayload, match=message):
        Strom(1).decode((torch.tensor(words, dtype=torch.int32),), torch.empty(4))


# -- Rice ----------------------------------------------------------------------------------------------


def text(gaps, k):
    bits = rice.coded(np.array(gaps), np.zeros(len(gaps), np.int64), k)
    return "".join(map(str, bits))


def test_the_pinned_bits():
    words = [text([gap], 3)[:-1] for gap in (3, 6, 0, 28)]
    assert words == ["0011", "0110", "0000", "1110100"]
    assert len(text([3, 6, 0, 28], 3)) == 19 + 4, "and a bit for each sign"


@pytest.mark.parametrize(("p", "best", "k"), [(0.001, 693, 9), (0.01, 69, 6), (0.1, 7, 3), (0.5, 1, 0)])
def test_the_divisor_follows_from_the_density(p, best, k):
    assert rice.divisor(p) == best
    assert rice.parameter(round(p * 10**6), 10**6) == k


@pytest.mark.parametrize(("count", "numel"), [(0, 0), (0, 9), (9, 9)])
def test_there_is_a_parameter_for_none_and_for_all(count, numel):
    assert rice.parameter(count, numel) == 0


@pytest.mark.parametrize("k", [0, 1, 3, 9])
def test_gaps_are_read_as_they_were_written(k):
    generator = np.random.default_rng(k)
    gaps, negative = generator.integers(0, 3000, 500), generator.integers(0, 2, 500)
    bits = rice.coded(gaps, negative, k)
    padded = np.concatenate([bits, np.zeros(-len(bits) % 8, np.uint8)])
    found, signs = rice.decoded(padded, 500, k)
    assert (found == gaps).all()
    assert (signs == negative).all()


@pytest.mark.parametrize("threshold", [0.01, 1.0, 3.0, 9.0])
def test_rice_sends_the_same_words(threshold):
    x = torch.randn(5000)
    a, b = torch.zeros(5000), torch.zeros(5000)
    for _ in range(3):
        assert torch.equal(through(Strom(threshold), x, a), through(Rice(Strom(threshold)), x, b))
    assert torch.equal(a, b)


def test_rice_is_smaller():
    x = torch.randn(100_000)
    words = Strom(2.5).encode(x, torch.zeros_like(x))[0]
    nbytes = sum(part.nbytes for part in Rice(Strom(2.5)).encode(x, torch.zeros_like(x)))
    p = len(words) / len(x)
    assert nbytes < words.nbytes / 2.5
    entropy = -np.log2(p) - (1 - p) / p * np.log2(1 - p) + 1
    assert nbytes == pytest.approx(entropy * len(words) / 8, rel=0.06)
    assert nbytes == pytest.approx(Rice(Strom(2.5)).nbytes(x), rel=0.5)


def test_no_vector_needs_more_than_two_bits_a_number():
    for numel in range(1, 300):
        for count in range(1, numel + 1):
            k = rice.parameter(count, numel)
            bits = (numel - count >> k) + count * (k + 2)
            assert bits <= 2 * numel, (numel, count)


@pytest.mark.parametrize(
    ("count", "bits", "message"),
    [
        (2, "00" + "101", None),
        (4, "00" + "101", "ends before the last"),
        (1, "00" + "101", "its numbers end at bit 3"),
        (9, "00" + "101", "the count is 9, but must be >= 0 and <= 4"),
        (-1, "00" + "101", "the count is -1, but must be"),
        (2, "00" + "11110" + "1", "an index is 5, but must be < 4"),
        (2, "11111111", "ends before the last"),
        (2, "00" + "101" + "0" * 8, "its numbers end at bit 5"),
        (2, "00" + "101" + "001", "its numbers end at bit 5"),
    ],
)
def test_a_broken_stream_is_refused(count, bits, message):
    """Two of four numbers: k = 0."""
    payload = torch.tensor([count], dtype=torch.int32), to_bytes(np.array([*map(int, bits)], np.uint8))
    out = torch.full((4,), 9.0)
    if message is None:
        Rice(Strom(0.5)).decode(payload, out)
        assert out.tolist() == [0.5, 0, -0.5, 0]
        return
    with pytest.raises(BadPayload, match=message):
        Rice(Strom(0.5)).decode(payload, out)
    assert (out == 9).all()

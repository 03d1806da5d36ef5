"""The kernels and their fallbacks give the same bits, for all lengths."""

import math

import numpy as np
import pytest
import torch

from manyhands.codecs import fallback, noise, vector_kernels

INF, NAN = math.inf, math.nan
SEEDS = (3_000_000_007, 12_345)


@pytest.fixture
def kernels():
    if not vector_kernels.loaded():
        pytest.skip("the kernels are not compiled here")


def same(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.view(-1).clone().view(torch.uint8), b.view(-1).clone().view(torch.uint8))


def many(kind, numel):
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator)
    if kind == "tied":
        return (x * 2).round()
    if kind == "close":  # alike in all but the last bits
        return 1 + x * 1e-6
    if kind == "wide":
        return x * torch.logspace(-40, 35, numel)
    if kind == "tiny":
        return x * 1e-42
    if kind == "zero":
        return x.sign() * 0.0
    if kind == "with nan":
        return x.masked_fill(x > 1.5, NAN).masked_fill(x < -1.5, -INF)
    return x


KINDS = ["random", "tied", "close", "wide", "tiny", "zero"]
LENGTHS = [1, 2, 7, 64, 65, 1003, 4099, 12_345]

finite = pytest.mark.parametrize("kind", KINDS)
lengths = pytest.mark.parametrize("numel", LENGTHS)


# -- the largest ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "k", "indices"),
    [
        ([1, -3, 2, 3, -3], 2, [1, 3]),
        ([1, -3, 2, 3, -3], 3, [1, 3, 4]),
        ([1, -3, 2, 3, -3], 4, [1, 2, 3, 4]),
        ([0, 0, 0, 0], 2, [0, 1]),
        ([0, -0.0, 1e-45, 0], 2, [0, 2]),
        ([2, INF, -INF, 1], 2, [1, 2]),
        ([2, NAN, -INF, 1], 1, [1]),
        ([2, -INF, NAN, 1], 1, [1]),
        ([2, -INF, NAN, 1], 3, [0, 1, 2]),
        ([NAN, NAN, NAN], 2, [0, 1]),
        ([1.5], 1, [0]),
        ([1.5], 0, []),
        ([], 0, []),
    ],
)
def test_which_are_largest(with_or_without_kernels, x, k, indices):
    x = torch.tensor(x, dtype=torch.float32)
    found, values = vector_kernels.largest(x, k)
    assert (found.dtype, found.tolist()) == (torch.int32, indices)
    assert torch.equal(values.nan_to_num(), x[found.long()].nan_to_num())
    assert torch.equal(values.isnan(), x[found.long()].isnan())


@pytest.mark.parametrize("kind", [*KINDS, "with nan"])
@pytest.mark.parametrize("numel", [1, 2, 3, 64, 1003])
def test_the_largest_are_the_same(kernels, kind, numel):
    x = many(kind, numel)
    for k in sorted({1, 2, numel // 3, numel - 1, numel} & set(range(1, numel + 1))):
        same(vector_kernels.largest(x, k), fallback.largest(x, k, 0, 0, 0))


@pytest.mark.parametrize("kind", ["random", "tied", "zero", "with nan"])
@pytest.mark.parametrize("k", [1, 1000, 20_000])
def test_a_sample_only_helps_to_find_the_largest(with_or_without_kernels, kind, k):
    numel = 200_003
    x = many(kind, numel)
    assert vector_kernels.guessed(numel, k)[0] > 0
    same(vector_kernels.largest(x, k), fallback.largest(x, k, 0, 0, 0))


@pytest.mark.parametrize("numel", [131_072, 131_073])
def test_a_sample_that_misleads_does_no_harm(with_or_without_kernels, numel):
    sampled, _, room = vector_kernels.guessed(numel, 500)
    x = torch.zeros(numel)
    x[:: numel // sampled] = torch.arange(
        float(len(x[:: numel // sampled]))
    )  # what is sampled is large, and all that is
    same(vector_kernels.largest(x, 500), fallback.largest(x, 500, 0, 0, 0))
    x = torch.arange(float(numel)).fmod(977)
    x[:: numel // sampled] = 0.5  # what is sampled is small, and nearly everything reaches it
    assert numel > room
    same(vector_kernels.largest(x, 500), fallback.largest(x, 500, 0, 0, 0))


def test_a_sample_is_taken_where_it_pays():
    assert vector_kernels.guessed(1000, 10) == (0, 0, 0)
    assert vector_kernels.guessed(10**6, 500_000) == (0, 0, 0)
    sampled, rank, room = vector_kernels.guessed(6_553_600, 65_536)
    assert (sampled, rank) == (2**15, 409)
    assert 65_536 < rank * 200 < room < 2 * 65_536


def test_largest_takes_views_and_other_types(with_or_without_kernels):
    x = torch.tensor([9, 5, 1, 7, 0, 6], dtype=torch.float32)
    assert vector_kernels.largest(x[1:], 2)[0].tolist() == [2, 4]
    assert vector_kernels.largest(x[::2], 2)[0].tolist() == [0, 1]
    assert vector_kernels.largest(x.double(), 2)[1].dtype == torch.float64


def test_which_numbers_reach_a_threshold(with_or_without_kernels):
    x = torch.tensor([1, -2, 2, -0.0, NAN, 3])
    assert vector_kernels.reaching(x, 2.0, 9).tolist() == [1, 2, 4, 5]
    assert vector_kernels.reaching(x, 2.0, 2).tolist() == [1, 2]
    assert vector_kernels.reaching(x, 0.0, 9).tolist() == [0, 1, 2, 3, 4, 5]
    assert vector_kernels.reaching(x.double(), 2.5, 9).tolist() == [4, 5]
    assert vector_kernels.reaching(x[:0], 2.0, 9).tolist() == []


# -- signs ---------------------------------------------------------------------------------------------


@finite
@lengths
@pytest.mark.parametrize("block", [1, 7, 64, 100, 1024, 2048, 5000])
def test_signs_and_means_are_the_same(kernels, kind, numel, block):
    x = many(kind, numel)
    coded = vector_kernels.signs(x, block)
    same(coded, fallback.signs(x, block))
    ours, theirs = torch.empty(numel), torch.empty(numel)
    vector_kernels.unsign(coded[0], block, coded[1], ours)
    fallback.unsign(coded[0], block, coded[1], theirs)
    same([ours], [theirs])


@finite
@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (2, 3), (7, 5), (8, 8), (9, 130), (100, 11), (3, 2050)])
def test_signs_and_means_of_columns_are_the_same(kernels, kind, rows, columns):
    x = many(kind, rows * columns)
    coded = vector_kernels.column_signs(x, rows, columns)
    same(coded, fallback.column_signs(x, rows, columns))
    ours, theirs = torch.empty_like(x), torch.empty_like(x)
    vector_kernels.column_unsign(coded[0], rows, columns, coded[1], ours)
    fallback.column_unsign(coded[0], columns, coded[1], theirs)
    same([ours], [theirs])


def test_cache_blocks_do_not_show(kernels, monkeypatch):
    x = many("random", 3001)
    monkeypatch.setattr(fallback, "CACHE_BLOCK", 64)
    same(vector_kernels.signs(x, 40), fallback.signs(x, 40))
    same(vector_kernels.column_signs(x[:3000], 100, 30), fallback.column_signs(x[:3000], 100, 30))
    codes, norms = vector_kernels.quantise(x, 40, "l2", 7, 4, SEEDS)
    same([norms], [fallback.norms(x, 40, "l2")])
    same([codes], [fallback.quantise(x, 40, norms, INF, 7, 4, SEEDS)])
    assert vector_kernels.reaching(x, 1.0, 700).tolist() == fallback.reaching(x, 1.0, 700).tolist()


def test_cache_blocks_do_not_show_where_signs_are_read(kernels, monkeypatch):
    x, ours, theirs = many("random", 3001), torch.empty(3001), torch.empty(3001)
    monkeypatch.setattr(fallback, "CACHE_BLOCK", 64)
    for block in 40, 100, 5000:
        bits, means = vector_kernels.signs(x, block)
        vector_kernels.unsign(bits, block, means, ours)
        fallback.unsign(bits, block, means, theirs)
        same([ours], [theirs])
    bits, means = vector_kernels.column_signs(x[:2970], 99, 30)
    vector_kernels.column_unsign(bits, 99, 30, means, ours[:2970])
    fallback.column_unsign(bits, 30, means, theirs[:2970])
    same([ours[:2970]], [theirs[:2970]])


def test_means_by_hand(with_or_without_kernels):
    x = torch.tensor([1.0, -2.0, 3.0, -0.0, -4.0, -5.0, 6.0])
    bits, means = vector_kernels.signs(x, 4)
    assert bits.tolist() == [0b1001101]
    assert means.tolist() == [-2.0, -4.5, pytest.approx(4 / 3), 6.0]


def test_a_sum_keeps_its_order_whatever_the_machine():
    x = torch.arange(1.0, 131.0) / 7
    lanes = [x[i] + x[i + 64] + (x[i + 128] if i < 2 else 0) for i in range(64)]
    while len(lanes) > 1:
        lanes = [a + b for a, b in zip(lanes, lanes[len(lanes) // 2 :], strict=False)]
    assert fallback.folded(x.view(1, -1)).item() == lanes[0].item()


# -- stochastic rounding -------------------------------------------------------------------------------


@finite
@lengths
@pytest.mark.parametrize(("levels", "bits", "norm"), [(1, 2, "max"), (7, 4, "l2"), (5, 4, "max"), (127, 8, "l2")])
def test_levels_are_the_same(kernels, kind, numel, levels, bits, norm):
    for bucket in 3, 512:
        x = many(kind, numel)
        codes, norms = vector_kernels.quantise(x, bucket, norm, levels, bits, SEEDS)
        same([norms], [fallback.norms(x, bucket, norm)])
        same([codes], [fallback.quantise(x, bucket, norms, INF, levels, bits, SEEDS)])
        ours, theirs = torch.empty(numel), torch.empty(numel)
        assert vector_kernels.dequantise(codes, bucket, norms, levels, bits, ours)
        assert fallback.dequantise(codes, bucket, norms, levels, bits, theirs)
        same([ours], [theirs])


@finite
@lengths
def test_ternaries_and_moments_are_the_same(kernels, kind, numel):
    x = many(kind, numel)
    sums, most = vector_kernels.moments(x)
    same([sums], [fallback.moments(x)[0]])
    assert most == fallback.moments(x)[1] == x.abs().max()
    if kind in ("random", "tied", "close"):
        exact = torch.stack([x.double().sum(), x.double().square().sum()])
        torch.testing.assert_close(sums.double().sum(0), exact, rtol=1e-6, atol=1e-3)
    for scale, limit in (most, most), (most, most / 3), (2 * most, INF), (0.0, 0.0):
        s = torch.tensor([scale])
        same([vector_kernels.ternary(x, s, limit, SEEDS)], [fallback.quantise(x, numel, s, limit, 1, 2, SEEDS)])


@pytest.mark.parametrize(("bits", "levels"), [(2, 1), (4, 7), (4, 5), (8, 127), (8, 100)])
def test_codes_that_stand_for_nothing_are_seen(with_or_without_kernels, bits, levels):
    norms, out = torch.ones(1), torch.full((8 // bits * 3,), 5.0)
    good = torch.full((3,), sum(2 * levels << shift for shift in range(0, 8, bits)), dtype=torch.uint8)
    assert vector_kernels.dequantise(good, 99, norms, levels, bits, out)
    assert out.tolist() == [pytest.approx(1)] * len(out)
    bad = good.clone()
    bad[2] = 255
    assert not vector_kernels.dequantise(bad, 99, norms, levels, bits, out.fill_(5.0))
    assert (out == 5).all()


def test_a_norm_is_never_less_than_a_number(with_or_without_kernels):
    for x in torch.tensor([1e-30, 0.0]), torch.tensor([3e38, -3e38]), torch.tensor([1e-45]):
        _, (norm,) = vector_kernels.quantise(x, 2, "l2", 7, 4, SEEDS)
        assert x.abs().max() <= norm < INF


# -- random numbers ------------------------------------------------------------------------------------


def test_random_numbers_follow_from_their_index():
    all_at_once = noise.uniform(SEEDS, 0, 1000)
    assert (noise.uniform(SEEDS, 900, 100) == all_at_once[900:]).all()
    assert noise.uniform(SEEDS, 2**32, 1) == noise.uniform(SEEDS, 0, 1)
    assert not (noise.uniform((SEEDS[0] + 1, SEEDS[1]), 0, 1000) == all_at_once).any()
    assert not (noise.uniform((SEEDS[0], SEEDS[1] + 1), 0, 1000) == all_at_once).any()


def test_random_numbers_by_hand():
    """In integers of Python, index 5."""
    h = (5 * 0x9E3779B1 + SEEDS[0]) % 2**32
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13 ^ SEEDS[1]) * 0xC2B2AE35 % 2**32
    assert noise.uniform(SEEDS, 5, 1).tolist() == [(h ^ h >> 16) >> 8]


def test_random_numbers_are_spread_evenly():
    u = noise.uniform(SEEDS, 0, 2**18)
    assert u.dtype == np.float32
    assert 0 <= u.min() <= u.max() < 2**24
    counts = np.bincount((u / 2**18).astype(np.int64), minlength=64)
    assert ((counts - 4096) ** 2 / 4096).sum() < 63 + 5 * math.sqrt(2 * 63), "chi-square of 64 bins"
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 0.01


def test_seeds_come_from_torch():
    torch.manual_seed(1)
    first = noise.seeds()
    assert noise.seeds() != first
    torch.manual_seed(1)
    assert noise.seeds() == first
    assert all(0 <= word < 2**32 for word in first)

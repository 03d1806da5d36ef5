"""What each codec does to the numbers, and that the compiled kernel does the same as torch."""

import math

import pytest
import torch

from manyhands.codecs import Feedback, Half, Raw, TopK, native
from manyhands.core.errors import Refused

INF, NAN = math.inf, math.nan


def through(codec, x, memory=None):
    out = torch.full_like(x, NAN)
    codec.decode(codec.encode(x, memory), out)
    return out


def test_raw_lends_the_vector_itself():
    x = torch.randn(5)
    assert Raw().encode(x, None)[0] is x


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_half_keeps_what_it_can_represent(kind):
    whole = torch.arange(-256.0, 257.0)
    assert torch.equal(through(Half(kind), whole), whole)
    assert Half(kind).encode(whole, None)[0].dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}[kind]


def test_half_rounds_and_saturates():
    x = torch.tensor([1 + 2**-11, 1e-9, 1e6, -1e6, -INF])
    assert through(Half("fp16"), x).tolist() == [1.0, 0.0, 65504.0, -65504.0, -65504.0]
    assert through(Half("bf16"), x)[:2].tolist() == [1.0, pytest.approx(1e-9, rel=2**-8)]
    assert through(Half("bf16"), torch.tensor([1e300], dtype=torch.float64)).isfinite().all()
    assert through(Half(), torch.tensor([NAN])).isnan().all()


def test_half_leaves_a_half_vector_alone():
    x = torch.tensor([INF, 1.0], dtype=torch.float16)
    Half("fp16").encode(x, None)
    assert x.tolist() == [INF, 1.0]


def test_feedback_sends_later_what_did_not_fit():
    codec, x = Feedback(Half("fp16")), torch.tensor([100_000.0])
    memory = codec.memory(x)
    assert through(codec, x, memory).tolist() == [65504.0]
    assert through(codec, torch.zeros(1), memory).item() == pytest.approx(100_000 - 65504, abs=16)


def test_topk_with_feedback_by_hand():
    codec, memory, sent = Feedback(TopK(0.25)), torch.zeros(4, dtype=torch.float64), []
    for g in [1, -3, 2, 0.5], [1, 0.2, -0.5, 0.4], [0, 0, 0, 1]:
        (i,), (x,) = codec.encode(torch.tensor(g, dtype=torch.float64), memory)
        sent.append((x.item(), i.item()))
    assert sent == [(-3, 1), (2, 0), (pytest.approx(1.9), 3)]
    assert memory.tolist() == pytest.approx([0, 0.2, 1.5, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_all_of_topk_is_dense(dtype):
    x = torch.randn(999, dtype=dtype)
    codec = Feedback(TopK(1.0))
    memory = codec.memory(x)
    assert torch.equal(through(codec, x, memory), x)
    assert not memory.any()


@pytest.mark.parametrize(
    ("fraction", "numel", "k"),
    [(0.07, 100, 7), (0.01, 700, 7), (0.01, 701, 8), (0.01, 1, 1), (1e-9, 1000, 1), (1, 13, 13), (0.5, 0, 0)],
)
def test_topk_rounds_up_and_no_further(fraction, numel, k):
    indices, values = TopK(fraction).encode(torch.randn(numel), None)
    assert (indices.numel(), values.numel()) == (k, k)
    assert indices.dtype == torch.int32


def in_c(x, k):
    if not native.loaded():
        pytest.skip("the kernels are not compiled here")
    return native.in_c(native._kernel(), x, k)


@pytest.mark.parametrize("largest", [in_c, native.in_torch], ids=["c", "torch"])
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
def test_which_are_largest(largest, x, k, indices):
    x = torch.tensor(x, dtype=torch.float32)
    found, values = largest(x, k)
    assert (found.dtype, found.tolist()) == (torch.int32, indices)
    assert torch.equal(values.nan_to_num(), x[found.long()].nan_to_num())
    assert torch.equal(values.isnan(), x[found.long()].isnan())


def many(kind, numel):
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator)
    if kind == "tied":
        return (x * 2).round()
    if kind == "close":  # alike in all but the last bits
        return 1 + x * 1e-6
    if kind == "wide":
        return x * torch.logspace(-40, 35, numel)
    if kind == "with nan":
        return x.masked_fill(x > 1.5, NAN).masked_fill(x < -1.5, -INF)
    return x


@pytest.mark.parametrize("kind", ["random", "tied", "close", "wide", "with nan"])
@pytest.mark.parametrize("numel", [1, 2, 3, 64, 1003, 40_000])
def test_compiled_equals_torch(kind, numel):
    x = many(kind, numel)
    for k in sorted({1, 2, numel // 3, numel - 1, numel} & set(range(1, numel + 1))):
        for got, expected in zip(in_c(x, k), native.in_torch(x, k), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_largest_takes_views_and_other_types():
    x = torch.tensor([9, 5, 1, 7, 0, 6], dtype=torch.float32)
    assert native.largest(x[1:], 2)[0].tolist() == [2, 4]
    assert native.largest(x[::2], 2)[0].tolist() == [0, 1]
    assert native.largest(x.double(), 2)[1].dtype == torch.float64


def test_a_topk_of_a_matrix_counts_in_rows():
    x = torch.tensor([[1.0, 5.0], [4.0, 2.0]])
    assert TopK(0.5).encode(x, None)[0].tolist() == [1, 2]
    assert through(TopK(0.5), x).tolist() == [[0.0, 5.0], [4.0, 0.0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(0), "fraction is 0, but must be > 0 and <= 1"),
        (lambda: TopK(1.5), "fraction is 1.5, but must be > 0 and <= 1"),
        (lambda: TopK(NAN), "fraction is nan, but must be > 0 and <= 1"),
        (lambda: Half("fp8"), "kind is fp8, but must be one of fp16, bf16"),
        (lambda: Feedback(Feedback(Raw())), "codec is Feedback(codec=Raw()), but must be one without a memory"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(Refused) as refused:
        make()
    assert str(refused.value).startswith(message)


def test_topk_refuses_what_an_index_cannot_reach():
    with pytest.raises(Refused, match=r"the length of a vector is 2147483648, but must be < 2\*\*31"):
        TopK(0.1).encode(torch.empty(2**31, device="meta"), None)

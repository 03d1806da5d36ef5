"""Raw, half, top-k and feedback on examples computed by hand."""

import math

import pytest
import torch
from round_trip import through

from manyhands.codecs import (
    ByLayer,
    Dgc,
    Feedback,
    Fixed,
    Half,
    OneBit,
    Qsgd,
    Raw,
    SampledTopK,
    Strom,
    TernGrad,
    TopK,
    WarmUp,
)
from manyhands.codecs.topk import kept
from manyhands.core.errors import Refused

INF, NAN = math.inf, math.nan


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


@pytest.mark.parametrize("kind", [TopK, SampledTopK])
@pytest.mark.parametrize(
    ("fraction", "numel", "k"),
    [(0.07, 100, 7), (0.01, 700, 7), (0.01, 701, 8), (0.01, 1, 1), (1e-9, 1000, 1), (1, 13, 13), (0.5, 0, 0)],
)
def test_topk_rounds_up_and_no_further(kind, fraction, numel, k):
    codec = kind(fraction)
    assert kept(fraction, numel) == k
    indices, values = codec.pairs(codec.encode(torch.randn(numel), None))
    assert indices.numel() == values.numel() <= k
    assert indices.numel() == k or kind is SampledTopK
    assert indices.dtype == torch.int32


def test_a_topk_of_a_matrix_counts_in_rows():
    x = torch.tensor([[1.0, 5.0], [4.0, 2.0]])
    assert TopK(0.5).encode(x, None)[0].tolist() == [1, 2]
    assert through(TopK(0.5), x).tolist() == [[0.0, 5.0], [4.0, 0.0]]


def test_with_a_fraction():
    assert TopK(0.1).with_fraction(0.5) == TopK(0.5)
    assert SampledTopK(0.1, 0.3).with_fraction(0.5) == SampledTopK(0.5, 0.3)


def test_a_sample_of_everything_is_exact():
    x = torch.randn(1000)
    assert torch.equal(through(SampledTopK(0.1, sample=1.0), x), through(TopK(0.1), x))


@pytest.mark.parametrize("seed", range(5))
def test_a_sampled_topk_keeps_about_the_largest(seed):
    torch.manual_seed(seed)
    x, codec = torch.randn(50_000), SampledTopK(0.02, sample=0.05)
    indices, values = codec.encode(x, None)
    assert 500 <= indices.numel() <= 1000
    t = values.abs().min()
    largest = x.abs().topk(2000).values[-1]
    assert t >= largest, "nothing is kept that is far from the largest"
    assert torch.equal(x[indices.long()], values)


def test_a_sampled_topk_takes_the_first_if_too_many_reach_the_threshold():
    x = torch.ones(1000)
    assert SampledTopK(0.1).encode(x, None)[0].tolist() == list(range(100))


def test_a_sample_that_misleads_is_not_followed():
    x = torch.ones(1000)
    x[::10] = 9.0  # with every 10th number sampled, the sample is all 9 once in ten times, and t = 9 then
    torch.manual_seed(next(seed for seed in range(99) if _first_draw(seed, 10) == 0))
    indices, _ = SampledTopK(0.5, sample=0.1).encode(x, None)
    assert indices.numel() == 500, "only 100 numbers reach t"


def _first_draw(seed, below):
    return int(torch.randint(below, (), generator=torch.Generator().manual_seed(seed)))


def test_a_codec_around_one_that_varies_varies():
    x = torch.empty(1000)
    varying = SampledTopK(0.1)
    for codec in varying, Feedback(varying), Dgc(varying), WarmUp(Feedback(varying), 10), ByLayer(Raw(), 2000, varying):
        assert codec.traits.varies
        assert codec.most(x) >= codec.nbytes(x)
    assert WarmUp(varying, 10).most(x) == 250 * 8, "in the first stage it sends most"
    for codec in Feedback(TopK()), Dgc(), WarmUp(TopK(), 10), ByLayer(Raw()), OneBit(), Qsgd(), Fixed(), TernGrad():
        assert not codec.traits.varies
    assert Feedback(varying) == Feedback(SampledTopK(0.1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(0), "fraction is 0, but must be > 0 and <= 1"),
        (lambda: TopK(1.5), "fraction is 1.5, but must be > 0 and <= 1"),
        (lambda: TopK(NAN), "fraction is nan, but must be > 0 and <= 1"),
        (lambda: SampledTopK(2), "fraction is 2, but must be > 0 and <= 1"),
        (lambda: SampledTopK(0.1, 0), "sample is 0, but must be > 0 and <= 1"),
        (lambda: Half("fp8"), "kind is fp8, but must be one of fp16, bf16"),
        (lambda: Feedback(Feedback(Raw())), "codec is Feedback(codec=Raw()), but must be one without a memory"),
        (
            lambda: Feedback(WarmUp(TopK(), 5)),
            "codec is WarmUp(codec=TopK(fraction=0.01), steps=5, first=0.25, stages=5)",
        ),
        (lambda: OneBit(-1), "block is -1, but must be >= 0"),
        (lambda: TernGrad(-1), "clip is -1, but must be >= 0"),
        (lambda: TernGrad(NAN), "clip is nan, but must be >= 0"),
        (lambda: Qsgd(0), "levels is 0, but must be >= 1 and <= 127"),
        (lambda: Qsgd(128), "levels is 128, but must be >= 1 and <= 127"),
        (lambda: Qsgd(bucket=0), "bucket is 0, but must be >= 1"),
        (lambda: Qsgd(norm="l1"), "norm is l1, but must be l2 or max"),
        (lambda: Fixed(0, 8), "integer is 0, but must be >= 1"),
        (lambda: Fixed(2, -1), "fraction is -1, but must be >= 0"),
        (lambda: Fixed(8, 9), "integer + fraction is 17, but must be >= 2 and <= 16"),
        (lambda: Strom(0), "threshold is 0, but must be > 0 and finite"),
        (lambda: Strom(INF), "threshold is inf, but must be > 0 and finite"),
        (lambda: Dgc(Raw()), "codec is Raw(), but must be one that gives pairs"),
        (lambda: Dgc(momentum=1), "momentum is 1, but must be >= 0 and < 1"),
        (lambda: Dgc(clip=-1), "clip is -1, but must be >= 0"),
        (lambda: ByLayer(Raw(), -1), "least is -1, but must be >= 0"),
        (lambda: ByLayer(Raw(), 1, Strom(1)), "small is Strom(threshold=1), but must be one that remembers as much"),
        (lambda: ByLayer(Feedback(Raw()), 1, Dgc()), "small is Dgc("),
        (lambda: WarmUp(Raw(), 5), "codec is Raw(), but must be one that keeps a fraction"),
        (lambda: WarmUp(Fixed(), 5), "codec is Fixed(integer=2, fraction=14), but must be one that keeps a fraction"),
        (lambda: WarmUp(TopK(), -1), "steps is -1, but must be >= 0"),
        (lambda: WarmUp(TopK(), 5, 0), "first is 0, but must be > 0 and <= 1"),
        (lambda: WarmUp(TopK(), 5, stages=0), "stages is 0, but must be >= 1"),
        (lambda: WarmUp(WarmUp(TopK(), 5), 5), "codec is WarmUp("),
    ],
)
def test_refuses(make, message):
    with pytest.raises(Refused) as refused:
        make()
    assert str(refused.value).startswith(message)


def test_topk_refuses_what_an_index_cannot_reach():
    for codec in TopK(0.1), SampledTopK(0.1):
        with pytest.raises(Refused, match=r"the length of a vector is 2147483648, but must be < 2\*\*31"):
            codec.encode(torch.empty(2**31, device="meta"), None)

"""What every codec promises, whatever it does to the numbers."""

import pytest
import torch

from manyhands.codecs import Feedback, Half, Raw, TopK
from manyhands.core.protocols import Rounds

PLAIN = {
    "raw": Raw(),
    "fp16": Half("fp16"),
    "bf16": Half("bf16"),
    "top 1%": TopK(0.01),
    "top 30%": TopK(0.3),
    "top 100%": TopK(1.0),
}
CODECS = PLAIN | {f"{name} with feedback": Feedback(codec) for name, codec in PLAIN.items()}
SIZES = [0, 1, 2, 7, 100, 1003]
CUTS = [(0, 3), (3, 410), (410, 411), (411, 1003)]

codecs = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
wrapped = pytest.mark.parametrize("codec", [Feedback(c) for c in PLAIN.values()], ids=PLAIN.keys())
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def vectors(count, numel, dtype):
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator, dtype=dtype) for _ in range(count)]


def decoded(codec, payload, like):
    out = torch.full_like(like, torch.nan)
    codec.decode(payload, out)
    return out


@codecs
@dtypes
@pytest.mark.parametrize("numel", SIZES)
def test_decoded_fills_a_vector_like_the_input(codec, dtype, numel):
    (x,) = vectors(1, numel, dtype)
    out = decoded(codec, codec.encode(x, codec.memory(x)), x)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert out.isfinite().all()
    assert ((out - x).abs() <= x.abs()).all(), "a codec may forget a number, not make one up"
    assert out.any() or numel == 0


@dtypes
@pytest.mark.parametrize("name", CODECS)
def test_whoever_rounds_sends_every_number_and_forgets_none(name, dtype):
    codec, (x,) = CODECS[name], vectors(1, 1003, dtype)
    assert isinstance(codec, Rounds) is (name in ("raw", "fp16", "bf16"))
    if isinstance(codec, Rounds):
        off = (decoded(codec, codec.encode(x, codec.memory(x)), x) - x).abs() / x.abs()
        assert codec.memory(x) is None
        assert codec.rounding(dtype) / 2 <= off.max() <= codec.rounding(dtype), "the bound is kept, and is one"


@codecs
@dtypes
@pytest.mark.parametrize("numel", SIZES)
def test_nbytes_is_what_travels(codec, dtype, numel):
    (x,) = vectors(1, numel, dtype)
    payload = codec.encode(x, codec.memory(x))
    assert codec.nbytes(numel, dtype) == sum(part.numel() * part.element_size() for part in payload)


@codecs
@dtypes
def test_the_input_stays_as_it_is(codec, dtype):
    longer, *_ = vectors(1, 1003, dtype)
    before, version = longer.clone(), longer._version
    x = longer[100:900]
    payload = codec.encode(x, codec.memory(x))
    codec.decode(payload, torch.empty_like(x))
    assert longer._version == version
    assert torch.equal(longer, before)


@codecs
@dtypes
def test_decode_writes_nowhere_else(codec, dtype):
    (x,) = vectors(1, 50, dtype)
    longer = torch.full((60,), 7, dtype=dtype)
    codec.decode(codec.encode(x, codec.memory(x)), longer[4:54])
    assert longer[:4].tolist() == [7] * 4
    assert longer[54:].tolist() == [7] * 6
    assert not (longer[4:54] == 7).any()


@pytest.mark.parametrize("codec", PLAIN.values(), ids=PLAIN.keys())
def test_memory_is_only_for_feedback(codec):
    x = torch.ones(5, dtype=torch.float64)
    assert codec.memory(x) is None
    memory = Feedback(codec).memory(x)
    assert (memory.shape, memory.dtype, memory.tolist()) == (x.shape, x.dtype, [0.0] * 5)


@wrapped
@dtypes
@pytest.mark.parametrize("spans", [[(0, 1003)], CUTS], ids=["whole", "cut"])
def test_feedback_loses_nothing(codec, dtype, spans):
    inputs = vectors(30, 1003, dtype)
    memory, sent = codec.memory(inputs[0]), torch.zeros(1003, dtype=dtype)
    for x in inputs:
        for a, b in spans:
            sent[a:b] += decoded(codec, codec.encode(x[a:b], memory[a:b]), x[a:b])
    tolerance = 1e-4 if dtype is torch.float32 else 1e-12
    torch.testing.assert_close(sent + memory, torch.stack(inputs).sum(0), rtol=0, atol=tolerance)
    assert sent.abs().sum() > 0


@wrapped
@dtypes
def test_memory_is_cut_by_span(codec, dtype):
    longer, *_ = vectors(1, 1003, dtype)
    memory, alone = codec.memory(longer).fill_(0.5), torch.full((407,), 0.5, dtype=dtype)
    in_place = decoded(codec, codec.encode(longer[3:410], memory[3:410]), alone)
    by_itself = decoded(codec, codec.encode(longer[3:410].clone(), alone), alone)
    assert torch.equal(in_place, by_itself)
    assert torch.equal(memory[3:410], alone)
    assert (memory[:3] == 0.5).all()
    assert (memory[410:] == 0.5).all()


@codecs
def test_payload_outlives_the_next_one(codec):
    one, two = vectors(2, 100, torch.float32)
    memory = codec.memory(one)
    first = codec.encode(one, memory)
    before = decoded(codec, first, one)
    codec.encode(two, memory)
    assert torch.equal(decoded(codec, first, one), before)

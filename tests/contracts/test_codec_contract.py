"""What every codec promises, whatever it does to the numbers."""

import math
import pickle

import pytest
import torch

from manyhands.codecs import (
    ByLayer,
    Dgc,
    Elias,
    Feedback,
    Fixed,
    Half,
    OneBit,
    Qsgd,
    Raw,
    Rice,
    SampledTopK,
    Strom,
    TernGrad,
    TopK,
    WarmUp,
    native,
)
from manyhands.core.errors import BadPayload
from manyhands.core.flat import Place, Span
from manyhands.core.protocols import Rounds, Sparse, Varies, Warms
from manyhands.core.sending import Pieces, over

FORGETFUL = {
    "raw": Raw(),
    "fp16": Half("fp16"),
    "bf16": Half("bf16"),
    "top 1%": TopK(0.01),
    "top 30%": TopK(0.3),
    "top 100%": TopK(1.0),
    "sampled top 30%": SampledTopK(0.3, 0.2),
}
"""They may forget a number, not make one up."""
UNBIASED = {
    "qsgd": Qsgd(),
    "qsgd of one level": Qsgd(1, bucket=64, norm="max"),
    "qsgd of 127 levels": Qsgd(127, bucket=100),
    "elias": Elias(Qsgd(3, bucket=200)),
    "ternary": TernGrad(clip=0),
    "fixed": Fixed(4, 12),
    "fixed of a byte": Fixed(4, 3),
}
"""They are right on the average."""
PLAIN = (
    FORGETFUL
    | UNBIASED
    | {
        "one bit": OneBit(),
        "one bit in blocks": OneBit(100),
        "ternary, clipped": TernGrad(),
        "ternary, at one scale": TernGrad(shared=True),
        "by layer": ByLayer(OneBit(), least=50),
        "warming up": WarmUp(TopK(0.01), 10),
    }
)
WITHIN = {name: codec for name, codec in PLAIN.items() if not isinstance(codec, Warms)}
KEEPING = {f"{name} with feedback": Feedback(codec) for name, codec in WITHIN.items()} | {
    "threshold": Strom(0.7),
    "threshold, rice": Rice(Strom(0.7)),
    "by layer with feedback": ByLayer(Feedback(TopK(0.1)), least=50, small=Half()),
    "warming up with feedback": WarmUp(Feedback(TopK(0.01)), 10),
}
"""What they have not sent is in the first row of their memory."""
MOMENTUM = {
    "dgc": Dgc(TopK(0.1)),
    "dgc, sampled": Dgc(SampledTopK(0.1), nesterov=True),
    "dgc warming up": WarmUp(Dgc(), 9),
}
CODECS = PLAIN | KEEPING | MOMENTUM
SIZES = [0, 1, 2, 7, 100, 1003]
SHAPES = [(0,), (1,), (1003,), (0, 3), (5, 1), (1, 5), (17, 59), (4, 3, 5, 5)]
CUTS = [(0, 3), (3, 410), (410, 411), (411, 1003)]


def of(codecs):
    return pytest.mark.parametrize("codec", codecs.values(), ids=codecs.keys())


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def vectors(count, numel, dtype):
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator, dtype=dtype) for _ in range(count)]


def encoded(codec, x, memory=None, seed=1):
    torch.manual_seed(seed)
    return codec.encode(x, memory)


def decoded(codec, payload, like):
    out = torch.full_like(like, torch.nan)
    codec.decode(payload, out)
    return out


def same(one, two):
    assert [part.dtype for part in one] == [part.dtype for part in two]
    assert all(map(torch.equal, one, two))


@of(CODECS)
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decoded_fills_something_like_the_input(codec, dtype, shape):
    x = vectors(1, math.prod(shape), dtype)[0].view(shape)
    out = decoded(codec, encoded(codec, x, codec.memory(x)), x)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert out.isfinite().all()


@of(FORGETFUL | {name: Feedback(codec) for name, codec in FORGETFUL.items()})
@dtypes
@pytest.mark.parametrize("numel", SIZES)
def test_some_may_forget_a_number_but_make_none_up(codec, dtype, numel):
    (x,) = vectors(1, numel, dtype)
    out = decoded(codec, encoded(codec, x, codec.memory(x)), x)
    assert ((out - x).abs() <= x.abs()).all()
    assert out.any() or numel == 0


@of(UNBIASED)
@dtypes
def test_others_are_right_on_the_average(codec, dtype):
    x, times = vectors(1, 400, dtype)[0], 200
    sent = torch.stack([decoded(codec, encoded(codec, x, seed=seed), x) for seed in range(times)])
    off, error = sent.mean(0) - x, sent.std(0).max() / math.sqrt(times)
    assert off.abs().max() < 5 * error, "each number within five standard errors"
    assert (off * x.sign()).mean().abs() < 5 * error / math.sqrt(400), "and no part of all of them is missing"
    assert (sent[0] - x).any(), "but only on the average"


@dtypes
@pytest.mark.parametrize("name", CODECS)
def test_whoever_rounds_sends_every_number_and_forgets_none(name, dtype):
    codec, (x,) = CODECS[name], vectors(1, 1003, dtype)
    assert isinstance(codec, Rounds) is (name in ("raw", "fp16", "bf16"))
    if isinstance(codec, Rounds):
        payload = codec.encode(x, codec.memory(x))
        off = (decoded(codec, payload, x) - x).abs() / x.abs()
        assert codec.memory(x) is None
        assert len(payload) == 1
        assert codec.rounding(dtype) / 2 <= off.max() <= codec.rounding(dtype), "the bound is kept, and is one"


@of(CODECS)
@dtypes
@pytest.mark.parametrize("shape", [*[(numel,) for numel in SIZES], (17, 59), (1, 5)], ids=str)
def test_nbytes_is_what_travels(codec, dtype, shape):
    x = vectors(1, math.prod(shape), dtype)[0].view(shape)
    nbytes = sum(part.nbytes for part in encoded(codec, x, codec.memory(x)))
    if isinstance(codec, Varies):
        assert max(nbytes, codec.nbytes(x)) <= codec.most(x)
    else:
        assert nbytes == codec.nbytes(x)
    assert codec.nbytes(x) == codec.nbytes(x.to("meta"))


@of(CODECS)
def test_as_few_bytes_as_it_says_for_many_numbers(codec):
    x = torch.empty(10**6, device="meta")
    most = codec.most(x) if isinstance(codec, Varies) else codec.nbytes(x)
    assert 0 < codec.nbytes(x) <= most <= 2.1 * x.nbytes


@of(CODECS)
@dtypes
def test_the_input_stays_as_it_is(codec, dtype):
    longer, *_ = vectors(1, 1003, dtype)
    before, version = longer.clone(), longer._version
    x = longer[100:900]
    payload = codec.encode(x, codec.memory(x))
    codec.decode(payload, torch.empty_like(x))
    assert longer._version == version
    assert torch.equal(longer, before)


@of(CODECS)
@dtypes
@pytest.mark.parametrize("shape", [(50,), (5, 10)], ids=str)
def test_decode_writes_nowhere_else(codec, dtype, shape):
    x = vectors(1, 50, dtype)[0].view(shape)
    longer = torch.full((60,), 7, dtype=dtype)
    codec.decode(codec.encode(x, codec.memory(x)), longer[4:54].view(shape))
    assert longer[:4].tolist() == [7] * 4
    assert longer[54:].tolist() == [7] * 6
    assert not (longer[4:54] == 7).any()


@of(CODECS)
@dtypes
def test_strides_do_not_matter(codec, dtype):
    """Neither of the input nor of the memory nor of where it is decoded."""
    x = vectors(1, 210, dtype)[0].view(14, 15)
    plain, scattered = codec.memory(x), codec.memory(x)
    if scattered is not None:
        scattered = scattered.repeat_interleave(2, dim=-1)[..., ::2]
        plain += 0.25
        scattered += 0.25
    payload = encoded(codec, x, plain)
    same(payload, encoded(codec, x.repeat_interleave(3, dim=-1)[..., ::3], scattered))
    assert plain is None or torch.equal(plain, scattered)
    out = torch.full((15, 14), 7, dtype=dtype).t()
    codec.decode(payload, out)
    assert torch.equal(out, decoded(codec, payload, x))


@of(CODECS)
@dtypes
def test_strides_of_a_payload_do_not_matter_either(codec, dtype):
    (x,) = vectors(1, 210, dtype)
    payload = encoded(codec, x, codec.memory(x))
    scattered = [part.repeat_interleave(3)[::3] for part in payload]
    assert torch.equal(decoded(codec, scattered, x), decoded(codec, payload, x))


@of(CODECS)
def test_who_remembers(codec):
    x = torch.ones(5, dtype=torch.float64)
    memory = codec.memory(x)
    if codec in PLAIN.values():
        assert memory is None
    else:
        rows = (2,) if codec in MOMENTUM.values() else ()
        assert (memory.shape, memory.dtype, memory.any().item()) == ((*rows, 5), x.dtype, False)


@of(KEEPING)
@dtypes
@pytest.mark.parametrize("spans", [[(0, 1003)], CUTS], ids=["whole", "cut"])
def test_nothing_is_lost(codec, dtype, spans):
    inputs = vectors(30, 1003, dtype)
    memory, sent = codec.memory(inputs[0]), torch.zeros(1003, dtype=dtype)
    for step, x in enumerate(inputs):
        now = codec.at(step) if isinstance(codec, Warms) else codec
        for a, b in spans:
            sent[a:b] += decoded(codec, encoded(now, x[a:b], memory[a:b], seed=step), x[a:b])
    tolerance = 1e-4 if dtype is torch.float32 else 1e-12
    scale = max(1.0, float(sent.abs().max()) / 30)
    torch.testing.assert_close(sent + memory, torch.stack(inputs).sum(0), rtol=0, atol=tolerance * scale)
    assert sent.abs().sum() > 0


@of(KEEPING | MOMENTUM)
@dtypes
def test_memory_is_cut_by_span(codec, dtype):
    longer, *_ = vectors(1, 1003, dtype)
    memory = codec.memory(longer).fill_(0.5)
    alone = memory[..., 3:410].clone()
    in_place = encoded(codec, longer[3:410], memory[..., 3:410])
    same(in_place, encoded(codec, longer[3:410].clone(), alone))
    assert torch.equal(memory[..., 3:410], alone)
    assert (memory[..., :3] == 0.5).all()
    assert (memory[..., 410:] == 0.5).all()


@of(KEEPING | MOMENTUM)
def test_what_is_added_to_the_first_row_is_sent_later(codec):
    x = torch.zeros(64, dtype=torch.float64)
    memory = codec.memory(x)
    first = memory if memory.dim() == 1 else memory[0]
    first[5] = 3.0
    sent = sum(decoded(codec, encoded(codec, x, memory), x) for _ in range(5))
    assert sent[5] > 1
    torch.testing.assert_close(sent + first, torch.eye(64, dtype=torch.float64)[5] * 3, rtol=0, atol=1e-9)


@of(CODECS)
def test_payload_outlives_the_next_one(codec):
    one, two = vectors(2, 100, torch.float32)
    memory = codec.memory(one)
    first = codec.encode(one, memory)
    before = decoded(codec, first, one)
    codec.encode(two, memory)
    assert torch.equal(decoded(codec, first, one), before)


@of(CODECS)
def test_what_is_random_follows_from_torch(codec):
    (x,) = vectors(1, 1003, torch.float32)
    one, two, other = (encoded(codec, x, codec.memory(x), seed=seed) for seed in (1, 1, 2))
    same(one, two)
    chances = any(name in str(codec) for name in ("Qsgd", "TernGrad", "Fixed"))
    alike = len(one) == len(other) and all(map(torch.equal, one, other))
    assert alike is not chances or "SampledTopK" in str(codec)


@of(CODECS)
@pytest.mark.parametrize("shape", [(1003,), (17, 59)], ids=str)
def test_kernels_change_nothing(codec, shape, monkeypatch):
    if not native.loaded():
        pytest.skip("the kernels are not compiled here")
    x = vectors(1, 1003, torch.float32)[0].view(shape)
    a, b = codec.memory(x), codec.memory(x)
    payload = [encoded(codec, x, a, seed) for seed in range(2)]
    out = decoded(codec, payload[1], x)
    monkeypatch.setattr(native, "compiled", lambda *_: None)
    for seed in range(2):
        same(payload[seed], encoded(codec, x, b, seed))
    assert torch.equal(out, decoded(codec, payload[1], x))
    assert a is None or torch.equal(a, b)


@of(CODECS)
def test_codecs_are_values(codec):
    copy = pickle.loads(pickle.dumps(codec))
    assert copy == codec
    assert hash(copy) == hash(codec)
    assert isinstance(copy, Varies) is isinstance(codec, Varies)


def test_who_gives_pairs():
    sparse = {name for name, codec in CODECS.items() if isinstance(codec, Sparse)}
    assert sparse == {"top 1%", "top 30%", "top 100%", "sampled top 30%"}
    (x,) = vectors(1, 1003, torch.float64)
    for name in sparse:
        payload = CODECS[name].encode(x, None)
        indices, values = CODECS[name].pairs(payload)
        assert torch.equal(decoded(CODECS[name], payload, x)[indices.long()], values)


# -- what cannot have been encoded ---------------------------------------------------------------------


def shorter(x):
    return x[:-1]


def longer(x):
    return torch.cat([x, x[-1:]])


def of_another_kind(x):
    return x.to({torch.int32: torch.int64, torch.uint8: torch.int8}.get(x.dtype, torch.float8_e5m2))


def not_finite(x):
    return torch.full_like(x, torch.nan) if x.is_floating_point() else None


def negative(x):
    return -x.abs() - 1 if x.dtype in (torch.int32, torch.int16) or x.is_floating_point() else None


def beyond(x):
    return x + 2**20 if x.dtype == torch.int32 else None


def backwards(x):
    return x.flip(0) if x.dtype == torch.int32 and x.numel() > 1 else None


BREAK = {f.__name__: f for f in (shorter, longer, of_another_kind, not_finite, negative, beyond, backwards)}
MAY_BE = {
    ("not_finite", Raw),
    ("not_finite", Half),
    ("negative", Raw),
    ("negative", Half),
    ("negative", Fixed),
    ("shorter", Strom),
}
"""What is no proof that nobody has sent it."""


def innermost(codec):
    while hasattr(codec, "codec") and not isinstance(codec, Elias | Rice):
        codec = codec.codec
    return codec


def refused(codec, payload, like):
    out = torch.full_like(like, 9.0)
    with pytest.raises(BadPayload):
        codec.decode(payload, out)
    assert (out == 9).all(), "nothing was written"


@of(CODECS)
@dtypes
@pytest.mark.parametrize("shape", [(1003,), (17, 59)], ids=str)
def test_a_wrong_number_of_tensors_is_refused(codec, dtype, shape):
    x = vectors(1, 1003, dtype)[0].view(shape)
    payload = encoded(codec, x, codec.memory(x))
    refused(codec, (), x)
    refused(codec, payload[:-1], x)
    refused(codec, (*payload, payload[-1]), x)
    if len(payload) > 1:
        refused(codec, payload[::-1], x)


@of(CODECS)
@dtypes
@pytest.mark.parametrize("how", BREAK)
def test_tensors_that_nobody_made_are_refused(codec, dtype, how):
    (x,) = vectors(1, 1003, dtype)
    payload = encoded(codec, x, codec.memory(x))
    inner = innermost(codec)
    for place, part in enumerate(payload):
        broken = BREAK[how](part)
        values = how == "negative" and isinstance(inner, Sparse) and part.is_floating_point()
        if broken is not None and not values and (how, type(inner)) not in MAY_BE:
            refused(codec, (*payload[:place], broken, *payload[place + 1 :]), x)


@of(CODECS)
@dtypes
def test_what_was_encoded_for_something_else_is_refused(codec, dtype):
    one, two = vectors(1, 1003, dtype)[0], vectors(1, 400, dtype)[0]
    if isinstance(codec, Strom | WarmUp):
        return  # words do not depend on the length, and what one stage has made may look like what another has
    refused(codec, encoded(codec, one, codec.memory(one)), two)


# -- parameter by parameter ----------------------------------------------------------------------------

PLACES = [
    Place("fc1.weight", Span(0, 0, 60), torch.Size([6, 10]), 0),
    Place("fc1.bias", Span(0, 60, 66), torch.Size([6]), 1),
    Place("fc2.weight", Span(0, 66, 90), torch.Size([4, 6]), 2),
    Place("scale", Span(0, 90, 91), torch.Size([]), 3),
]
BY_PARAMETER = {name: codec for name, codec in CODECS.items() if codec.by_parameter}


@of(CODECS)
def test_who_wants_parameters_by_themselves(codec):
    whole = over(codec, Span(0, 0, 91), PLACES)
    assert isinstance(whole, Pieces) is any(name in str(codec) for name in ("OneBit", "TernGrad", "ByLayer"))


@of(BY_PARAMETER)
@dtypes
@pytest.mark.parametrize("span", [(0, 91), (0, 60), (30, 80), (61, 62), (70, 91)], ids=str)
def test_a_stretch_may_cut_a_parameter(codec, dtype, span):
    start, stop = span
    x = vectors(1, 91, dtype)[0]
    whole = over(codec, Span(0, start, stop), PLACES)
    shapes = list(whole.shapes)
    assert sum(shape.numel() for shape in shapes) == stop - start
    memory = whole.memory(x)
    part = None if memory is None else memory[..., start:stop]
    payload = encoded(whole, x[start:stop], part)
    out = decoded(whole, payload, x[start:stop])
    assert sum(tensor.nbytes for tensor in payload) == whole.nbytes(x[start:stop])
    alone = codec.memory(x[start:stop])
    torch.manual_seed(1)
    for piece, sent, kept in zip(
        x[start:stop].split([shape.numel() for shape in shapes]),
        out.split([shape.numel() for shape in shapes]),
        [None] * len(shapes) if alone is None else alone.split([shape.numel() for shape in shapes], dim=-1),
        strict=True,
    ):
        shape = shapes.pop(0)
        in_shape = None if kept is None else kept.view(*kept.shape[:-1], *shape)
        expected = torch.empty(shape, dtype=dtype)
        codec.decode(codec.encode(piece.view(shape), in_shape), expected)
        assert torch.equal(sent, expected.view(-1))
    if memory is not None:
        torch.testing.assert_close(part, alone)
        torch.testing.assert_close(out + part, x[start:stop])
        assert not memory[..., :start].any()
        assert not memory[..., stop:].any()

"""What every codec promises, tested over the EXAMPLES of all modules in manyhands/codecs."""

import math
import pickle

import pytest
import torch
from part_modules import check_module, classes_with, examples, members_of, modules, public_members

from manyhands import codecs
from manyhands.codecs import Feedback, vector_kernels
from manyhands.core.codec import (
    OPTIONAL,
    Codec,
    RoundingCodec,
    Shares,
    Sparse,
    Thins,
    Varies,
    Warms,
    Wraps,
    most_bytes,
    shares,
)
from manyhands.core.encoder import PerParameterCodec, codec_for_span
from manyhands.core.errors import BadPayload
from manyhands.core.flat import ParamSlot, Span
from repeats import diagonals

MODULES = modules(codecs)
EXAMPLES = examples(codecs)
ONE = torch.ones(1)
WITHIN = {name: codec for name, codec in EXAMPLES.items() if codec.memory(ONE) is None and not isinstance(codec, Warms)}
CODECS = EXAMPLES | {f"feedback({name})": Feedback(codec) for name, codec in WITHIN.items()}
"""The examples of all codecs, and those without a memory also inside of error feedback."""


def those(condition):
    """The codecs for which a test applies."""
    return {name: codec for name, codec in CODECS.items() if condition(codec)}


def inside(codec):
    """The codec that makes the payload, inside of all that wrap it."""
    while isinstance(codec, Wraps):
        codec = codec.codec
    return codec


SENDS_SOME = those(lambda codec: isinstance(inside(codec), Sparse | RoundingCodec) and not codec.traits.momentum)
"""They leave a number out or round it, and make none larger."""
UNBIASED = those(lambda codec: codec.traits.unbiased)
ROUNDING = those(lambda codec: isinstance(codec, RoundingCodec))
WITH_MEMORY = those(lambda codec: codec.memory(ONE) is not None)
LOSSLESS = those(lambda codec: codec.memory(ONE) is not None and not codec.traits.momentum)
"""Nothing is lost: the sum of all decoded vectors and the first row of the memory is the sum of all inputs."""
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


# -- the table -----------------------------------------------------------------------------------------

PARTS = {name: classes_with(module, "encode", "decode") for name, module in MODULES.items()}
KINDS = [kind for kinds in PARTS.values() for kind in kinds]


@pytest.mark.parametrize("name", [name for name, kinds in PARTS.items() if kinds])
def test_a_module_with_a_codec_has_examples_and_is_exported(name):
    check_module(codecs, MODULES[name], PARTS[name])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_public_member_is_in_the_protocol_or_in_the_table(kind):
    assert public_members(kind) <= members_of(Codec) | set(OPTIONAL)


def test_the_table_lists_the_members_of_the_optional_protocols():
    optional = [Varies, Sparse, Warms, Thins, Wraps, Shares, RoundingCodec]
    listed = {(meaning.partition(":")[0], name) for name, meaning in OPTIONAL.items()}
    assert listed == {(protocol.__name__, name) for protocol in optional for name in members_of(protocol)}


# -- there and back ------------------------------------------------------------------------------------


@of(CODECS)
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decoded_fills_something_like_the_input(codec, dtype, shape):
    x = vectors(1, math.prod(shape), dtype)[0].view(shape)
    out = decoded(codec, encoded(codec, x, codec.memory(x)), x)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert out.isfinite().all()


@of(SENDS_SOME)
@dtypes
@pytest.mark.parametrize("numel", SIZES)
def test_a_sparse_or_rounding_codec_makes_no_number_larger(codec, dtype, numel):
    (x,) = vectors(1, numel, dtype)
    out = decoded(codec, encoded(codec, x, codec.memory(x)), x)
    assert ((out - x).abs() <= x.abs()).all()
    assert out.any() or numel == 0


@of(UNBIASED)
@dtypes
def test_an_unbiased_codec_has_the_right_mean(codec, dtype):
    x, times = vectors(1, 400, dtype)[0], 200
    sent = torch.stack([decoded(codec, encoded(codec, x, seed=seed), x) for seed in range(times)])
    off, error = sent.mean(0) - x, sent.std(0).max() / math.sqrt(times)
    assert off.abs().max() < 5 * error, "each number within five standard errors"
    assert (off * x.sign()).mean().abs() < 5 * error / math.sqrt(400), "and there is no common bias"
    assert (sent[0] - x).any(), "but a single payload has an error"


@of(ROUNDING)
@dtypes
def test_a_rounding_codec_sends_every_number_within_its_bound(codec, dtype):
    (x,) = vectors(1, 1003, dtype)
    payload = codec.encode(x, codec.memory(x))
    off = (decoded(codec, payload, x) - x).abs() / x.abs()
    assert codec.memory(x) is None
    assert len(payload) == 1
    assert codec.rounding(dtype) / 2 <= off.max() <= codec.rounding(dtype), "the bound holds, and is tight"


@of(CODECS)
@dtypes
@pytest.mark.parametrize("shape", [*[(numel,) for numel in SIZES], (17, 59), (1, 5)], ids=str)
def test_nbytes_is_the_size_of_the_payload(codec, dtype, shape):
    x = vectors(1, math.prod(shape), dtype)[0].view(shape)
    nbytes = sum(part.nbytes for part in encoded(codec, x, codec.memory(x)))
    assert max(nbytes, codec.nbytes(x)) <= most_bytes(codec, x)
    if not codec.traits.varies:
        assert nbytes == codec.nbytes(x)
    assert codec.nbytes(x) == codec.nbytes(x.to("meta"))


@of(CODECS)
def test_the_payload_of_a_long_vector_is_not_much_larger_than_the_vector(codec):
    x = torch.empty(10**6, device="meta")
    assert 0 < codec.nbytes(x) <= most_bytes(codec, x) <= 2.1 * x.nbytes


@of(CODECS)
@dtypes
def test_the_input_is_not_changed(codec, dtype):
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
    """Neither of the input nor of the memory nor of the output."""
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
def test_a_memory_is_zeros_like_the_vector_and_momentum_takes_more_rows(codec):
    x = torch.ones(5, dtype=torch.float64)
    memory = codec.memory(x)
    if memory is None:
        assert not codec.traits.momentum
    else:
        assert (memory.shape[-1], memory.dtype, memory.any().item()) == (5, x.dtype, False)
        assert (memory.dim() > 1) is codec.traits.momentum


SPANS = {"whole": [(0, 1003)], "cut": CUTS}


@pytest.mark.parametrize(
    ("name", "dtype", "cut"), diagonals(2, LOSSLESS, [torch.float32, torch.float64], SPANS), ids=str
)
def test_nothing_is_lost(name, dtype, cut):
    codec, spans = LOSSLESS[name], SPANS[cut]
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


@of(WITH_MEMORY)
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


@of(WITH_MEMORY)
def test_what_is_added_to_the_first_row_is_sent_later(codec):
    x = torch.zeros(64, dtype=torch.float64)
    memory = codec.memory(x)
    first = memory if memory.dim() == 1 else memory[0]
    first[5] = 3.0
    sent = sum(decoded(codec, encoded(codec, x, memory), x) for _ in range(50))
    assert sent[5] > 1
    torch.testing.assert_close(sent + first, torch.eye(64, dtype=torch.float64)[5] * 3, rtol=0, atol=1e-9)


@of(CODECS)
def test_a_payload_is_not_changed_by_the_next_one(codec):
    one, two = vectors(2, 100, torch.float32)
    memory = codec.memory(one)
    first = codec.encode(one, memory)
    before = decoded(codec, first, one)
    codec.encode(two, memory)
    assert torch.equal(decoded(codec, first, one), before)


@of(CODECS)
def test_only_a_random_codec_depends_on_the_seed_of_torch(codec):
    (x,) = vectors(1, 1003, torch.float32)
    one, two, *others = (encoded(codec, x, codec.memory(x), seed=seed) for seed in (1, 1, 2, 3, 4, 5))
    same(one, two)
    assert codec.traits.random is any(not all(map(torch.equal, one, other)) for other in others)


@of(CODECS)
@pytest.mark.parametrize("shape", [(1003,), (17, 59)], ids=str)
def test_kernels_change_nothing(codec, shape, monkeypatch):
    if not vector_kernels.loaded():
        pytest.skip("the kernels are not compiled here")
    x = vectors(1, 1003, torch.float32)[0].view(shape)
    a, b = codec.memory(x), codec.memory(x)
    payload = [encoded(codec, x, a, seed) for seed in range(2)]
    out = decoded(codec, payload[1], x)
    monkeypatch.setattr(vector_kernels, "compiled", lambda *_: None)
    for seed in range(2):
        same(payload[seed], encoded(codec, x, b, seed))
    assert torch.equal(out, decoded(codec, payload[1], x))
    assert a is None or torch.equal(a, b)


@of(CODECS)
def test_codecs_are_values(codec):
    copy = pickle.loads(pickle.dumps(codec))
    assert copy == codec
    assert hash(copy) == hash(codec)
    assert copy.traits == codec.traits
    assert isinstance(codec, Varies) or not codec.traits.varies


# -- optional methods ----------------------------------------------------------------------------------


@of(those(lambda codec: isinstance(codec, Sparse)))
def test_pairs_are_indices_and_unchanged_values(codec):
    (x,) = vectors(1, 1003, torch.float64)
    payload = encoded(codec, x)
    indices, values = codec.pairs(payload)
    assert torch.equal(x[indices.long()], values)
    assert torch.equal(decoded(codec, payload, x)[indices.long()], values)


@of(those(lambda codec: codec.traits.plain))
def test_a_plain_payload_is_the_vector_itself(codec):
    (x,) = vectors(1, 1003, torch.float64)
    payload = encoded(codec, x)
    assert [one.data_ptr() for one in payload] == [x.data_ptr()] and torch.equal(payload[0], x)
    assert torch.equal(decoded(codec, payload, x), x)
    assert codec.memory(x) is None and not codec.by_parameter


@of(those(lambda codec: isinstance(codec, Thins)))
def test_another_fraction_is_all_that_changes(codec):
    assert codec.with_fraction(0.5).fraction == 0.5
    assert codec.with_fraction(0.5).with_fraction(codec.fraction) == codec


@of(those(lambda codec: isinstance(codec, Warms)))
@dtypes
def test_a_codec_that_warms_up_decodes_the_payloads_of_every_stage(codec, dtype):
    for numel in (1, 2, 50, 1003):
        (x,) = vectors(1, numel, dtype)
        for step in range(12):
            stage = codec.at(step)
            payload = encoded(stage, x, stage.memory(x))
            assert torch.equal(decoded(codec, payload, x), decoded(stage, payload, x))
            assert sum(part.nbytes for part in payload) <= most_bytes(codec, x)


@of(those(shares))
@dtypes
def test_a_shared_scale_that_is_the_own_one_changes_nothing(codec, dtype):
    (x,) = vectors(1, 1003, dtype)
    one, two = codec.memory(x), codec.memory(x)
    scale = codec.scale(x, one)
    payload = encoded(codec, x, one)
    torch.manual_seed(1)
    same(payload, codec.encode_at(x, two, scale))
    assert one is None or torch.equal(one, two)
    assert codec.scale(x.to("meta"), None).shape == scale.shape


# -- payloads that no encoder can have made ---------------------------------------------------------------------


def shorter(x):
    return x[:-1]


def longer(x):
    return torch.cat([x, x[-1:]])


def of_another_kind(x):
    return x.to({torch.int32: torch.int64, torch.uint8: torch.int8}.get(x.dtype, torch.float8_e5m2))


def not_finite(x):
    return torch.full_like(x, torch.nan) if x.is_floating_point() else None


def negative(x):
    """Of a tensor without negative numbers: indices, counts, norms."""
    return -x.abs() - 1 if x.dtype != torch.uint8 and bool((x >= 0).all()) else None


def beyond(x):
    return x + 2**20 if x.dtype == torch.int32 else None


def backwards(x):
    return x.flip(0) if x.dtype == torch.int32 and x.numel() > 1 else None


BREAK = {f.__name__: f for f in (shorter, longer, of_another_kind, not_finite, negative, beyond, backwards)}


def may_be_valid(codec, payload, part, how):
    """Whether another vector may have this broken payload: its numbers are negative, or NaN, or fewer are sent."""
    if how == "not_finite":
        return isinstance(inside(codec), RoundingCodec)
    if how == "negative":
        return isinstance(inside(codec), Sparse | RoundingCodec) and part.is_floating_point()
    return how == "shorter" and codec.traits.varies and len(payload) == 1


def refused(codec, payload, like):
    out = torch.full_like(like, 9.0)
    with pytest.raises(BadPayload):
        codec.decode(payload, out)
    assert (out == 9).all(), "the output is not written"


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
def test_broken_tensors_are_refused(codec, dtype, how):
    (x,) = vectors(1, 1003, dtype)
    payload = encoded(codec, x, codec.memory(x))
    for index, part in enumerate(payload):
        broken = BREAK[how](part)
        if broken is not None and not may_be_valid(codec, payload, part, how):
            refused(codec, (*payload[:index], broken, *payload[index + 1 :]), x)


@of(those(lambda codec: not isinstance(codec, Warms)))  # the payloads of its stages have several lengths
@dtypes
def test_a_payload_of_a_longer_vector_is_refused(codec, dtype):
    one, two = vectors(1, 1003, dtype)[0], vectors(1, 400, dtype)[0]
    refused(codec, encoded(codec, one, codec.memory(one)), two)


# -- parameter by parameter ----------------------------------------------------------------------------

SLOTS = [
    ParamSlot("fc1.weight", Span(0, 0, 60), torch.Size([6, 10]), 0),
    ParamSlot("fc1.bias", Span(0, 60, 66), torch.Size([6]), 1),
    ParamSlot("fc2.weight", Span(0, 66, 90), torch.Size([4, 6]), 2),
    ParamSlot("scale", Span(0, 90, 91), torch.Size([]), 3),
]
BY_PARAMETER = those(lambda codec: codec.by_parameter)


@of(CODECS)
def test_only_a_codec_by_parameter_is_given_parameters_separately(codec):
    whole = codec_for_span(codec, Span(0, 0, 91), SLOTS)
    assert isinstance(whole, PerParameterCodec) is codec.by_parameter


@of(BY_PARAMETER)
@dtypes
@pytest.mark.parametrize("span", [(0, 91), (0, 60), (30, 80), (61, 62), (70, 91)], ids=str)
def test_a_span_may_cut_a_parameter(codec, dtype, span):
    start, stop = span
    x = vectors(1, 91, dtype)[0]
    whole = codec_for_span(codec, Span(0, start, stop), SLOTS)
    shapes = list(whole.shapes)
    assert sum(shape.numel() for shape in shapes) == stop - start
    memory = whole.memory(x)
    group = None if memory is None else memory[..., start:stop]
    payload = encoded(whole, x[start:stop], group)
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
        torch.testing.assert_close(group, alone)
        torch.testing.assert_close(out + group, x[start:stop])
        assert not memory[..., :start].any()
        assert not memory[..., stop:].any()

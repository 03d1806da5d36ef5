"""Codecs around codecs: one for small parameters, and one that sends more at the beginning."""

import pytest
import torch
from round_trip import through

from manyhands.codecs import ByLayer, Dgc, Feedback, Half, OneBit, SampledTopK, Strom, TopK, WarmUp
from manyhands.core.codec import Warms
from manyhands.core.encoder import codec_for_span
from manyhands.core.errors import BadPayload
from manyhands.core.flat import ParamSlot, Span

# -- by layer ------------------------------------------------------------------------------------------


def test_small_parameters_go_another_way():
    codec = ByLayer(TopK(0.1), least=10, small=Half())
    assert [part.dtype for part in codec.encode(torch.randn(9), None)] == [torch.float16]
    assert [part.numel() for part in codec.encode(torch.randn(10), None)] == [1, 1]
    assert (codec.nbytes(torch.empty(9)), codec.nbytes(torch.empty(10))) == (18, 8)
    assert [part.dtype for part in codec.encode(torch.randn(3, 3), None)] == [torch.float16]


def test_by_itself_it_makes_a_codec_one_by_parameter():
    slots = [ParamSlot("a", Span(0, 0, 6), torch.Size([2, 3]), 0), ParamSlot("b", Span(0, 6, 10), torch.Size([4]), 1)]
    x = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 0.1, 0.2, 0.3, 0.4])
    alone, together = ByLayer(TopK(0.25)), TopK(0.3)
    assert through(codec_for_span(alone, Span(0, 0, 10), slots), x).tolist() == [
        9,
        8,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        pytest.approx(0.4),
    ]
    assert through(codec_for_span(together, Span(0, 0, 10), slots), x).count_nonzero() == 3


def test_what_was_not_used_of_a_small_parameter_is_sent_again():
    for inner in Feedback(TopK(0.1)), Strom(0.5), Dgc(TopK(0.1)):
        codec = ByLayer(inner, least=10)
        memory = codec.memory(torch.zeros(4))
        first = memory if memory.dim() == 1 else memory[0]
        first += torch.tensor([1.0, 0.0, 2.0, 0.0])
        assert through(codec, torch.ones(4), memory).tolist() == [2, 1, 3, 1]
        assert not memory.any()


def test_what_rounding_lost_of_a_small_parameter_is_sent_later():
    codec = ByLayer(Feedback(OneBit()), least=10, small=Half())
    memory = codec.memory(torch.zeros(1))
    assert through(codec, torch.tensor([100_000.0]), memory).item() == 65504
    assert memory.item() == 100_000 - 65504


def test_small_parameters_can_have_momentum_too():
    codec = ByLayer(Dgc(TopK(0.1)), least=10, small=Dgc(TopK(1.0), masking=False))
    memory = codec.memory(torch.zeros(1))
    assert [through(codec, torch.ones(1), memory).item() for _ in range(2)] == pytest.approx([1, 1.9])


# -- warm-up -------------------------------------------------------------------------------------------

STAGES = [0.25, 0.0625, 0.015625, 0.00390625, 0.001]


def test_the_stages_of_the_paper():
    codec = WarmUp(TopK(0.001), steps=50)
    assert isinstance(codec, Warms)
    assert [codec.at(step).fraction for step in range(0, 50, 10)] == STAGES
    assert [codec.at(step).fraction for step in (9, 10, 49, 50, 10**6)] == [0.25, 0.0625, 0.001, 0.001, 0.001]
    assert [f"{100 - 100 * f:.4g}" for f in STAGES] == ["75", "93.75", "98.44", "99.61", "99.9"]


def test_it_is_never_below_the_codecs_own():
    codec = WarmUp(TopK(0.05), steps=10)
    assert [codec.at(step).fraction for step in range(0, 12, 2)] == [0.25, 0.0625, 0.05, 0.05, 0.05, 0.05]
    assert WarmUp(TopK(0.5), steps=10).at(0).fraction == 0.5


def test_stages_and_the_first_one_are_knobs():
    codec = WarmUp(TopK(0.001), steps=4, first=0.1, stages=2)
    assert [codec.at(step).fraction for step in range(5)] == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])
    assert WarmUp(TopK(), steps=0).at(0) == TopK()


@pytest.mark.parametrize(
    "codec",
    [TopK(0.01), SampledTopK(0.01, 0.5), Feedback(TopK(0.01)), Dgc(TopK(0.01), 0.5), ByLayer(Feedback(TopK(0.01)), 3)],
    ids=lambda codec: type(codec).__name__,
)
def test_the_payload_of_any_stage_is_decoded(codec):
    warm, x = WarmUp(codec, steps=10), torch.randn(1000)
    assert type(warm.at(0)) is type(codec)
    assert warm.by_parameter == codec.by_parameter
    assert warm.nbytes(x) == codec.nbytes(x)
    for step in range(12):
        stage = warm.at(step)
        torch.manual_seed(step)
        payload = stage.encode(x, stage.memory(x))
        expected, out = torch.empty(1000), torch.empty(1000)
        stage.decode(payload, expected)
        warm.decode(payload, out)
        assert torch.equal(out, expected)


def test_a_payload_of_no_stage_is_refused():
    out = torch.full((1000,), 9.0)
    with pytest.raises(BadPayload):
        WarmUp(TopK(0.01), steps=10).decode(TopK(0.5).encode(torch.randn(1000), None), out)
    assert (out == 9).all()


def test_its_memory_is_the_codecs():
    warm, x = WarmUp(Feedback(TopK(0.001)), steps=5), torch.randn(1000)
    memory = warm.memory(x)
    sent = through(warm.at(0), x, memory)
    assert sent.count_nonzero() == 250
    torch.testing.assert_close(sent + memory, x)
    assert through(warm, x, memory).count_nonzero() == 1, "by itself it is what it becomes"
    assert WarmUp(TopK(), 5).memory(x) is None

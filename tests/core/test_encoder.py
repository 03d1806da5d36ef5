"""The encoder: parameters in their shapes, a memory of what was not sent, and no NaN or infinity."""

import math

import pytest
import torch
from torch import nn

from manyhands.codecs import Feedback, Half, Raw, SampledTopK, TopK
from manyhands.core.codec import CodecTraits
from manyhands.core.encoder import Encoder, PerParameterCodec, check_rounds, codec_for_span
from manyhands.core.errors import BadPayload, Diverged, Refused
from manyhands.core.flat import Span
from manyhands.core.task import Task
from manyhands.core.worker import Worker
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.world import simulate

WHOLE = Span(0, 0, 31)


class Shaped:
    """A codec by parameter that sends everything and a random number, and counts the parameters in its memory."""

    by_parameter = True
    traits = CodecTraits()

    def __init__(self):
        self.shapes = []

    def memory(self, like):
        return like.new_zeros(2, like.numel())

    def encode(self, x, memory):
        self.shapes.append(tuple(x.shape))
        memory[0] += 1
        memory[1] += 2
        return x.reshape(-1).clone(), torch.rand(1)

    def decode(self, payload, out):
        out.copy_(payload[0].view(out.shape))

    def nbytes(self, like):
        return like.nbytes + 4


def model():
    """31 numbers: a matrix, a row, a single number and a small cube."""
    net = nn.Module()
    for name, shape in {"a": (3, 4), "b": (6,), "c": (), "d": (2, 3, 2)}.items():
        net.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    return net


def with_worker(program, step=0, rank=0, seed=5):
    """The result of a program on one worker of two."""
    found = {}

    def main(t):
        w = Worker(t, Task(model=model, data=[0]), model(), seed=seed, steps=1, batch_size=1)
        w.step = step
        if t.rank == rank:
            found["it"] = program(w)

    simulate(Cluster(workers=2), main)
    return found["it"]


def test_parameters_are_encoded_in_their_shapes_and_cut_ones_as_a_row():
    codec = Shaped()

    def program(w):
        encoder = Encoder(w, codec)
        encoder.encode(torch.arange(31.0), Span(0, 5, 27))
        return encoder.memory[0]

    memory = with_worker(program)
    assert codec.shapes == [(7,), (6,), (1,), (8,)]
    assert memory.tolist() == [[0.0] * 5 + [1.0] * 22 + [0.0] * 4, [0.0] * 5 + [2.0] * 22 + [0.0] * 4]
    codec.shapes.clear()
    with_worker(lambda w: Encoder(w, codec).encode(torch.zeros(31), WHOLE))
    assert codec.shapes == [(3, 4), (6,), (1,), (2, 3, 2)]


def test_the_parameters_of_a_span_are_decoded_into_one_row():
    def program(w):
        payload = Encoder(w, Shaped()).encode(torch.arange(31.0), WHOLE)
        laid, out = codec_for_span(Shaped(), WHOLE, w.flat.slots), torch.empty(31)
        laid.decode(payload, out)
        return out, sum(x.nbytes for x in payload), laid.nbytes(torch.empty(31))

    out, sent, estimated = with_worker(program)
    assert out.tolist() == list(range(31))
    assert sent == estimated == 31 * 4 + 4 * 4 + 4 * 4, "the numbers, four random ones, and how many tensors each has"


@pytest.mark.parametrize(
    "harm",
    [
        lambda payload: payload[1:],
        lambda payload: payload[:-1],
        lambda payload: (payload[0].long(), *payload[1:]),
        lambda payload: (payload[0] + 1, *payload[1:]),
        lambda payload: (torch.tensor([-2, 4, 2, 4], dtype=torch.int32), *payload[1:]),
        lambda payload: (),
    ],
)
def test_payloads_that_do_not_fit_are_refused(harm):
    shapes = tuple(torch.Size([3]) for _ in range(4))
    laid = PerParameterCodec(Shaped(), shapes)
    payload = laid.encode(torch.zeros(12), torch.zeros(2, 12))
    with pytest.raises(BadPayload, match="tensors does not fit 4 parameters"):
        laid.decode(harm(payload), torch.empty(12))


def random_numbers(step=0, rank=0, seed=5, key=0, span=WHOLE):
    program = lambda w: Encoder(w, Shaped(), key).encode(torch.zeros(31), span)  # noqa: E731
    return torch.cat(with_worker(program, step, rank, seed)[2::2]).tolist()


def test_random_numbers_depend_on_seed_rank_step_key_and_span_and_on_nothing_else():
    usual = random_numbers()
    torch.rand(7)
    assert random_numbers() == usual and len(set(usual)) == 4
    others = [{"step": 1}, {"rank": 1}, {"seed": 6}, {"key": 1}, {"span": Span(0, 0, 30)}]
    assert all(random_numbers(**other)[0] != usual[0] for other in others)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", [Feedback(TopK(0.1)), Half(), Feedback(Half("bf16"))], ids=repr)
def test_nan_and_infinity_are_refused_and_their_parameter_is_named(codec, value):
    x = torch.zeros(31)
    x[14] = value
    with pytest.raises(Diverged) as raised:
        with_worker(lambda w: Encoder(w, codec).encode(x, WHOLE), step=3)
    where = "on rank 0 at step 3: training diverged"
    assert str(raised.value).startswith(f"a number to be sent for b is {value} {where}")


def test_numbers_are_checked_also_if_the_payload_is_as_large_as_the_vector():
    """Half of the numbers, each with its index, are as many bytes as all of them."""
    x = torch.arange(1.0, 31.0)
    assert SampledTopK(0.5).nbytes(x) == x.nbytes
    first, again = (
        with_worker(lambda w: Encoder(w, SampledTopK(0.5, 0.1)).encode(x, Span(0, 0, 30))) for _ in range(2)
    )
    assert all(map(torch.equal, first, again)), "chance follows from the seed"
    x[14] = math.nan
    with pytest.raises(Diverged, match="a number to be sent for b is nan"):
        with_worker(lambda w: Encoder(w, TopK(0.5)).encode(x, Span(0, 0, 30)))


def test_finite_numbers_with_an_infinite_sum_are_accepted():
    x = torch.full((31,), 3e38)
    payload = with_worker(lambda w: Encoder(w, Feedback(TopK(1.0))).encode(x, WHOLE))
    assert payload[1].isfinite().all()


def test_a_payload_that_is_taken_back_is_sent_again():
    x = torch.arange(31.0)

    def program(w):
        encoder = Encoder(w, Feedback(TopK(0.1)))
        payload = encoder.encode(x, WHOLE)
        before = encoder.memory[0].clone()
        encoder.take_back(WHOLE, payload)
        return before, encoder.memory[0], encoder.has_left(Span(0, 0, 1)), encoder.has_left(Span(0, 1, 2))

    before, after, nothing, something = with_worker(program)
    assert before[-4:].tolist() == [0.0] * 4 and torch.equal(after, x)
    assert (nothing, something) == (False, True)


def test_the_memory_is_saved_by_parameter_and_inherited():
    def program(w):
        first, second = (Encoder(w, Shaped()) for _ in range(2))
        first.encode(torch.zeros(31), Span(0, 0, 12))
        saved = first.state()
        second.inherit([saved, saved])
        return saved, second.memory[0], Encoder(w, Raw()).state(), Encoder(w, Raw()).remembers, first.remembers

    saved, memory, nothing, forgets, remembers = with_worker(program)
    assert {name: tuple(x.shape) for name, x in saved.items()} == {"a": (2, 12), "b": (2, 6), "c": (2, 1), "d": (2, 12)}
    assert memory[:, 0].tolist() == [2.0, 4.0] and not memory[:, 12:].any()
    assert (nothing, forgets, remembers) == ({}, False, True)


def test_weights_are_sent_by_codecs_that_round():
    for codec in (Raw(), Half(), Half("bf16")):
        check_rounds(codec)
    with pytest.raises(Refused, match="but must be one that sends every number, such as half"):
        check_rounds(TopK(0.5))

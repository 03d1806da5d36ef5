"""SparCML: the numbers of its docstring, and three algorithms for the same sum."""

from dataclasses import dataclass

import pytest
import torch
from summing import (
    CUT,
    NUMEL,
    WHOLE,
    ByLayer,
    OneBit,
    Pairs,
    Recorder,
    added,
    all_gradients,
    bits,
    decoded,
    gradient,
    left,
    states_of,
    sums_of,
    worker,
)

from manyhands.codecs import Feedback, Half, Raw
from manyhands.collectives import collective
from manyhands.collectives.compressed import Gather, Sparcml, check_pairs, sparcml
from manyhands.collectives.compressed.streams import Stream, expected_union, most_sparse, received, total
from manyhands.core.codec import CodecTraits, Sparse, Warms
from manyhands.core.encoder import codec_for_span
from manyhands.core.errors import BadPayload, Refused
from manyhands.core.flat import Span
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.world import simulate

EXAMPLE = [{0: 1.0, 5: 2.0}, {0: 1.0, 6: 3.0}, {1: -1.0, 5: 1.0}, {0: -2.0, 7: 4.0}]
RESULT = {0: 0.0, 1: -1.0, 5: 3.0, 6: 3.0, 7: 4.0}
WAYS = ["double", "split", "dense"]

every_way = pytest.mark.parametrize("way", WAYS)
every_size = pytest.mark.parametrize("P", [1, 2, 3, 4, 5, 8])


def stream(numbers, N=8):
    return Stream(N, torch.tensor(list(numbers.values())), torch.tensor(list(numbers), dtype=torch.int32))


def stored(stream):
    return dict(zip(stream.indices.tolist(), stream.values.tolist(), strict=True))


# -- streams ------------------------------------------------------------------------------------------


def test_dense_is_smaller_above_delta():
    assert [most_sparse(120, v) for v in (4, 2, 8)] == [60, 40, 80]
    four, five = stream({1: 1.0, 2: 1.0, 4: 1.0, 7: 1.0}), stream(RESULT)
    assert four.packed() is four and four.nbytes == four.dense().nbytes == 32
    assert five.packed().indices is None and five.packed().values.tolist() == [0, -1, 0, 0, 0, 3, 3, 4]


def test_the_expected_union():
    assert expected_union(10**4, 100, 8) == pytest.approx(772.6, abs=0.05)
    assert expected_union(10**4, 100, 64) == pytest.approx(4744, abs=0.5)
    assert expected_union(8, 2, 1) == 2 and expected_union(8, 8, 3) == 8


def test_sums_of_the_example_round_by_round():
    """Unions of 4 numbers at most after the first round, of 5 after the second; what has cancelled out stays."""
    first = [total([stream(EXAMPLE[rank]), stream(EXAMPLE[rank ^ 1])]) for rank in range(4)]
    assert [one.values.numel() for one in first] == [3, 3, 4, 4]
    second = total([first[0], first[2]])
    assert stored(second) == RESULT and second.values.numel() == 5
    lines = sparcml.__doc__.splitlines()
    for rank, (start, merged) in enumerate(zip(EXAMPLE, first, strict=True)):
        line = next(line for line in lines if line.startswith(f"    rank {rank}   "))
        assert " ".join(f"{i}:{x:g}" for i, x in start.items()) in line
        assert " ".join(f"{i}:{x:g}" for i, x in stored(merged).items()) in line
    assert " ".join(f"{i}:{x:g}" for i, x in RESULT.items()) in sparcml.__doc__


@pytest.mark.parametrize("dense", [(False, False), (True, False), (True, True)], ids=str)
def test_two_streams_have_the_same_sum_bit_by_bit_in_either_order(dense):
    generator = torch.Generator().manual_seed(0)
    streams = []
    for is_dense in dense:
        x = torch.randn(50, generator=generator)
        x[7] = -0.0
        indices = torch.randperm(50, generator=generator)[:20].sort().values
        one = Stream(50, x[indices], indices.int())
        streams.append(one.dense() if is_dense else one)
    there, back = total(streams), total(streams[::-1])
    assert torch.equal(there.values.view(torch.int32), back.values.view(torch.int32))
    assert torch.equal(there.dense().values, streams[0].dense().values + streams[1].dense().values)


def test_a_stream_is_cut_by_index():
    whole = stream(RESULT)
    assert stored(whole.cut(1, 6)) == {0: -1.0, 4: 3.0}
    assert whole.cut(2, 5).values.numel() == whole.cut(3, 3).values.numel() == 0
    assert whole.dense().cut(5, 8).values.tolist() == [3, 3, 4]


@pytest.mark.parametrize(
    "tensors",
    [
        (torch.tensor([0, 2], dtype=torch.int32), torch.ones(3)),
        (torch.tensor([2, 0], dtype=torch.int32), torch.ones(2)),
        (torch.tensor([2, 2], dtype=torch.int32), torch.ones(2)),
        (torch.tensor([-1, 2], dtype=torch.int32), torch.ones(2)),
        (torch.tensor([0, 8], dtype=torch.int32), torch.ones(2)),
        (torch.tensor([0, 2]), torch.ones(2)),
        (torch.tensor([0, 2], dtype=torch.int32), torch.ones(2, dtype=torch.float64)),
        (torch.ones(7),),
        (torch.ones(8, dtype=torch.float16),),
        (torch.tensor([0], dtype=torch.int32), torch.ones(1), torch.ones(1)),
    ],
)
def test_what_cannot_be_a_stream_is_refused(tensors):
    with pytest.raises(BadPayload, match="no stream of 8 numbers"):
        received(tensors, 8, torch.float32)


# -- the example, on four ranks -----------------------------------------------------------------------


@dataclass(frozen=True)
class AsGiven:
    """Whatever is not 0."""

    by_parameter: bool = False
    traits = CodecTraits()

    def memory(self, like):
        return None

    def encode(self, x, memory):
        indices = x.nonzero().view(-1)
        return indices.int(), x[indices]

    def pairs(self, payload):
        return tuple(payload)

    def nbytes(self, like):
        return 8 * 2


def summed_example(way):
    """Of float32, so in the model's second group."""
    log = []

    def program(transport):
        x = torch.zeros(18)
        x[list(EXAMPLE[transport.rank])] = torch.tensor(list(EXAMPLE[transport.rank].values()))
        Sparcml(worker(Recorder(transport, log)), AsGiven(), algorithm=way).all_reduce(x, Span(1, 0, 8))
        return x

    return simulate(Cluster(workers=4), program), log


@pytest.mark.parametrize("way, sent", [("double", None), ("split", (10, 30)), ("dense", (10, 24))])
def test_the_example_takes_as_many_bytes_as_in_the_docstring(way, sent):
    run, log = summed_example(way)
    assert all(x.tolist() == [0, -1, 0, 0, 0, 3, 3, 4] + [0] * 10 for x in run.results)
    if sent is None:
        assert run.bytes == [40, 40, 48, 48]
    else:
        phases = [sum(nbytes for _, key, _, _, nbytes in log if key == phase) / 4 for phase in (1, 2)]
        assert tuple(phases) == sent
        assert sum(run.bytes) == 4 * sum(sent)


def test_auto_finds_the_example_dense():
    """Two of eight on four ranks: 5.47 of eight are expected, more than four."""
    assert summed_example("auto")[0].bytes == summed_example("dense")[0].bytes


# -- any numbers --------------------------------------------------------------------------------------


def dense_sum(codec, P):
    """Each span by itself."""
    out = torch.zeros(NUMEL, dtype=torch.float64)
    for span in CUT:
        for rank in range(P):
            out[span.start : span.stop] += decoded(codec, gradient(rank)[span.start : span.stop])
    return out


@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.3, 0.9, 1.0])
@every_size
@every_way
def test_every_way_gives_the_sum_of_what_was_decoded(way, P, fraction):
    (found,) = sums_of(added(P, lambda w: Sparcml(w, Pairs(fraction), algorithm=way), spans=CUT))
    torch.testing.assert_close(found, dense_sum(Pairs(fraction), P), rtol=0, atol=1e-13)
    if way != "double" or P <= 2:
        assert torch.equal(found, dense_sum(Pairs(fraction), P)), "added in the order of ranks"


@every_size
def test_doubling_of_all_numbers_is_a_butterfly(P):
    def program(transport):
        x = gradient(transport.rank)
        collective("butterfly", transport, range(P)).all_reduce(x)
        return x

    butterfly = simulate(Cluster(workers=P), program)
    run = added(P, lambda w: Sparcml(w, Pairs(1.0), algorithm="double"))
    assert torch.equal(bits(sums_of(run)[0]), bits(butterfly.results[0]))
    assert (run.bytes, run.rounds) == (butterfly.bytes, butterfly.rounds)


@pytest.mark.parametrize("codec", [Feedback(Pairs(0.02)), ByLayer(Pairs(0.02)), Feedback(ByLayer(Pairs(0.02)))])
@every_way
def test_codecs_around_one_that_gives_pairs_will_do(way, codec):
    found = sums_of(added(3, lambda w: Sparcml(w, codec, algorithm=way), steps=3, spans=CUT))
    plain = sums_of(added(3, lambda w: Gather(w, codec), steps=3, spans=CUT))
    for x, y in zip(found, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


@dataclass(frozen=True)
class Growing:
    """More numbers at the beginning."""

    codec: Pairs
    by_parameter: bool = False
    traits = CodecTraits()

    def at(self, step):
        return self.codec if step else Pairs(0.8)

    def __getattr__(self, name):
        return getattr(self.codec, name)


def test_auto_chooses_by_the_expected_union():
    def program(transport):
        w = worker(transport)
        x, N = gradient(0), NUMEL
        chosen = {k: Sparcml(w, Pairs(k)).choose(x, WHOLE) for k in (0.01, 0.1, 0.5)}
        assert expected_union(N, N // 10 + 1, 4) < most_sparse(N, 8) < expected_union(N, N // 2, 4)
        assert chosen == {0.01: "double", 0.1: "double", 0.5: "dense"}
        growing = Growing(Pairs(0.01))
        assert isinstance(growing, Warms)
        assert Sparcml(w, growing).choose(x, WHOLE) == "dense"
        w.step = 1
        assert Sparcml(w, growing).choose(x, WHOLE) == "double"
        long = torch.empty(10**6, device="meta")
        assert Sparcml(w, Pairs(0.001)).choose(long, Span(0, 0, 10**6)) == "double"
        assert Sparcml(w, Pairs(0.01)).choose(long, Span(0, 0, 10**6)) == "split"
        assert Sparcml(w, Pairs(0.2), algorithm="double").choose(long, Span(0, 0, 10**6)) == "double"

    simulate(Cluster(workers=4), program)


# -- dense parts that are encoded ---------------------------------------------------------------------


def test_dense_parts_travel_encoded_and_only_they():
    run = added(4, lambda w: Sparcml(w, Pairs(0.3), algorithm="dense", values=Half()))
    expected = sum(decoded(Pairs(0.3), gradient(rank)) for rank in range(4))
    assert torch.equal(sums_of(run)[0], decoded(Half(), expected))
    plain = added(4, lambda w: Sparcml(w, Pairs(0.3), algorithm="dense"))
    assert sum(plain.bytes) - sum(run.bytes) == 3 * NUMEL * (8 - 2)


def test_what_owners_lose_is_sent_later():
    codec, values = Feedback(Pairs(0.05)), Feedback(OneBit())
    run = added(3, lambda w: Sparcml(w, codec, algorithm="dense", values=values), steps=50, spans=CUT)
    rest = left(states_of(run), "memory", "owner")
    torch.testing.assert_close(sum(sums_of(run)) + rest, all_gradients(3, 50), rtol=0, atol=1e-12)
    assert left(states_of(run), "owner").any()


# -- what cannot work ---------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Raw(), Half(), Feedback(Half()), OneBit()], ids=repr)
def test_a_codec_must_give_pairs(codec):
    with pytest.raises(Refused, match="one that gives pairs"):
        check_pairs(codec)
    with pytest.raises(Refused, match="one that gives pairs"):
        added(1, lambda w: Sparcml(w, codec))


def test_codecs_that_give_pairs_are_known():
    assert isinstance(Pairs(), Sparse) and not isinstance(Half(), Sparse)
    for codec in (Pairs(), Feedback(Pairs()), ByLayer(Pairs()), Growing(Pairs())):
        check_pairs(codec)


@pytest.mark.parametrize(
    "knobs, words",
    [
        ({"algorithm": "triple"}, "algorithm is triple, but must be one of auto, double, split, dense"),
        ({"algorithm": "split", "values": Half()}, "algorithm is split, but must be auto or dense"),
    ],
)
def test_knobs_that_make_no_sense_are_refused(knobs, words):
    with pytest.raises(Refused, match=words):
        added(1, lambda w: Sparcml(w, Pairs(), **knobs))


def test_a_part_of_a_parameter_is_cut_like_the_span():
    """Two numbers of every parameter, wherever the span ends."""
    codec = ByLayer(Pairs(0.05))
    span = Span(0, 570, 640)

    def program(transport):
        w, x = worker(transport), gradient(transport.rank)
        Sparcml(w, codec, algorithm="split").all_reduce(x, span)
        out = decoded(codec_for_span(codec, span, w.flat.slots), gradient(transport.rank)[570:640])
        return x[570:640], out

    results = simulate(Cluster(workers=2), program).results
    assert torch.equal(results[0][0], results[0][1] + results[1][1])

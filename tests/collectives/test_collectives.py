"""The pictures, pinned counts and times of the all-reduce algorithms."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch

from manyhands.collectives import butterfly, collective, fold, rabenseifner, ring, tree
from manyhands.collectives.choose import Alone, BySize
from manyhands.collectives.cost import all_reduce_seconds, crossover
from manyhands.collectives.rabenseifner import halvings
from manyhands.collectives.shared import Shared, capacity
from manyhands.core.errors import ManyhandsError, PeerLost, Refused
from manyhands.core.port import REFERENCE_BYTES, even_spans
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.faults import Die, SlowLink
from manyhands.virtual.world import on_ranks, simulate

MESSAGES = ["tree", "butterfly", "ring", "rabenseifner"]


def reduce_once(name, P, m, **network):
    def program(transport):
        x = torch.full((m,), float(transport.rank))
        collective(name, transport, range(P)).all_reduce(x)
        return x

    return simulate(Cluster(workers=P, **network), program)


# -- pictures -----------------------------------------------------------------------------------------


class Sent(NamedTuple):
    round: int
    frm: int
    to: int
    start: int
    stop: int


class Recorder:
    """A transport that records what is sent; on links of latency 1 the clock counts rounds."""

    def __init__(self, transport, log):
        self._transport = transport
        self._log = log

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def send(self, to, tag, meta=(), tensors=(), **more):
        start, count = tensors[0].storage_offset(), tensors[0].numel()
        self._log.append(Sent(round(self.now()) + 1, self.rank, to, start, start + count))
        self._transport.send(to, tag, meta, tensors, **more)


def recorded(name, P, m):
    log = []

    def program(transport):
        collective(name, Recorder(transport, log), range(P)).all_reduce(torch.zeros(m))

    simulate(Cluster(workers=P, latency=1.0, bandwidth=math.inf), program)
    return sorted(log)


def arrows(log):
    rounds = {}
    for sent in log:
        rounds.setdefault(sent.round, []).append(f"{sent.frm}→{sent.to}")
    return "\n".join(f"    round {number}   {' '.join(line)}" for number, line in rounds.items())


def test_ring_sends_the_chunks_of_its_picture():
    log = recorded("ring", 4, 8)
    assert all(sent.to == (sent.frm + 1) % 4 for sent in log)
    lines = [f"    {'step':<16}" + "".join(f"  rank {r}" for r in range(4))]
    for step in range(6):
        chunks = [sent.start // 2 for sent in log if sent.round == step + 1]
        kind = "reduce" if step < 3 else "gather"
        lines.append(f"    {step}  {kind:<13}" + "".join(f"{chunk:8}" for chunk in chunks))
    assert "\n".join(lines) in ring.__doc__


@pytest.mark.parametrize("P", [2, 3, 5, 8])
def test_ring_owns_chunk_r_plus_1_after_the_reduction(P):
    """What a rank sends first when gathering is what it owns."""
    for sent in recorded("ring", P, 2 * P):
        if sent.round == P:
            assert sent.start == 2 * ((sent.frm + 1) % P)


def test_tree_sends_along_its_picture():
    assert arrows(recorded("tree", 8, 4)) in tree.__doc__


def test_butterfly_swaps_as_in_its_picture():
    log = recorded("butterfly", 8, 4)
    assert {(s.round, s.frm, s.to) for s in log} == {(s.round, s.to, s.frm) for s in log}
    once = [sent for sent in log if sent.frm < sent.to]
    assert arrows(once).replace("→", "↔") in butterfly.__doc__
    assert {(sent.start, sent.stop) for sent in log} == {(0, 4)}


def test_rabenseifner_sends_the_parts_of_its_picture():
    def line(label, cells):
        return f"    {label:<11}" + "".join(f"{cell:>9}" for cell in cells)

    log = recorded("rabenseifner", 4, 8)
    owned = [halvings(r, range(0, 9, 2))[-1].mine for r in range(4)]
    lines = [line("round", [f"rank {r}" for r in range(4)])]
    for number, kind in enumerate(["halve", "halve", "double", "double"], 1):
        cells = [f"{sent.start}:{sent.stop} → {sent.to}" for sent in log if sent.round == number]
        lines.append(line(f"{number}  {kind}", cells))
        if number == 2:
            lines.append(line("   owns", [f"{own.start}:{own.stop}" for own in owned]))
    assert "\n".join(lines) in rabenseifner.__doc__


@pytest.mark.parametrize("P, m", [(8, 16), (8, 5), (4, 1000), (2, 1), (16, 37)])
def test_rabenseifner_leaves_each_rank_with_its_own_block(P, m):
    owned = [halvings(r, [m * index // P for index in range(P + 1)])[-1].mine for r in range(P)]
    assert [own.start for own in owned] == [0] + [own.stop for own in owned[:-1]] and owned[-1].stop == m
    assert max(own.stop - own.start for own in owned) <= -(-m // P)
    if (P, m) == (8, 16):
        assert owned == [slice(2 * r, 2 * r + 2) for r in range(8)]


def test_fold_pairs_up_as_in_its_picture():
    assert "    indices   0 → 1    2 → 3    4    5\n    inner         0        1    2    3 " in fold.__doc__
    sent = [(one.frm, one.to) for one in recorded("butterfly", 6, 4)]
    aside = sorted(pair for pair in sent if not {0, 2}.isdisjoint(pair))
    assert aside == [(0, 1), (1, 0), (2, 3), (3, 2)]
    inner = [(1, 3), (4, 5), (1, 4), (3, 5)]
    assert sorted(set(sent) - set(aside)) == sorted(inner + [(b, a) for a, b in inner])


# -- counts and times ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, rounds, most", [("tree", 6, 48), ("butterfly", 3, 48), ("ring", 14, 28), ("rabenseifner", 6, 28)]
)
def test_rounds_and_elements_of_the_textbook(name, rounds, most):
    run = reduce_once(name, 8, 16)
    assert run.rounds == rounds
    assert max(run.bytes) == 4 * most
    assert run.results[0].tolist() == [28.0] * 16


@pytest.mark.parametrize("P", [2, 3, 4, 5, 6, 7, 8])
def test_time_without_bytes_is_the_number_of_rounds(P):
    """Folding costs two rounds more, less where ranks that were not folded are already ahead."""
    lg, folded = P.bit_length() - 1, bool(P & (P - 1))
    most = {
        "ring": 2 * (P - 1),
        "butterfly": lg + 2 * folded,
        "rabenseifner": 2 * (lg + folded),
        "tree": 2 * (lg + folded),
    }
    for name, rounds in most.items():
        run = reduce_once(name, P, 11, latency=1.0, bandwidth=math.inf)
        if name != "tree":
            assert run.seconds == run.rounds
        assert rounds - 2 * folded <= run.seconds <= rounds
        if name == "ring" or not folded:
            assert run.seconds == run.rounds == rounds


NETWORK = {"L": 5e-6, "G": 1 / 1.25e9}


@pytest.mark.parametrize(
    "P, m, expected",
    [
        (8, 1, {"tree": 30.0e-6, "butterfly": 15.0e-6, "ring": 70.0e-6, "rabenseifner": 30.0e-6, "lower bound": 15e-6}),
        (
            8,
            2**20,
            {
                "tree": 20.16e-3,
                "butterfly": 10.08e-3,
                "ring": 5.942e-3,
                "rabenseifner": 5.902e-3,
                "lower bound": 5.887e-3,
            },
        ),
        (64, 2**20, {"tree": 40.3e-3, "butterfly": 20.2e-3, "ring": 7.236e-3, "rabenseifner": 6.666e-3}),
    ],
)
def test_closed_forms(P, m, expected):
    for name, seconds in expected.items():
        assert all_reduce_seconds(name, P, m, **NETWORK) == pytest.approx(seconds, rel=2e-3)


@pytest.mark.parametrize("m", [16, 2**16])
@pytest.mark.parametrize("P", [2, 4, 8])
@pytest.mark.parametrize("name", MESSAGES)
def test_virtual_time_is_the_closed_form(name, P, m):
    run = reduce_once(name, P, m, latency=5e-6, bandwidth=1.25e9)
    assert run.seconds == pytest.approx(all_reduce_seconds(name, P, m, **NETWORK), rel=1e-9)


@pytest.mark.parametrize("name", MESSAGES)
def test_nothing_beats_the_lower_bound_and_one_rank_pays_nothing(name):
    for P in (2, 4, 8, 64):
        for m in (1, 1000, 2**20):
            bound = all_reduce_seconds("lower bound", P, m, **NETWORK)
            assert all_reduce_seconds(name, P, m, **NETWORK) >= bound - 1e-15
    assert all_reduce_seconds(name, 1, 2**20, **NETWORK) == 0


def test_crossover_of_butterfly_and_rabenseifner():
    assert [round(crossover(P), 2) for P in (4, 8, 16, 64)] == [4.0, 2.4, 1.88, 1.49]
    assert crossover(2) == crossover(1) == math.inf
    m = crossover(8) * NETWORK["L"] / (4 * NETWORK["G"])
    both = [all_reduce_seconds(name, 8, m, **NETWORK) for name in ("butterfly", "rabenseifner")]
    assert both[0] == pytest.approx(both[1])


def test_shared_takes_two_barriers_and_three_passes_over_the_vector_but_for_a_span():
    m, P = 8000, 4

    def program(transport):
        collective("shared", transport, range(P)).all_reduce(torch.zeros(m))

    run = simulate(Cluster(workers=P, hosts=1, local_latency=1e-3), program)
    assert (run.rounds, run.bytes) == (2, [0] * P)
    assert run.seconds == pytest.approx(2e-3 + (3 - 1 / P) * 4 * m / REFERENCE_BYTES)


def once(name, operation, P, m, transport):
    one, x = collective(name, transport, range(P)), torch.zeros(m)
    if operation == "all_gather":
        one.all_gather(x[even_spans(m, P)[transport.rank]].clone(), x)
    elif operation == "broadcast":
        one.broadcast(x, 3)
    elif operation == "barrier":
        one.barrier()
    else:
        one.reduce_scatter(x)


@pytest.mark.parametrize(
    "operation, rounds",
    [
        ("reduce_scatter", {"ring": 7, "rabenseifner": 3, "tree": 1, "butterfly": 1, "shared": 2}),
        ("all_gather", {"ring": 7, "rabenseifner": 3, "tree": 1, "butterfly": 1, "shared": 2}),
        ("broadcast", {"ring": 3, "rabenseifner": 3, "tree": 3, "butterfly": 3, "shared": 2}),
        ("barrier", {"ring": 1, "rabenseifner": 1, "tree": 6, "butterfly": 3, "shared": 1}),
    ],
)
def test_rounds_of_the_other_operations(operation, rounds):
    for name, count in rounds.items():
        hosts = 1 if name == "shared" else 8
        run = simulate(Cluster(workers=8, hosts=hosts), partial(once, name, operation, 8, 64))
        assert run.rounds == count, name
        if operation in ("reduce_scatter", "all_gather"):
            assert run.bytes == [0 if name == "shared" else 4 * 64 * 7 // 8] * 8


@pytest.mark.parametrize(
    "operation, latencies, vectors", [("reduce_scatter", 7, 7 / 8), ("all_gather", 7, 7 / 8), ("broadcast", 7, 1)]
)
def test_native_takes_the_time_of_its_closed_form(operation, latencies, vectors):
    m = 8000
    run = simulate(Cluster(workers=8, latency=5e-6, bandwidth=1.25e9), partial(once, "native", operation, 8, m))
    assert run.seconds == pytest.approx(latencies * 5e-6 + vectors * 4 * m / 1.25e9)


def test_a_native_barrier_takes_lg_P_latencies_and_ranks_must_make_the_same_call():
    slow = Cluster(workers=5, latency=1.0)
    assert simulate(slow, partial(once, "native", "barrier", 5, 0)).seconds == 3

    def program(transport):
        once("native", "barrier" if transport.rank else "broadcast", 5, 8, transport)

    with pytest.raises(ManyhandsError, match=r"rank \d calls a barrier, but others of ranks .* a broadcast"):
        simulate(slow, program)


# -- calls that overlap, ranks that die ---------------------------------------------------------------


@pytest.mark.parametrize("name", [*MESSAGES, "auto"])
def test_unequal_latencies_and_speeds_do_not_mix_calls(name):
    P = 6
    faults = [SlowLink(rank=1, factor=50.0), SlowLink(rank=4, factor=3.0)]
    uneven = Cluster(workers=P, speeds=[1, 9, 0.2, 3, 0.05, 1], jitter=0.3, cpu_per_byte=1e-8, faults=faults)

    def program(transport):
        one = collective(name, transport, range(P))
        seen = []
        for call in range(20):
            transport.charge_compute(1e-4 * ((call * transport.rank) % 5))
            x = torch.full((3 + call % 4,), float(transport.rank + 1) * 2**call, dtype=torch.float64)
            one.all_reduce(x)
            seen.append(x.clone())
            x.fill_(math.nan)
        return seen

    for seen in simulate(uneven, program).results:
        assert [x.tolist() for x in seen] == [[21.0 * 2**call] * (3 + call % 4) for call in range(20)]


@pytest.mark.parametrize("name", [*MESSAGES, "shared"])
def test_a_message_says_which_group_and_which_call(name):
    tags = {}

    def program(transport):
        for group in ([0, 1], [0, 1, 2]):
            if transport.rank in group:
                recorder = TagRecorder(transport)
                one = collective(name, recorder, group)
                for call in range(3):
                    recorder.tags = tags.setdefault((len(group), call), set())
                    one.all_reduce(torch.zeros(6))

    simulate(Cluster(workers=3, hosts=1), program)
    assert all(len(kinds) == 1 for kinds in tags.values())
    assert len(set.union(*tags.values())) == 6
    assert len({tag.name for kinds in tags.values() for tag in kinds}) == 2


class TagRecorder:
    def __init__(self, transport):
        self._transport = transport

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def send(self, to, tag, *more, **named):
        self.tags.add(tag)
        self._transport.send(to, tag, *more, **named)


def endless(name, P):
    def program(transport):
        one = collective(name, transport, range(P))
        for _ in range(1000):
            transport.charge_compute(1e-3)
            one.all_reduce(torch.ones(64))

    return program


@pytest.mark.parametrize("at", [0.0, 0.0101, 0.02005])
@pytest.mark.parametrize("name", [*MESSAGES, "shared", "native", "auto"])
def test_a_dead_rank_is_named(name, at):
    mortal = Cluster(workers=4, hosts=1 if name == "shared" else None, faults=[Die(rank=2, at=at)])
    with pytest.raises(PeerLost, match="rank 2 is lost: it died"):
        simulate(mortal, endless(name, 4))


@pytest.mark.parametrize("name", [*MESSAGES, "shared"])
def test_when_a_rank_dies_no_rank_waits_forever(name):
    def program(transport):
        try:
            endless(name, 5)(transport)
        except PeerLost as loss:
            transport.leave()
            return loss.rank

    mortal = Cluster(workers=5, hosts=1 if name == "shared" else None, faults=[Die(rank=2, at=0.0101)])
    lost = simulate(mortal, program).results
    assert lost[2] is None and 2 in lost and None not in lost[:2] + lost[3:]


def test_a_rank_that_sums_another_length_is_named():
    def program(transport):
        collective("ring", transport, range(2)).all_reduce(torch.ones(4 + 2 * transport.rank))

    with pytest.raises(ManyhandsError, match=r"rank \d passed another tensor"):
        on_ranks(2, program)


# -- choosing -----------------------------------------------------------------------------------------


def chosen(name, group, **cluster):
    def program(transport):
        return collective(name, transport, group) if transport.rank in group else None

    return simulate(Cluster(**cluster), program).results[group[0]]


def test_auto_chooses_by_host():
    assert isinstance(chosen("auto", [2], workers=4), Alone)
    assert isinstance(chosen("auto", [2, 3], workers=4, hosts=2), Shared)
    assert isinstance(chosen("auto", [1, 2], workers=4, hosts=2), BySize)


@pytest.mark.parametrize("P, large", [(4, "rabenseifner"), (8, "rabenseifner"), (5, "ring"), (6, "ring")])
def test_auto_chooses_by_size_and_number_of_ranks(P, large):
    for m, name in ((16 * 1024, "butterfly"), (16 * 1024 + 1, large)):
        chosen, named = reduce_once("auto", P, m), reduce_once(name, P, m)
        assert (chosen.bytes, chosen.rounds) == (named.bytes, named.rounds)


@pytest.mark.parametrize(
    "name, group, words",
    [
        ("hypercube", [0, 1], "auto, native, shared, ring, tree, butterfly, rabenseifner"),
        ("shared", [0, 1], "hosts of a shared collective is 2"),
        ("ring", [1, 0], "in order"),
        ("ring", [0, 0], "each rank once"),
        ("ring", [1, 2], "one with rank 0"),
        ("ring", [0, 9], "among ranks 0 to 3"),
    ],
)
def test_what_cannot_work_is_refused(name, group, words):
    def program(transport):
        if transport.rank == 0:
            collective(name, transport, group)

    with pytest.raises(Refused, match=words):
        on_ranks(4, program)


@pytest.mark.parametrize("x", [torch.zeros(2, 3), torch.zeros(6)[::2]])
def test_only_a_contiguous_row_is_summed(x):
    with pytest.raises(Refused, match="one contiguous row"):
        on_ranks(2, lambda transport: collective("tree", transport, range(2)).all_reduce(x))


def test_an_unknown_closed_form_is_refused():
    with pytest.raises(Refused, match="lower bound"):
        all_reduce_seconds("star", 4, 1, L=1, G=1)


def test_shared_memory_has_little_to_spare_and_serves_similar_sizes():
    assert capacity(1) == capacity(1024) == 1024
    assert all(m <= capacity(m) < max(m + 1024, m * 9 / 8) for m in [1, 1025, 5000, 123_457, 2**20, 2**20 + 1])
    assert len({capacity(m) for m in range(2**20, 2**21)}) <= 17

"""Sums of encoded vectors: by all-gather, by stripes, and by hosts."""

from itertools import pairwise

import pytest
import torch
from summing import (
    CUT,
    NUMEL,
    WHOLE,
    ByLayer,
    Dithered,
    OneBit,
    Pairs,
    Recorder,
    added,
    adding,
    all_gradients,
    bits,
    decoded,
    gradient,
    left,
    states_of,
    sums_of,
    worker,
)

from manyhands.codecs import Feedback, Half, Raw, TernGrad, TopK
from manyhands.collectives.compressed import Gather, Hierarchical, LowRankSum, Sparcml, Stripes, gather, stripes
from manyhands.collectives.compressed.stripes import cut
from manyhands.core.encoder import codec_for_span
from manyhands.core.errors import Diverged, PeerLost, Refused
from manyhands.core.flat import Span
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.faults import Die, SlowLink
from manyhands.virtual.world import simulate
from repeats import repeated

CODECS = {
    "raw": Raw(),
    "half": Half(),
    "top": TopK(0.1),
    "one bit": OneBit(),
    "one bit by layer": OneBit(by_parameter=True),
    "top by layer": ByLayer(TopK(0.1)),
}
LOSSY = {"top": Feedback(TopK(0.03)), "one bit": Feedback(OneBit()), "by layer": Feedback(OneBit(by_parameter=True))}
SUMS = {
    "gather": lambda w: Gather(w, Feedback(TopK(0.1))),
    "gather raw": lambda w: Gather(w, Raw()),
    "gather dithered": lambda w: Gather(w, Dithered()),
    "gather at one scale": lambda w: Gather(w, TernGrad(shared=True)),
    "stripes": lambda w: Stripes(w, Feedback(OneBit())),
    "stripes at one scale": lambda w: Stripes(w, Feedback(TernGrad(shared=True))),
    "stripes raw": lambda w: Stripes(w, Raw()),
    "stripes dithered": lambda w: Stripes(w, Dithered()),
    "double": lambda w: Sparcml(w, Feedback(Pairs(0.1)), algorithm="double"),
    "split": lambda w: Sparcml(w, Feedback(Pairs(0.1)), algorithm="split"),
    "dense": lambda w: Sparcml(w, Feedback(Pairs(0.1)), algorithm="dense"),
    "dense, encoded": lambda w: Sparcml(w, Feedback(Pairs(0.1)), algorithm="dense", values=Feedback(Half())),
    "low rank": lambda w: LowRankSum(w, 2),
    "by host": lambda w: Hierarchical(w, lambda ranks: Gather(w, Feedback(TopK(0.1)), ranks)),
}

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
every_loss = pytest.mark.parametrize("codec", LOSSY.values(), ids=LOSSY.keys())
every_sum = pytest.mark.parametrize("make", SUMS.values(), ids=SUMS.keys())
every_size = pytest.mark.parametrize("P", [1, 2, 3, 4, 5, 8])


def slots():
    return worker_alone().flat.slots


def worker_alone():
    found = []
    simulate(Cluster(workers=1), lambda transport: found.append(worker(transport)))
    return found[0]


def alone(codec, x, span):
    """What a receiver decodes for a span."""
    return decoded(codec_for_span(codec, span, slots()), x[span.start : span.stop])


# -- what every sum promises --------------------------------------------------------------------------


@every_sum
@every_size
def test_all_ranks_end_with_the_same_bits(make, P):
    """Also with very unequal speeds and links, and if a rank overwrites its vector as soon as it has the sum."""
    faults = [SlowLink(rank=P - 1, factor=30.0)]
    uneven = Cluster(workers=P, hosts=-(-P // 2), speeds=[1, 0.1, 3, 9, 0.5, 1, 2, 0.2][:P], jitter=0.3, faults=faults)
    sums = sums_of(added(P, make, cluster=uneven, steps=6, spans=CUT))
    assert all(x.isfinite().all() and x.any() for x in sums)


@pytest.mark.parametrize("hosts", [None, 2], ids=["own hosts", "2 hosts"])
@pytest.mark.parametrize("P", [1, 2, 3, 5])
@every_sum
def test_all_ranks_agree_on_what_no_rank_has_touched(make, P, hosts):
    """Each step another rank has touched everything, or all but what no rank has; a short span has silent owners."""

    def program(transport):
        w, found = worker(transport), []
        one = make(w)
        for step, span in enumerate([WHOLE, Span(0, 3, 40), WHOLE]):
            w.step = step
            mine = {1, transport.rank % 4, 3} if step < 2 or transport.rank else set()
            found.append(one.all_reduce(gradient(transport.rank, step), span, frozenset(mine)))
        return found

    common = frozenset.intersection(*(frozenset({1, rank % 4, 3}) for rank in range(P)))
    results = simulate(Cluster(workers=P, hosts=min(P, hosts or P)), program).results
    assert results == [[common, common, frozenset()]] * P


@every_sum
def test_a_lost_peer_ends_it(make):
    mortal = Cluster(workers=4, hosts=2, faults=[Die(rank=2, at=0.0005)])
    with pytest.raises(PeerLost, match="rank 2 is lost: it died"):
        added(4, make, cluster=mortal, steps=10**4)


@every_sum
def test_an_empty_span_costs_nothing(make):
    run = added(3, make, spans=[Span(0, 5, 5)])
    assert run.bytes == [0, 0, 0]
    assert all(torch.equal(x[0], gradient(rank)) for rank, (x, _) in enumerate(run.results))


@every_sum
def test_what_is_outside_of_the_span_is_not_changed(make):
    span = Span(0, 100, 201)
    for rank, ((x,), _) in enumerate(added(2, make, spans=[span]).results):
        before = gradient(rank)
        assert torch.equal(x[:100], before[:100]) and torch.equal(x[201:], before[201:])
        assert not torch.equal(x[100:201], before[100:201])


@pytest.mark.parametrize("kind", [kind for kind in SUMS if kind != "gather dithered"])
def test_sizes_only_take_as_many_bytes_as_numbers(kind):
    """A stream has the expected number of elements, not an exact one."""
    runs = [added(4, SUMS[kind], spans=CUT, cluster=Cluster(4, hosts=4), sizes_only=only) for only in (False, True)]
    if kind in ("double", "split", "dense"):
        assert sum(runs[1].bytes) == pytest.approx(sum(runs[0].bytes), rel=0.15)
    elif kind == "dense, encoded":
        assert sum(runs[1].bytes) == pytest.approx(sum(runs[0].bytes), rel=0.05)
    else:
        assert runs[0].bytes == runs[1].bytes
        assert runs[0].seconds == pytest.approx(runs[1].seconds)


@pytest.mark.parametrize(
    "kind",
    ["gather", "stripes", "stripes at one scale", "double", "split", "dense, encoded", "low rank", "by host"],
)
def test_a_resumed_run_of_as_many_workers_continues_with_the_same_bits(kind):
    cluster = Cluster(workers=4, hosts=2)
    whole = sums_of(added(4, SUMS[kind], cluster=cluster, steps=8, spans=CUT))
    half = added(4, SUMS[kind], cluster=cluster, steps=4, spans=CUT)
    rest = added(4, SUMS[kind], cluster=cluster, steps=4, first=4, spans=CUT, saved=states_of(half))
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(whole[4:], sums_of(rest), strict=True))


@pytest.mark.parametrize("old, new", [(4, 2), (2, 4), (3, 1), (4, 3), (1, 2)])
@pytest.mark.parametrize(
    "kind", ["gather", "stripes", "stripes at one scale", "double", "dense, encoded", "low rank", "by host"]
)
def test_nothing_is_lost_when_the_number_of_workers_changes(kind, old, new):
    first = added(old, SUMS[kind], steps=5, spans=CUT)
    second = added(new, SUMS[kind], steps=5, first=5, spans=CUT, saved=states_of(first))
    sent = sum(sums_of(first)) + sum(sums_of(second))
    expected = all_gradients(old, 5) + all_gradients(new, 5, first=5)
    rest = left(states_of(second), "memory", "owner")
    torch.testing.assert_close(sent + rest, expected, rtol=0, atol=1e-12)
    assert rest.abs().max() > 1e-3, "something was left over"


@pytest.mark.parametrize("make", [Gather, Stripes])
def test_any_ranks_may_sum_without_the_others(make):
    def program(transport):
        x = gradient(transport.rank)
        if transport.rank in (1, 2, 4):
            make(worker(transport), Raw(), [1, 2, 4]).all_reduce(x, WHOLE)
        return x

    results = simulate(Cluster(workers=5), program).results
    total = gradient(1) + gradient(2) + gradient(4)
    for rank, x in enumerate(results):
        assert torch.equal(x, total if rank in (1, 2, 4) else gradient(rank))


@pytest.mark.parametrize("make", [Gather, Stripes])
def test_ranks_must_be_in_order(make):
    with pytest.raises(Refused, match="in order"):
        added(2, lambda w: make(w, Raw(), [1, 0]))


# -- all-gather ---------------------------------------------------------------------------------------


@every_codec
@every_size
def test_gather_adds_what_was_decoded_in_the_order_of_ranks(codec, P):
    (found,) = sums_of(added(P, lambda w: Gather(w, codec), spans=CUT))
    for span in CUT:
        expected = alone(codec, gradient(0), span)
        for rank in range(1, P):
            expected = expected + alone(codec, gradient(rank), span)
        assert torch.equal(bits(found[span.start : span.stop]), bits(expected))


@every_codec
@pytest.mark.parametrize("P", [1, 2, 5])
def test_gather_sends_its_payload_to_all_others(codec, P):
    run = added(P, lambda w: Gather(w, codec), spans=CUT)
    payload = sum(codec_for_span(codec, span, slots()).nbytes(gradient(0)[span.start : span.stop]) for span in CUT)
    assert run.bytes == [(P - 1) * payload] * P


def test_gather_sends_as_in_its_picture():
    log = []
    simulate(Cluster(workers=3), lambda t: Gather(worker(Recorder(t, log)), Raw()).all_reduce(gradient(t.rank), WHOLE))
    for rank, letter in enumerate("abc"):
        sent = ", ".join(f"{letter} → {to}" for _, _, frm, to, _ in log if frm == rank)
        assert f"    rank {rank}   {sent}" in gather.__doc__


@every_loss
def test_what_gather_sends_and_what_workers_have_left_is_all_there_was(codec):
    run = added(3, lambda w: Gather(w, codec), steps=50, spans=CUT)
    rest = left(states_of(run), "memory")
    torch.testing.assert_close(sum(sums_of(run)) + rest, all_gradients(3, 50), rtol=0, atol=1e-12)


# -- stripes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("P", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("span", [Span(1, 3, 3), Span(0, 5, 6), Span(0, 0, 64), Span(2, 7, 200), Span(0, 1, 4097)])
def test_stripes_are_whole_grains_in_order_and_of_about_the_same_length(P, span):
    found = cut(span, P)
    assert len(found) == P and {one.group for one in found} == {span.group}
    assert found[0].start == span.start and found[-1].stop == span.stop
    assert all(one.stop == other.start for one, other in pairwise(found))
    assert all((one.stop - span.start) % 64 == 0 for one in found if one.stop < span.stop)
    assert max(one.numel for one in found) <= 64 * -(-span.numel // (64 * P))


@every_codec
@every_size
def test_an_owner_encodes_again_what_it_has_added_up(codec, P):
    (found,) = sums_of(added(P, lambda w: Stripes(w, codec), spans=CUT))
    for span in CUT:
        for stripe in cut(span, P):
            if stripe.numel:
                total = torch.zeros(NUMEL, dtype=torch.float64)
                for rank in range(P):
                    total[stripe.start : stripe.stop] += alone(codec, gradient(rank), stripe)
                assert torch.equal(found[stripe.start : stripe.stop], alone(codec, total, stripe))


@every_codec
@every_size
def test_stripes_are_sent_to_their_owners_and_back(codec, P):
    run = added(P, lambda w: Stripes(w, codec))
    sizes = [codec_for_span(codec, one, slots()).nbytes(gradient(0)[one.start : one.stop]) for one in cut(WHOLE, P)]
    assert run.bytes == [sum(sizes) - size + (P - 1) * size for size in sizes]


def test_stripes_of_raw_numbers_cost_as_much_as_a_ring():
    vector, span = torch.zeros(NUMEL, dtype=torch.float64), Span(0, 0, 512)

    def program(transport):
        Stripes(worker(transport), Raw()).all_reduce(vector.clone(), span)

    assert simulate(Cluster(workers=4), program).bytes == [2 * 8 * 512 * 3 // 4] * 4


@every_loss
@pytest.mark.parametrize("spans", [[WHOLE], CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("P", [1, 3, repeated(4)])
def test_sums_and_what_workers_and_owners_have_left_are_all_there_was(codec, spans, P):
    run = added(P, lambda w: Stripes(w, codec), steps=50, spans=spans)
    workers, owners = left(states_of(run), "memory"), left(states_of(run), "owner")
    torch.testing.assert_close(sum(sums_of(run)) + owners + workers, all_gradients(P, 50), rtol=0, atol=1e-12)
    assert workers.any()
    assert owners.any() or P == 1, "of k numbers the k largest are all"


def test_only_an_owner_has_something_left_of_its_stripe():
    states = states_of(added(4, SUMS["stripes"], steps=3))
    for stripe, state in zip(cut(WHOLE, 4), states, strict=True):
        (here,) = left([state], "owner").nonzero().unbind(1)
        assert here.numel() and stripe.start <= here.min() and here.max() < stripe.stop


@every_size
def test_each_half_works_alone(P):
    def program(transport):
        one, x = Stripes(worker(transport), Raw()), gradient(transport.rank)
        own = one.reduce_scatter(x, WHOLE)
        reduced = x.clone()
        x.fill_(transport.rank)
        one.all_gather(x, WHOLE)
        return own, reduced, x

    results, total = simulate(Cluster(workers=P), program).results, sum(gradient(rank) for rank in range(P))
    owners = torch.cat([torch.full((one.numel,), float(rank)) for rank, one in enumerate(cut(WHOLE, P))])
    for rank, (own, reduced, gathered) in enumerate(results):
        inside = slice(own.start, own.stop)
        expected = gradient(rank)
        expected[inside] = total[inside]
        assert torch.equal(reduced, expected)
        assert torch.equal(gathered, owners.double())


def test_stripes_are_sent_as_in_the_picture():
    log = []
    simulate(Cluster(workers=3), lambda t: Stripes(worker(Recorder(t, log)), Raw()).all_reduce(gradient(t.rank), WHOLE))
    for rank in range(3):
        to = [
            [to for kind, _, frm, to, _ in log if (kind, frm) == (half, rank)]
            for half in ("reduce-scatter", "all-gather")
        ]
        line = "   ".join(f"x{rank}[{other}] → {other}" for other in to[0])
        assert f"    rank {rank}     {line}       s[{rank}] → {', '.join(map(str, to[1]))}" in stripes.__doc__


def test_an_owner_names_a_sum_that_is_too_large():
    def huge(rank, step):
        return torch.full((NUMEL,), 1e308, dtype=torch.float64)

    with pytest.raises(Diverged, match="a number to be sent for"):
        added(2, lambda w: Stripes(w, OneBit()), vectors=huge)


# -- hosts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("P, hosts", [(1, 1), (4, 1), (4, 2), (5, 2), (6, 3), (3, 3)])
def test_ranks_of_a_host_are_one_rank_of_the_outer_sum(P, hosts):
    def by_host(w):
        return Hierarchical(w, lambda ranks: Gather(w, Half(), ranks))

    cluster = Cluster(workers=P, hosts=hosts)
    run = added(P, by_host, cluster=cluster)
    placed = cluster.placement()
    expected = torch.zeros(NUMEL, dtype=torch.float64)
    for host in range(hosts):
        expected += decoded(Half(), sum(gradient(rank) for rank in range(P) if placed[rank] == host))
    assert torch.equal(sums_of(run)[0], expected)
    leaders = [placed.index(host) for host in range(hosts)]
    assert run.bytes == [2 * NUMEL * (hosts - 1) if rank in leaders else 0 for rank in range(P)]


def test_only_the_first_of_a_host_remembers():
    states = states_of(added(6, SUMS["by host"], cluster=Cluster(workers=6, hosts=2), steps=2))
    assert [bool(state) for state in states] == [True, False, False, True, False, False]


def test_nothing_is_lost_when_hosts_change():
    first = added(4, SUMS["by host"], cluster=Cluster(workers=4, hosts=2), steps=4)
    second = added(3, SUMS["by host"], cluster=Cluster(3, hosts=3), steps=4, first=4, saved=states_of(first))
    sent = sum(sums_of(first)) + sum(sums_of(second)) + left(states_of(second), "memory")
    torch.testing.assert_close(sent, all_gradients(4, 4) + all_gradients(3, 4, first=4), rtol=0, atol=1e-12)


def test_a_program_is_the_same_in_every_run():
    one, two = (simulate(Cluster(workers=3), adding(SUMS["stripes dithered"], steps=3)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(sums_of(one), sums_of(two), strict=True))

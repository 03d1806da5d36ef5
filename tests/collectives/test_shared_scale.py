"""One scale for all workers: which codecs share it, what it costs, and on which levels sums lie then."""

import math

import pytest
import torch
from summing import CUT, NUMEL, WHOLE, added, bits, gradient, states_of, sums_of, worker

from manyhands.codecs import ByLayer, Feedback, Raw, TernGrad, TopK, WarmUp
from manyhands.collectives import collective
from manyhands.collectives.compressed import Gather, Hierarchical, Sparcml, Stripes
from manyhands.core.codec import shares
from manyhands.core.encoder import codec_for_span
from manyhands.core.errors import BadPayload, Diverged, PeerLost
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.faults import Die
from manyhands.virtual.world import simulate
from repeats import every

OWN, ONE = TernGrad(clip=0), TernGrad(clip=0, shared=True)
MATRIX = slice(0, 7 * 83)
"""The first parameter, with numbers enough for all levels."""
PARAMETERS = 4


def spread(rank, step=0):
    """Numbers that are seldom ternarised to 0, and on every worker of another size."""
    x = gradient(rank, step)
    return (1 + rank / 10) * x.sign() * (0.7 + 0.3 * x.abs().clamp(max=1))


def largest(P, where, codec=ONE, vectors=spread):
    return max(float(codec.scale(vectors(rank)[where], None)) for rank in range(P))


def levels(x, s):
    """How many scales each number is, and none of them is anything else."""
    many = x / s
    torch.testing.assert_close(many, many.round(), rtol=0, atol=1e-12)
    return set(many.round().int().tolist())


# -- what it is good for ------------------------------------------------------------------------------


@pytest.mark.parametrize("P", [1, 2, 3, 4])
def test_a_sum_lies_on_2P_plus_1_levels(P):
    (found,) = sums_of(added(P, lambda w: Gather(w, ONE), vectors=spread))
    s = largest(P, MATRIX)
    assert levels(found[MATRIX], s) - {0} == set(range(-P, P + 1)) - {0}
    (found,) = sums_of(added(P, lambda w: Gather(w, OWN), vectors=spread))
    assert P == 1 or len(found[MATRIX].unique()) > 2 * P + 1, "each with its own scale makes more"


@pytest.mark.parametrize("P", [2, 3])
def test_owners_of_stripes_have_such_sums_too(P):
    def program(transport):
        one, x = Stripes(worker(transport), ONE), spread(transport.rank)
        return one.reduce_scatter(x, WHOLE), x

    for own, x in simulate(Cluster(workers=P), program).results:
        within = slice(own.start, min(own.stop, MATRIX.stop))
        if own.start < MATRIX.stop:
            s = largest(P, within)
            assert {-P, P} < levels(x[within], s) <= set(range(-P, P + 1))


@pytest.mark.parametrize("make", every(2, [Gather, Stripes]))
def test_the_sum_is_unbiased(make):
    P, times = 3, 100
    sums = torch.stack(
        sums_of(added(P, lambda w: make(w, ONE), steps=times, vectors=lambda rank, _: spread(rank), spans=CUT))
    )
    expected = sum(spread(rank) for rank in range(P))
    off, error = sums.mean(0) - expected, sums.std(0).max() / math.sqrt(times)
    assert off.abs().max() < 5 * error, "each number within five standard errors"
    assert (off * expected.sign()).mean().abs() < 5 * error / math.sqrt(NUMEL), "and no part of all is missing"
    assert (sums[0] - sums[1]).any(), "but only on the average"


def test_each_clips_by_its_own_numbers():
    (found,) = sums_of(added(2, lambda w: Gather(w, TernGrad(1.0, shared=True)), vectors=lambda r, _: 9**r * spread(r)))
    s = float(TernGrad(1.0).scale(9 * spread(1)[MATRIX], None))
    assert levels(found[MATRIX], s) <= set(range(-2, 3))
    small = TernGrad(1.0).scale(spread(0)[MATRIX], None)
    assert small < s / 5, "of the other most become 0"


@pytest.mark.parametrize("make", [Gather, Stripes])
@pytest.mark.parametrize("clip", [0, 2.5])
def test_one_worker_alone_computes_the_same(make, clip):
    alone, agreed = (
        sums_of(added(1, lambda w, shared=shared: make(w, TernGrad(clip, shared)), steps=3, spans=CUT))
        for shared in (False, True)
    )
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(alone, agreed, strict=True))


def test_random_numbers_do_not_depend_on_the_order_of_waiting():
    """While one rank waits for scales the others draw random numbers, here in the same process."""
    uneven = Cluster(workers=3, hosts=3, speeds=[1, 0.01, 9], jitter=0.5)
    one, other = (
        sums_of(added(3, lambda w: Gather(w, ONE), steps=4, spans=CUT, cluster=cluster)) for cluster in (None, uneven)
    )
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(one, other, strict=True))


# -- what it costs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes_only", [False, True])
@pytest.mark.parametrize("P", [1, 2, 5])
def test_one_number_for_each_parameter_is_max_reduced_first(P, sizes_only):
    def bytes_of(make, codec):
        return added(P, lambda w: make(w, codec), sizes_only=sizes_only).bytes

    def bytes_of_max(numbers):
        x = torch.zeros(numbers, dtype=torch.float64)
        return simulate(Cluster(workers=P), lambda t: collective("butterfly", t, range(P)).all_reduce(x.clone())).bytes

    gathered = bytes_of(Gather, OWN)
    assert bytes_of(Gather, ONE) == [a + b for a, b in zip(gathered, bytes_of_max(PARAMETERS), strict=True)]
    more = [a - b for a, b in zip(bytes_of(Stripes, ONE), bytes_of(Stripes, OWN), strict=True)]
    assert more == bytes_of_max(PARAMETERS + P - 1), "each cut makes one more piece"


def test_a_parameter_that_shares_nothing_has_0():
    codec = ByLayer(ONE, least=20)
    x = torch.arange(1.0, NUMEL + 1)
    laid = codec_for_span(codec, WHOLE, worker_places())
    assert laid.scale(x, None).tolist() == [7 * 83, 0, 7 * 83 + 7 + 66, 0]
    assert laid.scale(x.to("meta"), None).shape == (PARAMETERS,)


def worker_places():
    found = []
    simulate(Cluster(workers=1), lambda transport: found.append(worker(transport).flat.slots))
    return found[0]


# -- within other codecs and sums ---------------------------------------------------------------------


def test_which_codecs_share():
    assert shares(ONE) and not shares(OWN) and not shares(Raw())
    assert shares(Feedback(ONE)) and not shares(Feedback(OWN))
    assert shares(ByLayer(ONE)) and shares(ByLayer(TopK(0.1), 9, ONE)) and not shares(ByLayer(OWN))
    assert shares(ByLayer(Feedback(ONE), 9)) and shares(codec_for_span(Feedback(ONE), WHOLE, worker_places()))
    assert not shares(codec_for_span(OWN, WHOLE, worker_places()))


def test_with_feedback_the_scale_is_that_of_all_that_is_to_be_sent():
    codec, x = Feedback(ONE), torch.tensor([1.0, -2.0, 0.5])
    memory = torch.tensor([0.0, -3.0, 0.0])
    assert codec.scale(x, memory).tolist() == [5.0]
    assert memory.tolist() == [0.0, -3.0, 0.0], "and nothing is sent yet"
    out = torch.empty(3)
    codec.decode(codec.encode_at(x, memory, torch.tensor([8.0])), out)
    assert out.abs().unique().tolist() in ([0.0, 8.0], [0.0], [8.0])
    assert (out + memory).tolist() == [1.0, -5.0, 0.5]


def test_small_parameters_send_what_was_not_used_before_at_one_scale_too():
    codec = ByLayer(Feedback(TopK(0.5)), 9, ONE)
    x, memory = torch.ones(2), torch.tensor([2.0, 0.0])
    assert codec.scale(x, memory).tolist() == [3.0]
    payload = codec.encode_at(x, memory, torch.tensor([3.0]))
    out = torch.empty(2)
    codec.decode(payload, out)
    assert out[0] == 3 and (out + memory).tolist() == [3.0, 1.0]


def test_between_hosts_only_their_first_ranks_agree():
    cluster = Cluster(workers=4, hosts=2)
    run = added(4, lambda w: Hierarchical(w, lambda ranks: Gather(w, ONE, ranks)), cluster=cluster, vectors=spread)
    hosts = [spread(0) + spread(1), spread(2) + spread(3)]
    s = max(float(ONE.scale(x[MATRIX], None)) for x in hosts)
    assert levels(sums_of(run)[0][MATRIX], s) <= set(range(-2, 3))
    assert [sent > 0 for sent in run.bytes] == [True, False, True, False]


@pytest.mark.parametrize(
    "make",
    [
        lambda w: Gather(w, WarmUp(ByLayer(Feedback(TopK(0.01)), 20, ONE), 5)),
        lambda w: Stripes(w, ByLayer(Feedback(TopK(0.1)), 20, ONE)),
        lambda w: Sparcml(w, ByLayer(Feedback(TopK(0.1)), 20, ONE), algorithm="split"),
        lambda w: Gather(w, ByLayer(Feedback(ONE), 20, ONE)),
    ],
    ids=["warming up", "stripes", "sparcml", "both"],
)
def test_some_parameters_may_share_and_others_not(make):
    run = added(3, make, steps=8, spans=CUT)
    sent = sum(sums_of(run))
    assert sent.isfinite().all() and (sent != 0).double().mean() > 0.1
    assert all(state for state in states_of(run)), "all remember something"


# -- what goes wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scales",
    [
        torch.ones(PARAMETERS - 1, dtype=torch.float64),
        torch.ones(PARAMETERS),
        torch.full((PARAMETERS,), math.nan, dtype=torch.float64),
        torch.full((PARAMETERS,), math.inf, dtype=torch.float64),
    ],
    ids=["fewer", "of another kind", "nan", "infinite"],
)
def test_what_can_be_no_scales_is_refused(scales):
    def program(transport):
        one = Gather(worker(transport), ONE)
        if transport.rank == 1:
            one._exchange._collective.all_reduce(scales, op="max")
        else:
            one.all_reduce(gradient(0), WHOLE)

    with pytest.raises(BadPayload, match=r"another tensor|must be >= 0 and finite"):
        simulate(Cluster(workers=2), program)


def test_a_nan_is_named_before_anything_is_sent():
    def harmed(rank, step):
        x = gradient(rank, step)
        x[3] = math.nan if rank == 1 else x[3]
        return x

    with pytest.raises(Diverged, match="a number to be sent for a is nan on rank 1"):
        added(3, lambda w: Gather(w, ONE), vectors=harmed)


def test_a_rank_that_is_lost_before_it_has_sent_its_scale_is_named():
    with pytest.raises(PeerLost, match="rank 1 is lost: it died"):
        added(3, lambda w: Gather(w, ONE), steps=10**4, cluster=Cluster(workers=3, faults=[Die(rank=1, at=0.0004)]))

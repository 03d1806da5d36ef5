"""PowerSGD's sum: two thin matrices, and what they do not contain is remembered by the workers."""

import random

import pytest
import torch
from summing import NUMEL, WHOLE, added, all_gradients, bits, gradient, left, states_of, sums_of, worker

from manyhands.collectives.compressed import LowRankSum
from manyhands.collectives.compressed.low_rank import orthonormal
from manyhands.core.errors import Refused
from manyhands.core.flat import Span
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.world import simulate

A = slice(0, 7 * 83)
"""The one parameter of the model that is large enough for rank 2 or 3."""
every_size = pytest.mark.parametrize("P", [1, 2, 3, 4, 5, 8])


def low_rank(rank=1, least_rate=2.0, **more):
    return lambda w: LowRankSum(w, rank, least_rate, **more)


@every_size
def test_what_is_no_large_matrix_is_summed_as_it_is(P):
    (found,) = sums_of(added(P, low_rank(2, algorithm="ring")))
    total = sum(gradient(rank) for rank in range(P))
    torch.testing.assert_close(found[A.stop :], total[A.stop :], rtol=0, atol=1e-13)
    assert torch.linalg.matrix_rank(found[A].view(7, 83)) == 2


@every_size
def test_the_sum_is_that_of_the_equations(P):
    """A step of the power method on the sum, from the Q that all workers draw alike."""
    sums = sums_of(added(P, low_rank(2), steps=3))
    Q, left_of = None, [torch.zeros(7, 83, dtype=torch.float64) for _ in range(P)]
    for step, found in enumerate(sums):
        M = [e + gradient(rank, step)[A].view(7, 83) for rank, e in enumerate(left_of)]
        if Q is None:
            generator = torch.Generator().manual_seed(random.Random("3/a").getrandbits(63))
            Q = torch.linalg.qr(torch.randn(83, 2, generator=generator)).Q.double()
        thin = torch.linalg.qr(sum(M) @ Q).Q
        Q = sum(M).T @ thin
        torch.testing.assert_close(found[A].view(7, 83), thin @ Q.T, rtol=0, atol=1e-12)
        left_of = [m - thin @ Q.T / P for m in M]


@pytest.mark.parametrize("rank", [2, 3])
@every_size
def test_nothing_is_lost_over_all_workers(P, rank):
    run = added(P, low_rank(rank), steps=20)
    sent, rest = sum(sums_of(run)), left(states_of(run), "memory")
    torch.testing.assert_close(sent + rest, all_gradients(P, 20), rtol=0, atol=1e-12)
    assert rest[A].any() and not rest[A.stop :].any()


@pytest.mark.parametrize("rank", [7, 100])
def test_as_many_columns_as_the_matrix_has_rows_are_exact(rank):
    run = added(3, low_rank(rank, 0.1), steps=2)
    for step, found in enumerate(sums_of(run)):
        expected = sum(gradient(one, step) for one in range(3))
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-14)
    assert left(states_of(run), "memory").abs().max() < 1e-13


@pytest.mark.parametrize(
    "rank, least_rate, names",
    [(1, 2.0, {"a", "c"}), (1, 3.0, {"a"}), (3, 2.0, {"a"}), (4, 2.0, set()), (1, 6.5, set()), (9, 0.1, {"a", "c"})],
)
def test_a_matrix_is_large_if_that_saves_enough(rank, least_rate, names):
    """a is 7 x 83: 581 numbers instead of 90 r. c is 3 x 22: 66 instead of 25 r; of rank 3 at most."""
    run = added(2, low_rank(rank, least_rate, algorithm="butterfly"))
    shapes = {"a": (7, 83), "c": (3, 22)}
    saved = sum(n * m - min(rank, n, m) * (n + m) for n, m in (shapes[name] for name in names))
    assert {name.removeprefix("q/") for name in states_of(run)[0] if name.startswith("q/")} == names
    assert run.bytes == [8 * (NUMEL - saved)] * 2


def test_a_span_takes_three_all_reduces():
    run = added(4, low_rank(1, 1.0, algorithm="butterfly"))
    assert run.rounds == 3 * 2
    assert run.bytes == [2 * 8 * (7 + 13 + 90 + 25)] * 4


def test_a_parameter_that_is_cut_is_summed_as_it_is():
    spans = [Span(0, 0, 300), Span(0, 300, NUMEL)]
    (found,) = sums_of(added(2, low_rank(2), spans=spans))
    assert torch.equal(found, gradient(0) + gradient(1))


def test_small_gradients_do_not_vanish():
    def program(transport):
        w = worker(transport)
        total, last = LowRankSum(w, 1, 0.5), None
        for _ in range(3):
            last = torch.full((18,), 1e-30)
            total.all_reduce(last, Span(1, 0, 18))
        return last

    torch.testing.assert_close(simulate(Cluster(workers=2), program).results[0] * 1e30, torch.full((18,), 2.0))


def test_a_gradient_of_zeros_is_one():
    def zeros(rank, step):
        return torch.zeros(NUMEL, dtype=torch.float64)

    assert not any(x.any() for x in sums_of(added(2, low_rank(2), steps=3, vectors=zeros)))


def test_the_columns_are_orthonormal():
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    x[:, 2] = x[:, 1]
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        q = orthonormal(x.to(dtype))
        assert q.dtype == dtype
        torch.testing.assert_close((q.T @ q).float(), torch.eye(3), rtol=0, atol=tolerance)


# -- checkpoints --------------------------------------------------------------------------------------


def test_q_is_the_same_on_all_and_the_remainder_is_each_workers_own():
    states = states_of(added(3, low_rank(2), steps=4))
    assert all(state.keys() == {"memory/a", "q/a"} for state in states)
    assert all(torch.equal(bits(state["q/a"]), bits(states[0]["q/a"])) for state in states)
    assert not torch.equal(states[0]["memory/a"], states[1]["memory/a"])
    assert states[0]["q/a"].shape == (83, 2)


def test_q_of_another_rank_is_refused():
    states = states_of(added(2, low_rank(2)))
    with pytest.raises(Refused, match=r"the saved shape of Q of a is \(83, 2\), but must be that of rank 3"):
        added(2, low_rank(3), saved=states)


def test_before_the_first_step_there_is_nothing_to_save():
    assert states_of(added(2, low_rank(), steps=0)) == [{}, {}]


@pytest.mark.parametrize("rank, least_rate, words", [(0, 2.0, "rank is 0"), (1, 0.0, "least_rate is 0.0")])
def test_knobs_that_make_no_sense_are_refused(rank, least_rate, words):
    with pytest.raises(Refused, match=words):
        added(1, low_rank(rank, least_rate))


def test_some_of_the_ranks_may_sum():
    def program(transport):
        x = gradient(transport.rank)
        if transport.rank in (0, 2):
            LowRankSum(worker(transport), 7, 0.1, ranks=[0, 2]).all_reduce(x, WHOLE)
        return x

    results = simulate(Cluster(workers=3), program).results
    torch.testing.assert_close(results[2], gradient(0) + gradient(2), rtol=0, atol=1e-13)
    assert torch.equal(results[1], gradient(1))

"""Every all-reduce: the plain sum, the same bits everywhere, `x` free at return, bytes as the closed form says."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from manyhands.topology.collectives import all_reducer
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.faults import SlowLink
from manyhands.virtual.world import simulate

MESSAGES = ["ring", "tree", "butterfly", "rabenseifner"]
ALGORITHMS = [*MESSAGES, "shared", "native", "auto"]
SIZES = [1, 2, 3, 5, 8]
LENGTHS = [1, 2, 3, 7, 16, 1000]

every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)
every_size = pytest.mark.parametrize("P", SIZES)


def cluster(name, P, **more):
    return Cluster(workers=P, hosts=1 if name == "shared" else None, **more)


def whole_numbers(rank, m, dtype=torch.float32):
    return (torch.arange(m) * 7 % 31 - 3 * rank).to(dtype)


def fractions(rank, m, dtype=torch.float32):
    return torch.randn(m, generator=torch.Generator().manual_seed(1000 * m + rank), dtype=torch.float64).to(dtype)


def reduced(name, P, make, lengths=LENGTHS, dtype=torch.float32):
    """For each length what every rank ends with, all by one collective."""

    def program(transport):
        collective = all_reducer(name, transport, range(P))
        outcomes = []
        for m in lengths:
            x = make(transport.rank, m, dtype)
            collective.all_reduce(x)
            outcomes.append(x)
        return outcomes

    return list(zip(*simulate(cluster(name, P), program).results, strict=True))


@every_size
@every_algorithm
def test_whole_numbers_give_exactly_the_plain_sum(name, P):
    for dtype in (torch.float32, torch.float64, torch.int64):
        for m, outcomes in zip(LENGTHS, reduced(name, P, whole_numbers, dtype=dtype), strict=True):
            expected = sum(whole_numbers(rank, m, dtype) for rank in range(P))
            assert all(torch.equal(x, expected) and x.dtype == dtype for x in outcomes)


@every_size
@every_algorithm
def test_fractions_give_the_sum_and_the_same_bits_on_all_ranks(name, P):
    for m, outcomes in zip(LENGTHS, reduced(name, P, fractions), strict=True):
        expected = sum(fractions(rank, m, torch.float64) for rank in range(P))
        torch.testing.assert_close(outcomes[0].double(), expected, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(x, outcomes[0]) for x in outcomes)


@pytest.mark.parametrize("group", [[3], [1, 4], [0, 2, 5], [1, 2, 4, 6, 7]], ids=str)
@every_algorithm
def test_a_group_may_be_any_ranks_and_leaves_the_others_alone(name, group):
    def program(transport):
        x = whole_numbers(transport.rank, 7)
        if transport.rank in group:
            all_reducer(name, transport, group).all_reduce(x)
        return x

    results = simulate(cluster(name, 8), program).results
    total = sum(whole_numbers(rank, 7) for rank in group)
    for rank, x in enumerate(results):
        assert torch.equal(x, total if rank in group else whole_numbers(rank, 7))


UNEVEN = {
    "speeds": [1.0, 0.1, 3.0, 0.5, 2.0, 0.2, 1.0, 0.7],
    "jitter": 0.5,
    "cpu_per_byte": 1e-7,
    "faults": [SlowLink(rank=0, factor=30.0), SlowLink(rank=3, factor=7.0)],
}


@pytest.mark.parametrize("P", [2, 3, 5, 8])
@every_algorithm
def test_the_caller_may_overwrite_x_at_once_however_late_the_others_are(name, P):
    uneven = UNEVEN | {"speeds": UNEVEN["speeds"][:P], "faults": UNEVEN["faults"][: 1 + (P > 3)]}

    def program(transport):
        collective = all_reducer(name, transport, range(P))
        whole = torch.zeros(64)
        right = True
        for call in range(12):
            x = whole[: (1, 5, 40, 64)[call % 4]] if call % 3 else torch.zeros(50)
            transport.spend(1e-4 * ((transport.rank * 5 + call * 3) % 7))
            x.fill_(transport.rank + 10.0 * call)
            collective.all_reduce(x)
            right &= bool((x == P * (P - 1) / 2 + 10.0 * call * P).all())
            x.fill_(-1.0)
        return right

    assert all(simulate(cluster(name, P, **uneven), program, seed=P).results)


@every_algorithm
def test_overlapping_groups_and_ranks_that_are_ahead_are_not_mixed_up(name):
    groups = {"left": [0, 1, 2], "right": [1, 2, 3, 4]}

    def program(transport):
        mine = {at: all_reducer(name, transport, group) for at, group in groups.items() if transport.rank in group}
        seen = []
        for call in range(6):
            for at, collective in mine.items():
                x = torch.full((9,), float(call * 100 + transport.rank))
                collective.all_reduce(x)
                seen.append((at, call, x[0].item()))
                x.zero_()
            transport.spend(1e-4 * ((transport.rank + call) % 3))
        return seen

    for seen in simulate(cluster(name, 5), program).results:
        for at, call, total in seen:
            assert total == sum(groups[at]) + 100 * call * len(groups[at])


@every_algorithm
def test_two_groups_may_sum_at_once_in_two_activities(name):
    groups = [[0, 1, 2], [1, 2, 3], [0, 1, 2, 3]]

    def program(transport):
        totals = {}

        def use(number):
            collective = all_reducer(name, transport, groups[number])
            for call in range(5):
                transport.spend(1e-4 * ((transport.rank + call + number) % 3))
                x = torch.full((4,), float(10**number * (transport.rank + call)))
                collective.all_reduce(x)
                totals[number, call] = x[0].item()

        for activity in [transport.spawn(partial(use, n)) for n, group in enumerate(groups) if transport.rank in group]:
            activity.join()
        return totals

    for totals in simulate(cluster(name, 4), program).results:
        for (number, call), total in totals.items():
            assert total == 10**number * (sum(groups[number]) + call * len(groups[number]))


def elements_sent(name, P, m):
    """By all ranks together."""
    power = 1 << (P.bit_length() - 1)
    folded = 2 * m * (P - power)
    return {
        "ring": 2 * m * (P - 1),
        "tree": 2 * m * (P - 1),
        "butterfly": m * power * (power.bit_length() - 1) + folded,
        "rabenseifner": 2 * m * (power - 1) + folded,
        "shared": 0,
    }[name]


@every_size
@pytest.mark.parametrize("name", [*MESSAGES, "shared"])
def test_bytes_equal_the_closed_form_also_when_there_are_only_sizes(name, P):
    for m in LENGTHS:
        runs = []
        for device in ("cpu", "meta"):

            def program(transport, device=device, m=m):
                all_reducer(name, transport, range(P)).all_reduce(torch.zeros(m, dtype=torch.float64, device=device))

            runs.append(simulate(cluster(name, P), program))
        real, sizes_only = runs
        assert sum(real.bytes) == 8 * elements_sent(name, P, m)
        assert (real.bytes, real.rounds, real.seconds) == (sizes_only.bytes, sizes_only.rounds, sizes_only.seconds)


@every_algorithm
def test_a_vector_that_requires_a_gradient_is_summed_in_place_without_one(name):
    def program(transport):
        x = torch.ones(5, requires_grad=True)
        all_reducer(name, transport, range(3)).all_reduce(x)
        return x

    for x in simulate(cluster(name, 3), program).results:
        assert x.tolist() == [3.0] * 5 and x.is_leaf and x.grad_fn is None

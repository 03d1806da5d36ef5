"""What every collective promises: plain results, equal bits on all ranks, arguments free at return, documented bytes.

The cases iterate over `ALGORITHMS`: a new algorithm is tested by being there. If its docstring says how much it sends,
that becomes an entry of `ELEMENTS_SENT`.
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from part_modules import classes_with, modules
from worlds import WORLDS, by_rank, die

from manyhands import collectives
from manyhands.collectives import ALGORITHMS, collective
from manyhands.collectives.choose import Alone, BySize
from manyhands.core.errors import PeerLost, Refused
from manyhands.core.port import even_spans
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.faults import SlowLink
from manyhands.virtual.world import simulate

SIZES = [1, 2, 3, 5, 8]
LENGTHS = [0, 1, 2, 3, 7, 16, 1000]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8]

every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)
every_size = pytest.mark.parametrize("P", SIZES)


def cluster(name, P, **more):
    return Cluster(workers=P, hosts=1 if name == "shared" else None, **more)


def whole_numbers(rank, m, dtype=torch.float32):
    return (torch.arange(m) * 7 % 31 + 3 * rank).to(dtype)


@cache
def drawn(rank, m):
    return torch.randn(m, generator=torch.Generator().manual_seed(1000 * m + rank))


def fractions(rank, m):
    return drawn(rank, m).clone()


def test_every_algorithm_has_a_name():
    """One in a new file is tested as soon as it has a line in `ALGORITHMS`; without one it could not be chosen."""
    parts = modules(collectives).values()
    found = [kind for module in parts for kind in classes_with(module, "all_reduce", "barrier")]
    assert set(found) - {Alone, BySize} <= set(ALGORITHMS.values())


# -- operations: each gives what a rank ends with, and says what that must be --------------------------


def all_reduce(one, ranks, me, m, make):
    x = make(me, m)
    one.all_reduce(x)
    return x


def all_reduce_max(one, ranks, me, m, make):
    x = make(me, m)
    one.all_reduce(x, op="max")
    return x


def reduce_scatter(one, ranks, me, m, make):
    x = make(me, m)
    result = one.reduce_scatter(x)
    assert torch.equal(x, make(me, m)), "the argument is not changed"
    x.fill_(1)  # nor read any more
    return result


def all_gather(one, ranks, me, m, make):
    span = even_spans(m, len(ranks))[ranks.index(me)]
    mine, out = make(me, m)[span].clone(), torch.ones_like(make(me, m))
    one.all_gather(mine, out)
    mine.fill_(1)
    in_place = torch.ones_like(out)
    in_place[span] = make(me, m)[span]
    one.all_gather(in_place[span], in_place)
    assert torch.equal(in_place, out)
    return out


def broadcast(one, ranks, me, m, make):
    found = []
    for root in {ranks[0], ranks[-1], ranks[len(ranks) // 2]}:
        x = make(me, m)
        one.broadcast(x, root)
        found.append(x - make(root, m))
    return torch.cat(found)


def lengths_to(frm, to, m):
    """How much one rank sends to another: also nothing, and not the same in both directions."""
    return m * ((2 * frm + to) % 3) // 2


def all_to_all(one, ranks, me, m, make):
    like = make(me, m)
    xs = [make(10 * me + rank, lengths_to(me, rank, m)).to(like.dtype) for rank in ranks]
    outs = [like.new_ones(lengths_to(rank, me, m)) for rank in ranks]
    one.all_to_all(xs, outs)
    for x in xs:
        x.fill_(1)
    return torch.cat(outs)


def total(ranks, m, make):
    return sum((make(rank, m) for rank in ranks[1:]), make(ranks[0], m))


OPERATIONS = {
    all_reduce: lambda ranks, me, m, make: total(ranks, m, make),
    all_reduce_max: lambda ranks, me, m, make: torch.stack([make(rank, m) for rank in ranks]).amax(0),
    reduce_scatter: lambda ranks, me, m, make: total(ranks, m, make)[even_spans(m, len(ranks))[ranks.index(me)]],
    all_gather: lambda ranks, me, m, make: torch.cat(
        [make(rank, m)[span] for rank, span in zip(ranks, even_spans(m, len(ranks)), strict=True)]
    ),
    broadcast: lambda ranks, me, m, make: torch.zeros(
        m * len({ranks[0], ranks[-1], ranks[len(ranks) // 2]}), dtype=make(me, m).dtype
    ),
    all_to_all: lambda ranks, me, m, make: torch.cat(
        [make(10 * rank + me, lengths_to(rank, me, m)).to(make(me, m).dtype) for rank in ranks]
    ),
}
SAME_ON_ALL = [all_reduce, all_reduce_max, all_gather]


def operate(name, ranks, lengths, make, transport):
    """What this rank ends with, by operation and length, all with one collective and barriers in between."""
    if transport.rank not in ranks:
        return None
    one, found = collective(name, transport, ranks), {}
    for m in lengths:
        for operation in OPERATIONS:
            found[operation.__name__, m] = operation(one, ranks, transport.rank, m, make)
        one.barrier()
    return found


def check(results, ranks, lengths, make, tolerance=0.0):
    for rank in ranks:
        for m in lengths:
            for operation, expected in OPERATIONS.items():
                found = results[rank][operation.__name__, m]
                wanted = expected(ranks, rank, m, make)
                assert found.dtype == make(rank, m).dtype
                torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, msg=operation.__name__)
                if operation in SAME_ON_ALL:
                    assert torch.equal(found, results[ranks[0]][operation.__name__, m])


@every_size
@every_algorithm
def test_whole_numbers_give_exactly_the_plain_result(name, P):
    ranks = list(range(P))
    for dtype in DTYPES:
        make = partial(whole_numbers, dtype=dtype)
        lengths = LENGTHS if dtype == torch.float32 else [0, 7, 16]
        check(simulate(cluster(name, P), partial(operate, name, ranks, lengths, make)).results, ranks, lengths, make)


@every_size
@every_algorithm
def test_fractions_give_the_result_and_the_same_bits_on_all_ranks(name, P):
    ranks = list(range(P))
    results = simulate(cluster(name, P), partial(operate, name, ranks, LENGTHS, fractions)).results
    check(results, ranks, LENGTHS, fractions, tolerance=1e-5)


@pytest.mark.parametrize("group", [[3], [1, 4], [0, 2, 5], [1, 2, 4, 6, 7]], ids=str)
@every_algorithm
def test_a_group_may_be_any_ranks_and_needs_no_others(name, group):
    results = simulate(cluster(name, 8), partial(operate, name, group, [7], whole_numbers)).results
    check(results, group, [7], whole_numbers)
    assert [rank for rank, found in enumerate(results) if found is not None] == group


# -- in every world -----------------------------------------------------------------------------------


def operate_by_each(names, transport):
    """The same in one run of processes, algorithm by algorithm."""
    ranks = list(range(transport.size))
    return {name: operate(name, ranks, [0, 5, 17_000], fractions, transport) for name in names}


@pytest.mark.parametrize("hosts", [1, None], ids=["one host", "own hosts"])
def test_every_algorithm_works_in_every_world(world, hosts):
    names = [name for name in ALGORITHMS if hosts == 1 or name != "shared"]
    results = world.run(3, partial(operate_by_each, names), hosts=hosts)
    for name in names:
        check([found[name] for found in results], [0, 1, 2], [0, 5, 17_000], fractions, tolerance=1e-5)


def lose_one(name, operation, transport):
    """The rank whose loss ends a call of rank 0 and rank 1; rank 2 dies."""
    with pytest.raises(PeerLost) as caught:
        one = collective(name, transport, range(3))
        if operation is None:
            one.barrier()
        else:
            operation(one, [0, 1, 2], transport.rank, 6, whole_numbers)
    return caught.value.rank


@pytest.mark.parametrize(
    "operation",
    [all_reduce, reduce_scatter, all_gather, all_to_all, None],
    ids=lambda one: getattr(one, "__name__", "barrier"),
)
@every_algorithm
def test_a_lost_rank_is_raised_in_all_others(name, operation):
    """Rank 0 may learn it from rank 1, which has ended because of the loss."""
    program = partial(lose_one, name, operation)
    hosts = 1 if name == "shared" else None
    lost = WORLDS["virtual"].run(3, by_rank(program, program, die), hosts=hosts, deaths=(2,))
    assert lost[2] is None and set(lost[:2]) <= {0, 1, 2} and 2 in lost[:2]


@pytest.mark.parametrize("name", ["auto", "native"])
def test_a_lost_rank_is_raised_among_real_processes(world, name):
    program = partial(lose_one, name, all_reduce)
    lost = world.run(3, by_rank(program, program, die), hosts=1, deaths=(2,))
    assert lost[2] is None and 2 in lost[:2]


def arrive_late(name, transport):
    """The clock when this rank has passed a barrier to which rank 1 came after a second."""
    one = collective(name, transport, range(transport.size))
    transport.charge_compute(1.0 if transport.rank == 1 else 0.0)
    one.barrier()
    return transport.now()


@pytest.mark.parametrize("P", [2, 3, 5, 8])
@every_algorithm
def test_no_rank_passes_a_barrier_before_the_last_one_has_reached_it(name, P):
    run = simulate(cluster(name, P), partial(arrive_late, name))
    assert min(run.results) >= 1.0 and max(run.results) < 1.1
    assert sum(run.bytes) == 0


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
        one = collective(name, transport, range(P))
        whole = torch.zeros(64)
        right = True
        for call in range(12):
            x = whole[: (1, 5, 40, 64)[call % 4]] if call % 3 else torch.zeros(50)
            transport.charge_compute(1e-4 * ((transport.rank * 5 + call * 3) % 7))
            x.fill_(transport.rank + 10.0 * call)
            one.all_reduce(x)
            right &= bool((x == P * (P - 1) / 2 + 10.0 * call * P).all())
            x.fill_(-1.0)
        return right

    assert all(simulate(cluster(name, P, **uneven), program, seed=P).results)


@every_algorithm
def test_overlapping_groups_and_ranks_that_are_ahead_are_not_mixed_up(name):
    groups = {"left": [0, 1, 2], "right": [1, 2, 3, 4]}

    def program(transport):
        mine = {at: collective(name, transport, group) for at, group in groups.items() if transport.rank in group}
        seen = []
        for call in range(6):
            for at, one in mine.items():
                x = torch.full((9,), float(call * 100 + transport.rank))
                one.all_reduce(x)
                seen.append((at, call, x[0].item()))
                x.zero_()
            transport.charge_compute(1e-4 * ((transport.rank + call) % 3))
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
            one = collective(name, transport, groups[number])
            for call in range(5):
                transport.charge_compute(1e-4 * ((transport.rank + call + number) % 3))
                x = torch.full((4,), float(10**number * (transport.rank + call)))
                one.all_reduce(x)
                totals[number, call] = x[0].item()

        for activity in [transport.spawn(partial(use, n)) for n, group in enumerate(groups) if transport.rank in group]:
            activity.join()
        return totals

    for totals in simulate(cluster(name, 4), program).results:
        for (number, call), total in totals.items():
            assert total == 10**number * (sum(groups[number]) + call * len(groups[number]))


def powers(P):
    """The power of two below P, its logarithm, and how many ranks are folded into the others."""
    power = 1 << (P.bit_length() - 1)
    return power, power.bit_length() - 1, P - power


def one_way(P, m):
    """A reduce-scatter, an all-gather or a broadcast in which nothing is sent twice."""
    return m * (P - 1)


def halving(P, m):
    """Recursive halving or doubling, with what folding sends."""
    power, _, spare = powers(P)
    spans = even_spans(m, P)
    return m * (power - 1) + m * spare + sum(spans[2 * pair].stop - spans[2 * pair].start for pair in range(spare))


PLAIN = {"reduce_scatter": one_way, "all_gather": one_way, "broadcast": one_way}
ELEMENTS_SENT = {
    "ring": {**PLAIN, "all_reduce": lambda P, m: 2 * m * (P - 1)},
    "tree": {**PLAIN, "all_reduce": lambda P, m: 2 * m * (P - 1)},
    "butterfly": {**PLAIN, "all_reduce": lambda P, m: m * powers(P)[0] * powers(P)[1] + 2 * m * powers(P)[2]},
    "rabenseifner": {
        "all_reduce": lambda P, m: 2 * m * (powers(P)[0] - 1) + 2 * m * powers(P)[2],
        "reduce_scatter": halving,
        "all_gather": halving,
        "broadcast": one_way,
    },
    "shared": dict.fromkeys(["all_reduce", "reduce_scatter", "all_gather", "broadcast"], lambda P, m: 0),
    "native": {**PLAIN, "all_reduce": lambda P, m: 2 * m * (P - 1)},
    "auto": {**PLAIN, "all_reduce": lambda P, m: ELEMENTS_SENT["butterfly"]["all_reduce"](P, m)},
}
"""By all ranks together, for vectors of at most 64 KiB, where it is documented."""


def run_once(name, operation, P, m, device, transport):
    """One operation on vectors of float64, or on their sizes only."""
    one, x = collective(name, transport, range(P)), torch.zeros(m, dtype=torch.float64, device=device)
    if operation == "all_gather":
        one.all_gather(x[even_spans(m, P)[transport.rank]].clone(), x)
    elif operation == "broadcast":
        one.broadcast(x, P - 1)
    else:
        getattr(one, operation)(x)


def test_every_documented_algorithm_exists():
    assert ELEMENTS_SENT.keys() <= ALGORITHMS.keys()


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
@every_algorithm
def test_bytes_equal_the_closed_form_also_when_there_are_only_sizes(name, operation):
    for P, m in [(1, 7), (2, 7), (3, 1), (3, 1000), (5, 16), (8, 16), (8, 1000)]:
        real, sizes_only = (
            simulate(cluster(name, P), partial(run_once, name, operation, P, m, device)) for device in ("cpu", "meta")
        )
        if name in ELEMENTS_SENT:
            expected, rounding = 8 * ELEMENTS_SENT[name][operation](P, m), P if name == "native" else 0
            assert abs(sum(real.bytes) - expected) <= rounding
        assert (real.bytes, real.rounds, real.seconds) == (sizes_only.bytes, sizes_only.rounds, sizes_only.seconds)


@every_algorithm
def test_all_to_all_sends_what_is_for_others_also_when_there_are_only_sizes(name):
    P, m = 5, 6
    runs = [simulate(cluster(name, P), partial(exchange_sizes, name, P, m, device)) for device in ("cpu", "meta")]
    sent = [4 * sum(lengths_to(rank, to, m) for to in range(P) if to != rank) for rank in range(P)]
    assert runs[0].bytes == runs[1].bytes == sent
    assert runs[0].seconds == runs[1].seconds


def exchange_sizes(name, P, m, device, transport):
    xs = [torch.zeros(lengths_to(transport.rank, to, m), device=device) for to in range(P)]
    outs = [torch.zeros(lengths_to(frm, transport.rank, m), device=device) for frm in range(P)]
    collective(name, transport, range(P)).all_to_all(xs, outs)


@every_algorithm
def test_a_vector_that_requires_a_gradient_is_summed_in_place_without_one(name):
    def program(transport):
        x = torch.ones(5, requires_grad=True)
        collective(name, transport, range(3)).all_reduce(x)
        return x

    for x in simulate(cluster(name, 3), program).results:
        assert x.tolist() == [3.0] * 5 and x.is_leaf and x.grad_fn is None


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda one: one.all_reduce(torch.ones(2), op="mean"), "op is mean, but must be sum or max"),
        (lambda one: one.all_gather(torch.ones(3), torch.ones(4)), "the length of mine is 3, but must be 2"),
        (lambda one: one.broadcast(torch.ones(2), 7), r"root is 7, but must be one of the ranks \[0, 1\]"),
        (lambda one: one.all_to_all([torch.ones(2)], [torch.ones(2)] * 2), "the number of xs is 1, but must be 2"),
        (lambda one: one.all_reduce(torch.ones(2, 2)), "one contiguous row"),
    ],
)
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "native"])
def test_what_cannot_work_is_refused(name, call, words):
    with pytest.raises(Refused, match=words):
        simulate(cluster(name, 2), lambda transport: call(collective(name, transport, range(2))))

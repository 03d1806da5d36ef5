"""Links between hosts: the time of every message, worked out by hand."""

import pytest
import torch

from manyhands.core.port import Tag, recv
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.faults import SlowLink
from manyhands.virtual.world import simulate

TAG, NEVER = Tag("payload", credit=100), Tag("never")
MB = 2**20
"""At RATE it takes 0.1 s, in 16 chunks."""
RATE = 10 * MB
CHUNK = 0.1 / 16


def sized(nbytes):
    return torch.empty(int(nbytes), dtype=torch.uint8, device="meta")


def times(plan, **cluster):
    """When each message (from, to, bytes, time it is sent at) arrives, and what the run gave."""

    def program(t):
        def receive():
            for _ in range(sum(to == t.rank for _, to, _, _ in plan)):
                message = recv(t, TAG)
                arrived[message.meta[0]] = t.now()
                message.release()

        receiving = t.spawn(receive)
        for number, (frm, to, nbytes, at) in enumerate(plan):
            if frm == t.rank:
                if at > t.now():
                    t.recv(NEVER, frm=t.rank, timeout=at - t.now())
                t.send(to, TAG, (number,), [sized(nbytes)] if nbytes else [])
        receiving.join()

    arrived = {}
    ranks = 1 + max(max(frm, to) for frm, to, _, _ in plan)
    simulate(Cluster(workers=ranks, **{"latency": 0.0, "bandwidth": RATE} | cluster), program)
    return [arrived[number] for number in range(len(plan))]


def at_once(*pairs, nbytes=MB):
    return [(frm, to, nbytes, 0.0) for frm, to in pairs]


def about(values):
    return pytest.approx(values, rel=1e-12, abs=1e-12)


# -- contention ---------------------------------------------------------------------------------------


def test_one_message_takes_its_bytes_over_the_bandwidth():
    assert times(at_once((0, 1))) == about([0.1])


def test_many_senders_share_the_link_of_the_one_they_send_to():
    arrived = times(at_once((1, 0), (2, 0), (3, 0), (4, 0)))
    assert max(arrived) == about(0.4)
    assert arrived == about([0.4 - 3 * CHUNK, 0.4 - 2 * CHUNK, 0.4 - CHUNK, 0.4])


def test_one_sender_shares_its_link_among_all_it_sends_to():
    arrived = times(at_once((0, 1), (0, 2), (0, 3), (0, 4)))
    assert max(arrived) == about(0.4)
    assert arrived == about([0.4 - 3 * CHUNK, 0.4 - 2 * CHUNK, 0.4 - CHUNK, 0.4])


def test_pairs_do_not_disturb_each_other():
    assert times(at_once((0, 1), (2, 3), (4, 5), (6, 7))) == about([0.1] * 4)


def test_a_link_sends_and_receives_at_the_same_time():
    assert times(at_once((0, 1), (1, 0))) == about([0.1] * 2)


def all_to_all(rotated):
    """From 4 workers to 4 servers."""
    steps = range(4)
    return [(frm, 4 + (frm + step if rotated else step) % 4) for frm in steps for step in steps]


def test_all_to_all_in_rotated_order_has_no_collisions():
    assert max(times(at_once(*all_to_all(rotated=True)))) == about(0.40)


def test_all_to_all_in_the_same_order_loses_three_chunks():
    assert max(times(at_once(*all_to_all(rotated=False)))) == about(0.41875)


def test_a_message_has_at_most_sixteen_chunks_and_none_smaller_than_16_kib():
    """Two flows share a port: the first one ends one chunk of the second before the second does."""
    for nbytes, chunk in [(16 * MB, MB), (MB, MB // 16), (3 * 2**16, 2**14), (2**14, 2**14)]:
        first, second = times(at_once((0, 1), (0, 2), nbytes=nbytes))
        assert (first, second) == about(((2 * nbytes - chunk) / RATE, 2 * nbytes / RATE))


def test_a_flow_that_begins_later_shares_from_then_on():
    """Eight chunks alone, then in turn, the new flow first."""
    plan = [(0, 1, MB, 0.0), (0, 2, MB, 7.5 * CHUNK)]
    assert times(plan) == about([24 * CHUNK, 32 * CHUNK])


def test_a_small_message_is_not_held_up_by_a_large_one_to_another_host_longer_than_one_chunk():
    huge = 16 * MB
    small, large = times([(0, 2, 0, 0.25), (0, 1, huge, 0.25)], latency=0.001)
    assert (small, large) == about((0.251, 1.851))
    large, small = times([(0, 1, huge, 0.0), (0, 2, 0, 0.25)], latency=0.001)
    assert (large, small) == about((1.601, 0.301))
    large, small = times([(0, 1, huge, 0.0), (0, 2, 1024, 0.25)], latency=0.001)
    assert (large, small) == about((1.601 + 1024 / RATE, 0.301 + 1024 / RATE))


# -- order --------------------------------------------------------------------------------------------


def test_messages_between_two_ranks_keep_their_order():
    sizes = [MB, 0, 1, 4 * MB, 7, 0, MB]
    arrived = times([(0, 1, nbytes, 0.0) for nbytes in sizes], latency=0.01)
    assert arrived == sorted(arrived)
    assert arrived == about([0.01 + sum(sizes[: n + 1]) / RATE for n in range(len(sizes))])


def test_order_holds_inside_a_host_too():
    sizes = [MB, 0, 1, 4 * MB, 7]
    arrived = times([(0, 1, n, 0.0) for n in sizes], hosts=1, local_bandwidth=RATE, local_latency=0.01)
    assert arrived == about([0.01 + sum(sizes[: n + 1]) / RATE for n in range(len(sizes))])


# -- latency ------------------------------------------------------------------------------------------


def test_latency_is_added_once_per_message():
    assert times(at_once((0, 1)), latency=0.05) == about([0.15])
    assert times(at_once((0, 1), (0, 1), (0, 1)), latency=0.05) == about([0.15, 0.25, 0.35])
    assert times([(0, 1, 0, 0.0)], latency="50us") == about([5e-5])


def test_latency_does_not_occupy_the_link():
    assert times(at_once((1, 0), (2, 0)), latency=3.0) == about([3.2 - CHUNK, 3.2])


# -- places -------------------------------------------------------------------------------------------


def test_inside_a_host_messages_use_its_memory_and_not_the_link():
    """Ranks 0, 1 share host 0; ranks 2, 3 host 1. Rank 0 moves its own bytes one after the other."""
    plan = at_once((0, 1), (0, 2), (1, 0), (1, 3))
    local = {"hosts": 2, "local_bandwidth": 4 * RATE, "local_latency": 0.001, "latency": 0.01}
    arrived = times(plan, **local)
    assert (arrived[0], arrived[2]) == about((0.026, 0.026))
    assert (arrived[1], arrived[3]) == about((0.21 - CHUNK, 0.21))


def test_a_rank_shares_its_own_memory_rate_among_its_neighbours():
    arrived = times(at_once((0, 1), (0, 2)), hosts=1, local_bandwidth=RATE, local_latency=0.0)
    assert arrived == about([0.2 - CHUNK, 0.2])
    arrived = times(at_once((0, 2), (1, 2)), hosts=1, local_bandwidth=RATE, local_latency=0.0)
    assert arrived == about([0.1, 0.1])


def test_ranks_of_one_host_share_its_link():
    assert times(at_once((0, 2), (1, 3)), hosts=2) == about([0.2 - CHUNK, 0.2])


def test_infinite_bandwidth_leaves_the_latency():
    for bandwidth in ("inf", float("inf")):
        assert times(at_once((1, 0), (2, 0), (0, 1)), latency=0.5, bandwidth=bandwidth) == [0.5, 0.5, 0.5]


def test_a_message_to_oneself_takes_no_time():
    assert times(at_once((0, 0))) == [0.0]


# -- the cores' part ----------------------------------------------------------------------------------


def test_cpu_seconds_per_byte_are_charged_at_both_ends():
    """0.2 s of the sender, 0.1 s of the wire, 0.2 s of the receiver."""

    def program(t):
        if t.rank == 0:
            t.send(1, TAG, (), [sized(MB)])
        else:
            recv(t, TAG)
        return t.now(), t.waited()

    cluster = Cluster(workers=2, latency=0.0, bandwidth=RATE, cpu_per_byte=0.2 / MB)
    (sent, waited_0), (received, waited_1) = simulate(cluster, program).results
    assert (sent, waited_0) == about((0.2, 0.0))
    assert (received, waited_1) == about((0.5, 0.3))


def test_cpu_per_byte_goes_by_the_speed_of_the_rank_and_not_inside_a_host():
    def program(t):
        if t.rank == 0:
            t.send(1, TAG, (), [sized(MB)])
        else:
            recv(t, TAG)
        return t.now()

    knobs = {"latency": 0.0, "bandwidth": RATE, "local_latency": 0.0, "local_bandwidth": RATE, "cpu_per_byte": 0.2 / MB}
    assert simulate(Cluster(workers=2, speeds=[2.0, 0.5], **knobs), program).results == about([0.1, 0.6])
    assert simulate(Cluster(workers=2, hosts=1, **knobs), program).results == about([0.0, 0.1])


def test_what_a_hook_sends_is_paid_when_the_rank_computes_next():
    def program(t):
        if t.rank == 1:
            recv(t, TAG).release()
            return t.now()
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda grad: t.send(1, TAG, (), [sized(MB)]))
        x.sum().backward()
        before = t.now()
        t.charge_compute(1.0)
        return before, t.now()

    cluster = Cluster(workers=2, latency=0.0, bandwidth=RATE, cpu_per_byte=0.2 / MB)
    (before, after), received = simulate(cluster, program).results
    assert (before, after, received) == about((0.0, 1.2, 0.3))


# -- slow links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_slow_link_divides_the_bandwidth_and_multiplies_the_latency(rank):
    faults = [SlowLink(rank=rank, factor=4.0)]
    assert times(at_once((0, 1), (2, 3)), latency=0.01, faults=faults) == about([0.44, 0.11])


def test_a_link_becomes_slow_at_a_time():
    """Half of the chunks pass before, half of them ten times slower."""
    faults = [SlowLink(rank=1, at=7.5 * CHUNK, factor=10.0)]
    assert times(at_once((0, 1)), faults=faults) == about([0.05 + 0.5])
    plan = [(0, 1, MB, 0.0), (0, 1, 0, 1.0)]
    assert times(plan, latency=0.01, faults=faults) == about([0.65, 1.1])


def test_flush_waits_until_everything_has_arrived():
    def program(t):
        if t.rank == 0:
            for to in (1, 2):
                t.send(to, TAG, (), [sized(MB)])
            before = t.now()
            t.flush()
            return before, t.now()
        recv(t, TAG)
        return t.now()

    results = simulate(Cluster(workers=3, latency=0.05, bandwidth=RATE), program).results
    assert results[0] == about((0.0, 0.25))
    assert results[1:] == about([0.25 - CHUNK, 0.25])


def test_the_native_all_reduce_takes_the_time_of_a_ring():
    def program(t):
        t.collective(range(4)).all_reduce(torch.empty(MB // 4, device="meta"))
        return t.now(), t.bytes_sent

    for seconds, sent in simulate(Cluster(workers=4, latency=0.01, bandwidth=RATE), program).results:
        assert seconds == about(2 * 3 * 0.01 + 2 * 0.1 * 3 / 4)
        assert sent == 2 * MB * 3 / 4

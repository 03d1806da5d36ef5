"""Cores: activities that compute at once share them evenly. Finish times worked out by hand."""

import pytest

from manyhands.core.errors import Refused
from manyhands.core.port import Tag
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.cores import Cores
from manyhands.virtual.faults import Die, Slow
from manyhands.virtual.kernel import Kernel
from manyhands.virtual.world import simulate

NEVER = Tag("never")


def finish_times(count, jobs, killed=()):
    """When each job (begin, seconds) is done on `count` cores; None for the killed ones (number, time)."""
    kernel = Kernel()
    cores = Cores(kernel, count)
    ends = [None] * len(jobs)

    def work(number, begin, seconds):
        kernel.sleep_until(begin)
        cores.charge(seconds)
        ends[number] = kernel.now

    activities = [
        kernel.spawn(lambda number=number, job=job: work(number, *job), f"job {number}", number)
        for number, job in enumerate(jobs)
    ]
    for number, time in killed:
        kernel.at(time, kernel.kill, activities[number])
    kernel.run()
    return ends


TOGETHER = {
    "one on one": (1, [3.0], [3.0]),
    "two on one": (1, [1.0, 3.0], [2.0, 4.0]),
    "two equal ones on one": (1, [2.0, 2.0], [4.0, 4.0]),
    "three on one": (1, [1.0, 2.0, 4.0], [3.0, 5.0, 7.0]),
    "one on two": (2, [3.0], [3.0]),
    "two on two": (2, [1.0, 3.0], [1.0, 3.0]),
    "three on two": (2, [2.0, 2.0, 4.0], [3.0, 3.0, 5.0]),
    "three equal ones on two": (2, [2.0, 2.0, 2.0], [3.0, 3.0, 3.0]),
    "five on two": (2, [1.0, 1.0, 1.0, 1.0, 6.0], [2.5, 2.5, 2.5, 2.5, 7.5]),
}


@pytest.mark.parametrize(("count", "seconds", "ends"), TOGETHER.values(), ids=TOGETHER.keys())
def test_activities_that_begin_together_share_the_cores(count, seconds, ends):
    assert finish_times(count, [(0.0, s) for s in seconds]) == ends


LATER = {
    "joins halfway": (1, [(0.0, 2.0), (1.0, 2.0)], [3.0, 4.0]),
    "joins, leaves before": (1, [(0.0, 4.0), (1.0, 1.0)], [5.0, 3.0]),
    "joins when the other has ended": (1, [(0.0, 2.0), (2.0, 2.0)], [2.0, 4.0]),
    "joins an idle host later": (1, [(0.0, 1.0), (5.0, 2.0), (6.0, 0.5)], [1.0, 7.5, 7.0]),
    "a third joins two": (2, [(0.0, 3.0), (0.0, 4.0), (1.0, 2.0)], [4.0, 5.0, 4.0]),
    "one after the other": (1, [(0.0, 3.0), (1.0, 3.0), (2.0, 3.0)], [6.5, 8.5, 9.0]),
}


@pytest.mark.parametrize(("count", "jobs", "ends"), LATER.values(), ids=LATER.keys())
def test_activities_may_join_and_leave_midway(count, jobs, ends):
    assert finish_times(count, jobs) == pytest.approx(ends, rel=1e-12)


def test_a_killed_activity_frees_its_core():
    assert finish_times(1, [(0.0, 4.0), (0.0, 4.0)], killed=[(1, 2.0)]) == [5.0, None]
    assert finish_times(2, [(0.0, 4.0)] * 3, killed=[(0, 3.0)]) == [None, 5.0, 5.0]
    assert finish_times(1, [(0.0, 1.0), (0.0, 9.0)], killed=[(1, 5.0), (0, 1.0)]) == [None, None]


def test_work_takes_its_time_however_late_it_is():
    """Rounding of a large clock must not swallow the end of a short piece of work."""
    for late in (2.0**14, 1e5, 1e7, 3e9):

        def program(t, late=late):
            t.recv(NEVER, timeout=late + 0.1)
            for number in range(50):
                t.charge_compute(1e-3 + number * 1e-5)
            return t.now() - late - 0.1

        assert simulate(Cluster(workers=1), program).results == pytest.approx([0.06225], abs=late * 1e-13)


def test_many_small_pieces_keep_all_cores_busy_to_the_end():
    jobs = [(0.001 * n, 0.1 + 0.01 * (n % 7)) for n in range(100)]
    assert max(finish_times(1, jobs)) == pytest.approx(sum(seconds for _, seconds in jobs), rel=1e-12)


# -- through the port ---------------------------------------------------------------------------------


def compute(t):
    t.charge_compute(1.0)
    first = t.now()
    t.charge_compute(2.0)
    return first, t.now()


def test_workers_have_a_core_each_unless_the_host_has_fewer():
    assert simulate(Cluster(workers=2), compute).results == [(1.0, 3.0)] * 2
    assert simulate(Cluster(workers=2, hosts=1), compute).results == [(1.0, 3.0)] * 2
    assert simulate(Cluster(workers=2, hosts=1, cores=1), compute).results == [(2.0, 6.0)] * 2
    assert simulate(Cluster(workers=3, hosts=1, cores=2), compute).results == [(1.5, 4.5)] * 3


def test_activities_of_one_rank_share_its_core():
    def program(t):
        beside = t.spawn(lambda: t.charge_compute(1.0))
        t.charge_compute(1.0)
        beside.join()
        return t.now()

    assert simulate(Cluster(workers=2), program).results == [2.0, 2.0]
    assert simulate(Cluster(workers=2, cores=2), program).results == [1.0, 1.0]


def test_speeds_divide_the_time():
    assert simulate(Cluster(workers=3, speeds=[1.0, 2.0, 0.5]), compute).results == [(1.0, 3.0), (0.5, 1.5), (2.0, 6.0)]


def test_servers_have_speed_one_and_a_core_of_their_own():
    assert simulate(Cluster(workers=1, servers=2, speeds=[4.0]), compute).results == [
        (0.25, 0.75),
        (1.0, 3.0),
        (1.0, 3.0),
    ]


def test_a_straggler_is_slow_from_its_very_first_step():
    assert simulate(Cluster(workers=2, stragglers=Slow([0], factor=5.0)), compute).results == [(5.0, 15.0), (1.0, 3.0)]


def test_a_straggler_may_become_slow_later():
    stragglers = [Slow([0, 1], factor=2.0, at=0.5), Slow([1], factor=3.0, at="900ms")]
    assert simulate(Cluster(workers=3, stragglers=stragglers), compute).results == [(1.0, 5.0), (1.0, 13.0), (1.0, 3.0)]


def jittered(seed, jitter=0.2, workers=3):
    def program(t):
        times = []
        for _ in range(20):
            t.charge_compute(1.0)
            times.append(t.now())
        return times

    return simulate(Cluster(workers=workers, jitter=jitter), program, seed=seed).results


def test_jitter_is_the_same_for_the_same_seed_and_only_then():
    one = jittered(1)
    assert one == jittered(1)
    assert one != jittered(2)
    assert len({tuple(times) for times in one}) == 3
    assert one[:2] == jittered(1, workers=2)


def test_jitter_spreads_around_the_given_time():
    assert jittered(1, jitter=0.0)[0] == [float(n) for n in range(1, 21)]
    steps = [b - a for times in jittered(3, workers=20) for a, b in zip([0.0, *times], times, strict=False)]
    assert 0.98 < sorted(steps)[len(steps) // 2] < 1.02
    assert all(0.4 < step < 2.5 for step in steps)


def test_a_dead_rank_frees_its_core_for_the_others_of_its_host():
    def program(t):
        t.charge_compute(4.0)
        return t.now()

    cluster = Cluster(workers=2, hosts=1, cores=1, faults=[Die(1, at=2.0)])
    assert simulate(cluster, program).results == [5.0, None]


def test_spending_nothing_takes_no_time_and_less_than_nothing_is_refused():
    def program(t):
        t.charge_compute(0.0)
        with pytest.raises(Refused, match=r"^seconds to charge is -1.0, but must be >= 0$"):
            t.charge_compute(-1.0)
        return t.now()

    assert simulate(Cluster(workers=1), program).results == [0.0]

"""The event kernel: exact logs, the first error, who waits for what, torch's modes, and nothing left behind."""

import gc
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from greenlet import greenlet

from manyhands.core.errors import Deadlock, ManyhandsError, MayNotWait
from manyhands.core.port import Tag, inside_backward, recv
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.kernel import Kernel, VirtualActivity, leaking_mode
from manyhands.virtual.world import simulate

A, B, NEVER = Tag("a"), Tag("b"), Tag("never")


@pytest.fixture
def kernel():
    return Kernel()


def sleeper(kernel, log, name, *times):
    """An activity that notes when it wakes."""

    def run():
        log.append((kernel.now, f"{name} begins"))
        for time in times:
            kernel.sleep_until(time)
            log.append((kernel.now, name))

    return kernel.spawn(run, name, 0)


# -- time and order -----------------------------------------------------------------------------------


def test_the_clock_jumps_from_event_to_event(kernel):
    log = []
    sleeper(kernel, log, "x", 1.0, 2.5)
    sleeper(kernel, log, "y", 2.0, 2.25, 7.0)
    kernel.run()
    assert log == [(0, "x begins"), (0, "y begins"), (1.0, "x"), (2.0, "y"), (2.25, "y"), (2.5, "x"), (7.0, "y")]
    assert kernel.now == 7.0


def test_events_at_one_instant_happen_in_the_order_they_were_asked_for(kernel):
    log = []

    def ask():
        for number in range(50):
            kernel.at(1.0, log.append, number)
        kernel.at(0.5, log.append, "first")
        kernel.sleep_until(1.0)
        log.append("asked last")

    kernel.spawn(ask, "x", 0)
    kernel.run()
    assert log == ["first", *range(50), "asked last"]


def test_activities_woken_at_one_instant_continue_first_come_first_served(kernel):
    log = []
    for name in "cabed":
        sleeper(kernel, log, name, 1.0, 2.0)
    kernel.run()
    assert [name for time, name in log if time == 1.0] == list("cabed")
    assert [name for time, name in log if time == 2.0] == list("cabed")


def test_who_is_ready_continues_before_the_next_event_even_of_the_same_instant(kernel):
    log = []

    def first():
        kernel.at(0.0, log.append, "event")
        kernel.spawn(lambda: log.append("spawned"), "y", 0).join()
        log.append("joined")
        kernel.sleep_until(0.0)
        log.append("slept")

    kernel.spawn(first, "x", 0)
    kernel.run()
    assert log == ["spawned", "joined", "event", "slept"]


def test_the_clock_never_goes_back(kernel):
    log = []

    def run():
        kernel.sleep_until(5.0)
        kernel.at(1.0, lambda _: log.append(kernel.now))
        kernel.sleep_until(3.0)
        log.append(kernel.now)

    kernel.spawn(run, "x", 0)
    kernel.run()
    assert log == [5.0, 5.0]


def test_a_rank_that_is_late_for_its_turn_does_not_turn_the_clock_back():
    def program(t):
        times = []
        for _ in range(2):
            t.recv(NEVER, frm=0, timeout=5.0)
            t.charge_compute(1.0)
            times.append(t.now())
        return times

    assert simulate(Cluster(workers=1, order=[0, 0]), program).results == [[5.0, 10.0]]


def conversation(t):
    log = []
    for turn in range(5):
        for to in t.peers():
            t.send(to, A, (turn, t.rank), [torch.full((1000 * (t.rank + 1),), float(turn))])
        for _ in t.peers():
            message = recv(t, A)
            log.append((t.now(), message.frm, message.meta))
            message.release()
        t.charge_compute(1e-4 * (t.rank % 3))
    return log


def test_the_same_inputs_give_the_same_run():
    one, two = (simulate(Cluster(workers=6, hosts=3, jitter=0.3), conversation, seed=7) for _ in range(2))
    assert one == two
    assert one.events > 100
    assert one.results != simulate(Cluster(workers=6, hosts=3, jitter=0.3), conversation, seed=8).results


def test_only_waiting_for_others_counts_as_waited():
    def program(t):
        t.charge_compute(2.0)
        if t.rank == 0:
            t.recv(NEVER, timeout=0.5)
            t.charge_compute(1.0)
            t.send(1, A)
        else:
            recv(t, A)
        return t.waited()

    assert simulate(Cluster(workers=2, latency=0.25), program).results == [0.5, 1.75]


# -- errors -------------------------------------------------------------------------------------------


class Broken(Exception):
    """Raised by the tests."""


def test_the_first_error_stops_the_run_keeps_its_type_and_says_where():
    log = []

    def program(t):
        def pull():
            t.charge_compute(2.0)
            raise Broken("no more")

        try:
            if t.rank == 1:
                t.spawn(pull).join()
            t.charge_compute(5.0)
            log.append("never reached")
        finally:
            log.append((t.rank, t.now()))

    with pytest.raises(Broken, match="no more") as caught:
        simulate(Cluster(workers=3), program)
    assert caught.value.__notes__ == ["in worker 1 (pull) at virtual time 2 s"]
    assert [entry.name for entry in caught.traceback][-1] == "pull"
    assert log == [(0, 2.0), (1, 2.0), (2, 2.0)]


def test_later_errors_of_others_do_not_hide_the_first(kernel):
    def first():
        kernel.sleep_until(1.0)
        raise Broken("first")

    def second():
        try:
            kernel.wait("nothing")
        finally:
            raise ValueError("second")

    kernel.spawn(second, "second", 0)
    kernel.spawn(first, "first", 1)
    with pytest.raises(Broken, match="first"):
        kernel.run()


def test_an_error_woken_up_with_is_raised_where_the_activity_waits(kernel):
    log = []

    def run():
        kernel.at(1.0, lambda me: kernel.wake(me, Broken("here")), kernel.current)
        with pytest.raises(Broken, match="here"):
            kernel.wait("an error")
        log.append(kernel.now)

    kernel.spawn(run, "x", 0)
    kernel.run()
    assert log == [1.0]


def test_a_deadlock_says_who_waits_for_what():
    def program(t):
        def serve():
            t.recv(A, B.of(3), frm=1)

        if t.rank == 0:
            t.spawn(serve).join()
        elif t.rank == 1:
            for _ in range(3):
                t.send(0, A.of(7), (), [torch.ones(1)])
        elif t.rank == 2:
            with t.lock("lock"):
                recv(t, B)
        else:
            t.collective([2, 3]).all_reduce(torch.ones(1))

    with pytest.raises(Deadlock) as caught:
        simulate(Cluster(workers=4, latency=0.25, bandwidth="inf"), program)
    assert str(caught.value) == (
        "no activity can continue at virtual time 0.25 s:\n"
        "  worker 0 waits for the end of worker 0 (serve)\n"
        "  worker 0 (serve) waits for a or b[3] from rank 1\n"
        "  worker 1 waits for credit to send a[7] to rank 0\n"
        "  worker 2 waits for b from any rank\n"
        "  worker 3 waits for an all-reduce with ranks 2, 3"
    )


def test_activities_of_one_name_are_listed_in_the_order_they_began(kernel):
    for number in range(20):
        kernel.spawn(lambda number=number: kernel.wait("number", number), "one of many", 0)
    with pytest.raises(Deadlock) as caught:
        kernel.run()
    assert [line.split()[-1] for line in str(caught.value).splitlines()[1:]] == [str(n) for n in range(20)]


def test_finally_blocks_run_in_a_deadlock_too(kernel):
    log = []

    def run(number):
        try:
            kernel.wait("nothing")
        finally:
            log.append(number)

    for number in range(3):
        kernel.spawn(lambda number=number: run(number), f"x{number}", number)
    with pytest.raises(Deadlock):
        kernel.run()
    assert log == [0, 1, 2]


def test_a_daemon_that_waits_is_no_deadlock_and_ends_with_the_others(kernel):
    log = []

    def serve():
        try:
            kernel.wait("requests")
        finally:
            log.append("end of service")

    kernel.spawn(serve, "server", 1, daemon=True)
    sleeper(kernel, log, "x", 1.0)
    kernel.run()
    assert log == [(0.0, "x begins"), (1.0, "x"), "end of service"]


# -- killing ------------------------------------------------------------------------------------------


def test_a_killed_activity_cannot_wait_any_more_and_is_joined_once(kernel):
    log = []

    def victim():
        try:
            kernel.wait("nothing")
        finally:
            log.append("dying")
            try:
                kernel.sleep_until(100.0)
            finally:
                log.append("dead")

    def killer(activity):
        kernel.at(1.0, kernel.kill, activity)
        activity.join()
        log.append(("joined", kernel.now))
        gc.collect()
        kernel.sleep_until(2.0)
        log.append("end")

    activity = kernel.spawn(victim, "victim", 0)
    kernel.spawn(lambda: killer(activity), "killer", 1)
    kernel.run()
    assert log == ["dying", "dead", ("joined", 1.0), "end"]


def test_what_a_killed_activity_raises_is_ignored(kernel):
    log = []

    def victim():
        try:
            kernel.wait("nothing")
        finally:
            raise Broken

    kernel.at(1.0, kernel.kill, kernel.spawn(victim, "victim", 0))
    sleeper(kernel, log, "x", 2.0)
    kernel.run()
    assert log[-1] == (2.0, "x")


def test_an_activity_may_be_killed_before_it_has_begun(kernel):
    log = []
    victim = kernel.spawn(lambda: log.append("never"), "victim", 1)
    kernel.kill(victim)

    def run():
        victim.join()
        kernel.sleep_until(1.0)
        log.append(kernel.now)

    kernel.spawn(run, "x", 0)
    kernel.run()
    assert log == [1.0]


# -- torch's modes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("outside", [True, False])
def test_grad_mode_belongs_to_the_activity(kernel, outside):
    seen = []

    def run(name, inside):
        seen.append((name, torch.is_grad_enabled()))
        with torch.set_grad_enabled(inside):
            for _ in range(3):
                kernel.sleep_until(kernel.now + 1.0)
                seen.append((name, torch.is_grad_enabled()))
        kernel.sleep_until(kernel.now + 1.0)
        seen.append((name, torch.is_grad_enabled()))

    for name, inside in [("x", True), ("y", False), ("z", True)]:
        kernel.spawn(lambda name=name, inside=inside: run(name, inside), name, 0)
    with torch.set_grad_enabled(outside):
        kernel.run()
        assert torch.is_grad_enabled() is outside
    for name, inside in [("x", True), ("y", False), ("z", True)]:
        assert [grad for who, grad in seen if who == name] == [outside, *[inside] * 3, outside]


@pytest.mark.parametrize("outside", [True, False])
def test_an_activity_begins_with_the_grad_mode_of_the_run(kernel, outside):
    seen = []

    def note():
        seen.append(torch.is_grad_enabled())

    def run():
        with torch.set_grad_enabled(not outside):
            kernel.spawn(note, "beside", 0).join()
            seen.append(torch.is_grad_enabled())

    kernel.spawn(run, "x", 0)
    kernel.spawn(note, "y", 1)
    with torch.set_grad_enabled(outside):
        kernel.run()
    assert seen == [outside, outside, not outside]


def test_a_dying_activity_has_its_own_grad_mode(kernel):
    seen = []

    def run():
        with torch.no_grad():
            try:
                kernel.wait("nothing")
            finally:
                seen.append(torch.is_grad_enabled())

    kernel.at(1.0, kernel.kill, kernel.spawn(run, "x", 0))
    sleeper(kernel, [], "y", 2.0)
    kernel.run()
    assert seen == [False]
    assert torch.is_grad_enabled()


MODES = {
    "torch.inference_mode": torch.inference_mode,
    "torch.autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a torch device or dispatch mode": lambda: torch.device("meta"),
    "hooks of saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
}
WAITS = {
    "recv": lambda t: t.recv(NEVER),
    "spend": lambda t: t.charge_compute(1.0),
    "join": lambda t: t.spawn(lambda: t.charge_compute(1.0)).join(),
    "lock": lambda t: t.lock("taken").__enter__(),
    "all_reduce": lambda t: t.collective([0, 1]).all_reduce(torch.zeros(1)),
    "flush": lambda t: (t.send(1, A), t.flush()),
    "credit": lambda t: [t.send(1, A) for _ in range(3)],
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
@pytest.mark.parametrize("mode", MODES)
def test_a_wait_under_a_mode_that_would_leak_is_refused_and_leaves_no_trace(mode, wait):
    """The rank goes on afterwards, and nothing wakes it by mistake."""

    def program(t):
        if t.rank == 1:
            return t.recv(NEVER, timeout=9.0)
        if t.rank == 2:
            with t.lock("taken"):
                return t.recv(NEVER, timeout=9.0)
        t.recv(NEVER, timeout=0.5)
        with MODES[mode](), pytest.raises(MayNotWait, match=rf"^worker 0 may not wait for .* inside {mode}$"):
            wait(t)
        assert t.recv(NEVER, timeout=5.0) is None
        return t.now()

    def read_all(t):
        if t.rank != 1:
            return program(t)
        while t.recv(A, timeout=9.0):
            pass
        return None

    assert simulate(Cluster(workers=3, hosts=1), read_all).results == [5.5, None, None]


def test_an_all_reduce_that_was_refused_has_brought_nothing():
    def program(t):
        x = torch.full((2,), float(t.rank + 1))
        if t.rank == 0:
            with torch.inference_mode(), pytest.raises(MayNotWait):
                t.collective([0, 1]).all_reduce(torch.full((2,), 100.0))
        t.charge_compute(3.0 - t.rank)
        t.collective([0, 1]).all_reduce(x)
        return x.tolist()

    assert simulate(Cluster(workers=2), program).results == [[3.0, 3.0]] * 2


def test_a_wait_that_need_not_wait_is_allowed_under_any_mode():
    def program(t):
        t.send(0, A, (1,))
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), t.lock("free"):
            return recv(t, A).meta

    assert simulate(Cluster(workers=1), program).results == [(1,)]


def test_there_is_no_switch_inside_a_backward_pass(kernel):
    log = []

    def other():
        log.append("other")

    def hook(grad):
        kernel.spawn(other, "other", 1)
        with pytest.raises(MayNotWait, match=r"^x may not wait for the time 1.0 inside a backward pass$"):
            kernel.sleep_until(1.0)
        log.append("hook")

    def run():
        x = torch.ones(2, requires_grad=True)
        x.register_hook(hook)
        (x * x).sum().backward()
        log.append("after")
        kernel.sleep_until(2.0)
        log.append(kernel.now)

    kernel.spawn(run, "x", 0)
    kernel.run()
    assert log == ["hook", "after", "other", 2.0]


def test_the_private_functions_of_torch_that_we_rely_on_mean_what_we_think():
    assert torch._C._current_graph_task_id() == -1
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._is_any_autocast_enabled() is False
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append((torch._C._current_graph_task_id() != -1, inside_backward())))
    x.sum().backward()
    assert seen == [(True, True)]
    with torch.device("meta"):
        assert torch._C._len_torch_function_stack() == 1
    with torch._subclasses.FakeTensorMode():
        assert torch._C._len_torch_dispatch_stack() == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch._C._is_any_autocast_enabled() is True


@pytest.mark.parametrize(("mode", "make"), [(None, nullcontext), (None, torch.no_grad), *MODES.items()])
def test_the_leaking_mode_is_named(mode, make):
    with make():
        assert leaking_mode() == mode
    assert leaking_mode() is None


# -- nothing is left behind ---------------------------------------------------------------------------


def finished(t):
    def serve():
        recv(t, NEVER)

    t.spawn(serve, daemon=True)
    conversation(t)


def deadlocked(t):
    t.charge_compute(0.1)
    recv(t, NEVER)


def failed(t):
    t.charge_compute(0.1 * t.rank)
    if t.rank == 2:
        raise Broken
    recv(t, NEVER)


def refused(t):
    t.spawn(lambda: recv(t, A))
    recv(t, A)


def counted():
    gc.collect()
    found = Counter(map(type, gc.get_objects()))
    kinds = (greenlet, Kernel, VirtualActivity, torch.Tensor)
    return [sum(found[one] for one in found if issubclass(one, kind)) for kind in kinds]


ENDS = {"finished": (finished, ()), "deadlocked": (deadlocked, Deadlock), "failed": (failed, Broken)}
ENDS["refused"] = (refused, ManyhandsError)


@pytest.mark.parametrize(("program", "error"), ENDS.values(), ids=ENDS.keys())
def test_kernels_leave_nothing_behind(program, error):
    def run():
        with pytest.raises(error) if error else nullcontext():
            simulate(Cluster(workers=3), program)

    run()
    gc.collect()
    gc.freeze()  # what other tests have left is not counted
    before = counted()
    for _ in range(20):
        run()
    assert counted() == before

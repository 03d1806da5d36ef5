"""The event kernel: many ranks in one process, one clock, the same order every time.

Each activity of a rank is a greenlet. A wait switches to the hub, which runs the activities that are ready,
then advances the clock to the earliest event. Events of one instant happen in the order they were scheduled, so a
run depends on nothing but its inputs.

    ready     activities that may continue at this instant, in the order they were woken
    heap      (time, number, action, argument): what happens later

Torch keeps some state per thread, and all ranks share one thread: grad mode is carried by the kernel;
a wait under inference mode, autocast, a device or dispatch mode, hooks of saved tensors, or inside a backward
pass (whose queue belongs to the thread) would leak into another rank and is refused.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from manyhands.core.errors import Deadlock, MayNotWait

# Called at every switch, so they are bound once.
_graph_task, _autocast = torch._C._current_graph_task_id, torch._C._is_any_autocast_enabled
_functions, _dispatches = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_inference, _grad, _set_grad = torch.is_inference_mode_enabled, torch.is_grad_enabled, torch._C._set_grad_enabled
_saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks


def leaking_mode() -> str | None:
    """The thread-local torch mode, if any, that another rank would inherit at a switch."""
    if _graph_task() != -1:
        return "a backward pass"
    if _inference():
        return "torch.inference_mode"
    if _functions() or _dispatches():
        return "a torch device or dispatch mode"
    if _saved_tensors(True) is not None:
        return "hooks of saved tensors"
    return "torch.autocast" if _autocast() else None


class VirtualActivity:
    """One thread of control of one rank, as a greenlet."""

    __slots__ = (
        "_kernel",
        "daemon",
        "done",
        "green",
        "joiners",
        "losses_raised",
        "name",
        "rank",
        "waited",
        "waits_for",
    )

    def __init__(self, kernel: Kernel, run: Callable[[], Any], name: str, rank: int, daemon: bool) -> None:
        self._kernel = kernel
        self.name = name
        self.rank = rank
        self.daemon = daemon
        self.done = False
        self.joiners: list[VirtualActivity] = []
        self.waits_for: tuple[Any, ...] = ("its start",)
        self.waited = 0.0
        self.losses_raised = 0
        self.green = greenlet(lambda _: kernel.perform(self, run), kernel.hub)

    def join(self) -> None:
        """Wait until this activity has ended."""
        if not self.done:
            self._kernel.may_wait("the end of", self.name)
            self.joiners.append(self._kernel.current)
            self._kernel.wait("the end of", self.name)


class Kernel:
    """The clock, the heap and the hub."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.hub = getcurrent()
        self.current: VirtualActivity
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._number = 0
        self._ready: deque[tuple[VirtualActivity, Any]] = deque()
        self._activities: dict[VirtualActivity, None] = {}
        self._busy = 0
        self._grad = torch.is_grad_enabled()
        self._failure: BaseException | None = None

    def at(self, time: float, action: Callable[[Any], None], argument: Any = None) -> None:
        """Call `action(argument)` when the clock reaches `time`, at once if it has."""
        if time < self.now:
            time = self.now
        self._number += 1
        heapq.heappush(self._heap, (time, self._number, action, argument))

    def spawn(self, run: Callable[[], Any], name: str, rank: int, daemon: bool = False) -> VirtualActivity:
        """Start an activity; it first runs at this instant."""
        activity = VirtualActivity(self, run, name, rank, daemon)
        self._activities[activity] = None
        self._busy += not daemon
        self._ready.append((activity, None))
        return activity

    def perform(self, activity: VirtualActivity, run: Callable[[], Any]) -> None:
        """The body of every greenlet: the first error of any of them stops the run."""
        torch.set_grad_enabled(self._grad)
        try:
            run()
        except GreenletExit:
            pass
        except BaseException as error:
            if not activity.done:  # errors of a killed activity are ignored
                error.add_note(f"in {activity.name} at virtual time {self.now:.9g} s")
                self._failure = self._failure or error
        finally:
            activity.done = True
            self._activities.pop(activity, None)
            self._busy -= not activity.daemon
            for joiner in activity.joiners:
                self.wake(joiner)

    def wake(self, activity: VirtualActivity, value: Any = None) -> None:
        """Let a waiting activity continue at this instant with `value`; an exception is raised in it."""
        self._ready.append((activity, value))

    def may_wait(self, *why: Any) -> None:
        """Refuse a wait that would leak a torch mode; call it before the activity is registered as waiting anywhere."""
        if mode := leaking_mode():
            raise MayNotWait(f"{self.current.name} may not wait for {_words(why)} inside {mode}")

    def wait(self, *why: Any) -> Any:
        """Switch to the hub until the current activity is woken; returns the value it was woken with."""
        if leaking_mode():
            self.may_wait(*why)
        me = self.current
        if me.done:  # it is being killed
            raise GreenletExit
        me.waits_for = why
        me.green = getcurrent()  # a rank may alternate between greenlets (core/coroutine.py)
        grad = _grad()
        began = self.now
        try:
            value = self.hub.switch()
        finally:
            me.waited += self.now - began
            if _grad() is not grad:
                _set_grad(grad)
        if isinstance(value, BaseException):
            raise value
        return value

    def sleep_until(self, time: float) -> None:
        """Wait until the clock reaches `time`; it does not count as waiting for others."""
        me = self.current
        waited = me.waited
        self.may_wait("the time", time)
        self.at(time, self.wake, me)
        self.wait("the time", time)
        me.waited = waited

    def kill(self, activity: VirtualActivity) -> None:
        """End an activity where it stands; its `finally` blocks run, but can no longer wait."""
        if not activity.done:
            self.current = activity
            activity.done = True
            begun = bool(activity.green)
            activity.green.throw(GreenletExit)
            if not begun:
                self.perform(activity, lambda: None)

    def run(self) -> None:
        """Run to the end; raise the first error of any activity, or `Deadlock` with what each activity waits for."""
        self._grad = torch.is_grad_enabled()
        try:
            self._run_events()
        finally:
            for activity in sorted(self._activities, key=lambda one: (one.rank, one.name)):
                self.kill(activity)
            torch.set_grad_enabled(self._grad)
        if self._failure:
            raise self._failure

    def _run_events(self) -> None:
        heap, ready, pop = self._heap, self._ready, heapq.heappop
        while self._busy and not self._failure:
            self.events += 1
            if ready:
                activity, value = ready.popleft()
                if not activity.done:
                    self.current = activity
                    activity.green.switch(value)
            elif heap:
                self.now, _, action, argument = pop(heap)
                action(argument)
            else:
                raise Deadlock(self._blocked_activities())

    def _blocked_activities(self) -> str:
        stuck = sorted(self._activities, key=lambda one: (one.rank, one.name))
        lines = [f"  {one.name} waits for {_words(one.waits_for)}" for one in stuck]
        return f"no activity can continue at virtual time {self.now:.9g} s:\n" + "\n".join(lines)


def _words(why: tuple[Any, ...]) -> str:
    return " ".join(str(word) for word in why)

"""StepTimer: how a rank spends the seconds of a step, as far as the worker itself can measure it.

    | wait |== compute ==|= encode =|- send -| wait | rest |       rest: applying updates, bookkeeping
    began  compute_began                                   time

The transport counts waiting and sending. Time that a rank waits or sends inside a forward or backward pass or while it
encodes is counted as wait or send only, so that no second is counted twice.
"""

from __future__ import annotations

from types import TracebackType

from manyhands.core.port import Transport


class StepTimer:
    """The seconds of the current step by kind of work."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.begin()

    def begin(self) -> None:
        """Reset the sums at the start of a step."""
        t = self._transport
        self.began, self._waited, self._sending = t.now(), t.waited(), t.sending()
        self.compute_began: float | None = None
        self.compute = self.encode = 0.0

    def computing(self) -> _Timer:
        """A context whose time counts as forward and backward passes."""
        if self.compute_began is None:
            self.compute_began = self._transport.now()
        return _Timer(self, "compute")

    def encoding(self) -> _Timer:
        """A context whose time counts as encoding and decoding of messages."""
        return _Timer(self, "encode")

    def at_work(self) -> float:
        """The clock, without the time spent waiting and sending."""
        t = self._transport
        return t.now() - t.waited() - t.sending()

    def facts(self) -> dict[str, float]:
        """The fields of the record for the step that ends now."""
        t = self._transport
        return {
            "began": self.began,
            "compute_began": self.began if self.compute_began is None else self.compute_began,
            "compute": self.compute,
            "encode": self.encode,
            "wait": t.waited() - self._waited,
            "send": t.sending() - self._sending,
        }


class _Timer:
    """A context that adds its duration to one of the sums. A new one each time, since they may be nested."""

    __slots__ = ("_before", "_name", "_timer")

    def __init__(self, timer: StepTimer, name: str) -> None:
        self._timer, self._name = timer, name

    def __enter__(self) -> None:
        self._before = self._timer.at_work()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        elapsed = self._timer.at_work() - self._before
        setattr(self._timer, self._name, getattr(self._timer, self._name) + elapsed)

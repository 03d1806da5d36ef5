"""Spent: where the seconds of a rank's step go, as far as the worker itself can tell.

    | wait |== compute ==|= encode =|- send -| wait | rest |       rest: applying updates, bookkeeping
    began  compute_began                                   time

Waiting and sending are the transport's to count. What a rank waits or sends while it computes or encodes belongs there,
so nothing is counted twice.
"""

from __future__ import annotations

from types import TracebackType

from manyhands.core.protocols import Transport


class Spent:
    """The seconds of the step under way."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        t = self._transport
        self.began, self._waited, self._sending = t.now(), t.waited(), t.sending()
        self.compute_began: float | None = None
        self.compute = self.encode = 0.0

    def computing(self) -> _Timer:
        """Forward and backward passes."""
        if self.compute_began is None:
            self.compute_began = self._transport.now()
        return _Timer(self, "compute")

    def encoding(self) -> _Timer:
        """Making what travels of what was computed, or the other way round."""
        return _Timer(self, "encode")

    def at_work(self) -> float:
        """The clock, without the time spent waiting and sending."""
        t = self._transport
        return t.now() - t.waited() - t.sending()

    def facts(self) -> dict[str, float]:
        """What the record says about the step that ends now."""
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
    """Adds to one of the sums what passes inside it. Made anew each time: a step enters several of them."""

    __slots__ = ("_before", "_name", "_spent")

    def __init__(self, spent: Spent, name: str) -> None:
        self._spent, self._name = spent, name

    def __enter__(self) -> None:
        self._before = self._spent.at_work()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        passed = self._spent.at_work() - self._before
        setattr(self._spent, self._name, getattr(self._spent, self._name) + passed)

"""Firing: buckets of a gradient are handed on while the backward pass is still running.

A bucket fires when all its gradients have arrived and all buckets before it have fired, so that every rank fires in
the same order, whatever autograd did first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from manyhands.core.flat import Place, Span


class Firing:
    """One step's buckets.

    Args:
        buckets: in the order they are to fire.
        places: the parameters of the model.
        fired: told of each bucket, inside the backward pass.
    """

    def __init__(self, buckets: Sequence[Span], places: Sequence[Place], fired: Callable[[Span], None]) -> None:
        self._buckets = buckets
        self._fired = fired
        self._next = 0
        self._bucket_of = {
            place.mark: number
            for place in places
            for number, (part, start, stop) in enumerate(buckets)
            if place.span.part == part and start <= place.span.start < stop
        }
        self._missing = [0] * len(buckets)
        for number in self._bucket_of.values():
            self._missing[number] += 1

    def arrived(self, place: Place) -> None:
        """A gradient is in its place."""
        self._missing[self._bucket_of[place.mark]] -= 1
        while self._next < len(self._buckets) and self._missing[self._next] <= 0:
            self._fire()

    def finish(self) -> None:
        """The step is closed: what did not arrive is zero, so all the rest may go."""
        while self._next < len(self._buckets):
            self._fire()

    def _fire(self) -> None:
        self._next += 1
        self._fired(self._buckets[self._next - 1])

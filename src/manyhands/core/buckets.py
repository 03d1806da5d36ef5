"""Buckets of a gradient that are ready are sent while the backward pass is still running.

A bucket is ready when all its gradients have arrived and all earlier buckets are ready, so that every rank sends
buckets in the same order, in whichever order autograd computes the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from manyhands.core.flat import ParamSlot, Span


class ReadyBuckets:
    """The buckets of one step.

    Args:
        buckets: in the order in which they are sent.
        slots: the parameters of the model.
        fired: called for each bucket that is ready, inside the backward pass.
    """

    def __init__(self, buckets: Sequence[Span], slots: Sequence[ParamSlot], fired: Callable[[Span], None]) -> None:
        self._buckets = buckets
        self._fired = fired
        self._next = 0
        self._bucket_of = {
            slot.param_id: number for slot in slots for number, bucket in enumerate(buckets) if bucket.holds(slot.span)
        }
        self._missing = [0] * len(buckets)
        for number in self._bucket_of.values():
            self._missing[number] += 1

    def arrived(self, slot: ParamSlot) -> None:
        """Count the gradient of a parameter, and fire the buckets that are ready."""
        self._missing[self._bucket_of[slot.param_id]] -= 1
        while self._next < len(self._buckets) and self._missing[self._next] <= 0:
            self._fire()

    def finish(self) -> None:
        """Fire all other buckets at the end of the step: gradients that did not arrive are zero."""
        while self._next < len(self._buckets):
            self._fire()

    def _fire(self) -> None:
        self._next += 1
        self._fired(self._buckets[self._next - 1])

"""The cores of a host: activities that compute at once share them evenly.

With n activities on c cores each runs at rate min(1, c / n). `progress` is the work one activity
would have done since the host was last idle; an activity that needs s seconds ends when `progress`
has grown by s, so joining and leaving costs a heap operation and nothing is rescheduled one by one.
"""

from __future__ import annotations

import heapq

from manyhands.virtual.kernel import Kernel, VirtualActivity


class Cores:
    """The cores of one host, shared by the activities that compute."""

    def __init__(self, kernel: Kernel, count: float) -> None:
        self._kernel = kernel
        self._count = count
        self._progress = 0.0
        self._since = 0.0
        self._running: list[tuple[float, int, VirtualActivity]] = []
        self._number = 0

    def charge(self, seconds: float) -> None:
        """Compute for `seconds` of one core, longer if the cores are shared."""
        me = self._kernel.current
        waited = me.waited
        self._advance()
        self._number += 1
        heapq.heappush(self._running, (self._progress + seconds, self._number, me))
        self._schedule()
        try:
            self._kernel.wait("a core")
        except BaseException:
            self._leave(me)
            raise
        me.waited = waited

    def _rate(self) -> float:
        share = self._count / len(self._running)
        return share if share < 1.0 else 1.0

    def _advance(self) -> None:
        now = self._kernel.now
        if self._running:
            self._progress += (now - self._since) * self._rate()
        else:
            self._progress = 0.0
        self._since = now

    def _schedule(self) -> None:
        if self._running:
            finish, number, _ = self._running[0]
            left = finish - self._progress
            self._kernel.at(self._since + (left if left > 0.0 else 0.0) / self._rate(), self._end, number)

    def _end(self, number: int) -> None:
        """The first activity has done its work, unless another one joined or left since this was scheduled."""
        if not self._running or self._running[0][1] != number:
            return
        self._advance()
        finish = self._running[0][0]
        if finish - self._progress > 1e-12 * max(1.0, self._kernel.now):
            return
        self._progress = max(self._progress, finish)
        self._kernel.wake(heapq.heappop(self._running)[2])
        self._schedule()

    def _leave(self, me: VirtualActivity) -> None:
        """A killed activity frees its core."""
        self._advance()
        self._running = [entry for entry in self._running if entry[2] is not me]
        heapq.heapify(self._running)
        self._schedule()

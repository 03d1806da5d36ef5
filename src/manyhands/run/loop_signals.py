"""How a user's own loop is stopped early: SIGTERM or SIGUSR1, to the launcher or to any rank.

    signal -> watcher --- finish ---> every rank      the loop sees it: `if hands.stopping: hands.save(...); break`
                                                      else it is saved and ended between two steps, with exit code 143

In lock step all ranks must stop after the same step, although the request reaches them at different times. Each rank
reports the first step after which it still can: the next one, if it has looked after the last. The largest such number
is the step after which all of them stop (decision 15).

    step         5     6     7
    rank 0    ---+--x--+-----+      x: the request arrives. Rank 0 has looked after step 5: the first is 6
    rank 1    ---+-----+--x--+      rank 1 has looked after step 6: the first is 7, and both stop after step 7
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.core.errors import ManyhandsError
from manyhands.run.loop_checkpoint import LoopCheckpoints
from manyhands.run.training import Training

if TYPE_CHECKING:
    from manyhands.runtime.membership.control_client import ControlClient

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STOPPED = 128 + signal.SIGTERM
"""The exit code of a run that was ended for its user."""


class Stopped(SystemExit):
    """Leaves the script of a run that was asked to stop and whose loop never looks at `hands.stopping`."""


class StopRequest:
    """Whether this rank is to stop, after a step that all ranks agree on if they are in lock step.

    Args:
        control: this rank's client of its watcher.
        lockstep: whether all workers take equally many steps.
    """

    def __init__(self, control: ControlClient, lockstep: bool) -> None:
        self._control, self._lockstep = control, lockstep
        self._first = 0
        """The first step after which this rank can still stop."""
        self._is_frozen = self._is_known = False
        self._last: int | None = None
        self._changed = threading.Condition()
        control.on_finish(self._freeze, self._stop_at)

    def _freeze(self) -> int:
        with self._changed:
            self._is_frozen = True
            return self._first

    def _stop_at(self, step: int) -> None:
        with self._changed:
            self._last = step if self._last is None else self._last
            self._changed.notify_all()

    @property
    def was_made(self) -> bool:
        """Whether the run was asked to stop, be it after a later step."""
        return self._control.finishing

    def holds_after(self, step: int) -> bool:
        """Whether this rank is to stop, now that it has taken so many steps."""
        if not self._lockstep:
            return self._control.finishing
        with self._changed:
            if not self._is_frozen:
                self._first = max(self._first, step + 1)
                return False
            if step < self._first:
                return False
            while self._last is None:
                self._control.check()
                self._changed.wait(0.1)
            return step >= self._last

    def know(self) -> None:
        """Report, once, that the loop knows of it."""
        if not self._is_known:
            self._is_known = True
            self._control.knows_of_stop()


class SignalRelay:
    """Passes signals to this process on to the watcher of the run, unless the script handles them itself.

    A handler must not wait for locks, so that it only notes the signal; a thread sends the request.
    """

    def __init__(self, control: ControlClient) -> None:
        self._control = control
        self._noted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._handled: list[signal.Signals] = []
        if threading.current_thread() is threading.main_thread():
            self._handled = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
        for number in self._handled:
            signal.signal(number, self._note)
        self._thread = threading.Thread(target=self._pass_on, name="manyhands signals", daemon=True)
        self._thread.start()

    def _note(self, number: int, frame: Any) -> None:
        self._noted.put(True)

    def _pass_on(self) -> None:
        while self._noted.get():
            with suppress(OSError, ManyhandsError):  # the run has ended
                self._control.ask_to_finish()

    def close(self) -> None:
        """Handle the signals no longer."""
        for number in self._handled:
            if signal.getsignal(number) == self._note and threading.current_thread() is threading.main_thread():
                signal.signal(number, signal.SIG_DFL)
        self._noted.put(False)


class LoopStops(LoopCheckpoints):
    """A part of `Hands`: stopping early."""

    _request: StopRequest | None = None
    _relay: SignalRelay | None = None
    _save_folder: Path | None = None
    _has_looked = False

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop (SIGTERM, SIGUSR1): then save and leave the loop.

        In lock step it becomes true on all ranks after the same step. A loop that never looks at it is ended for you.
        """
        self._has_looked = True
        return self._is_to_stop()

    def end(self) -> None:
        """Complete what is in flight, and load the answer into the model on every rank."""
        raise NotImplementedError

    def _listen_for_stops(self, control: ControlClient, folder: Path | None) -> None:
        """From now on, signals stop the loop; without a call of this, as in virtual time, nothing does."""
        self._request = StopRequest(control, self._strategy.traits.lockstep)
        self._relay, self._save_folder = SignalRelay(control), folder

    def _watch_steps(self, training: Training) -> None:
        """Notice when the loop is between two steps: it asks for data, or begins the next one."""
        training.between_steps = self._between_steps
        self._loop.watch(self._between_steps, self._is_asked_to_stop)

    def _is_to_stop(self) -> bool:
        if self._request is None:
            return False
        holds = self._request.holds_after(0 if self._joined is None else self._joined.worker.step)
        if holds:
            self._request.know()
        return holds

    def _is_asked_to_stop(self) -> bool:
        """Whether it was asked to, be it after a later step: a loop that is left now is interrupted, not over."""
        return self._request is not None and self._request.was_made

    def _between_steps(self) -> None:
        """The loop is between two steps: end it here, if it was asked to stop and never looks."""
        training = self._joined
        if self._request is None or training is None or training.shows_answer or training.is_within_step:
            return
        if self._is_to_stop() and not self._has_looked:
            self._request = None  # what follows is between steps, too
            self._end_for_user(training.worker.step)

    def _end_for_user(self, step: int) -> None:
        words = "nothing was saved: pass folder=... to join, or save when hands.stopping is true"
        if self._save_folder is not None:
            try:
                path = self.save(self._save_folder, self._loop.extra)
                words = f"saved in {path}; to resume, let the script call hands.load({str(self._save_folder)!r})"
            except ManyhandsError as error:
                words = str(error)
        if self.lead:
            text = f"manyhands: the run was asked to stop: ended after step {step}, {words}"
            print(text, file=sys.stderr, flush=True)
        self.end()
        raise Stopped(STOPPED)

    def _stop_listening(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None

"""Pass thread: forward and backward passes that may wait for other ranks.

    rank's own line    run(pass) |          | all-reduce |          | all-reduce |       | result
    pass thread                  | layer 2 ask           | layer 1 ask           | ... end

A rank cannot wait inside a backward pass: autograd's queue belongs to the thread, and in virtual time all ranks share
one. So the pass runs in a thread of its own, which takes turns with the rank's own line of control: never do both run.
From inside, an autograd function calls `ask`; what it asks for is carried out in the rank's own line, which may wait as
always, be it a greenlet of virtual time or the main thread of a process. So the order of everything is the same in
every run, and the thread never touches the transport.

An error of what was asked for, such as a lost peer, ends the pass, and is raised in the rank's own line once the thread
has left it. The thread ends with an error, or when this object is not used any more.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class PassEnded(BaseException):
    """Ends a pass, because what it has asked for has failed. Not an `Exception`, so that no model handles it."""


class _Turns:
    """Whose turn it is, and what one side hands to the other. The thread refers to this alone, and not to its owner."""

    def __init__(self) -> None:
        self._thread_may, self._owner_may = threading.Lock(), threading.Lock()
        self._thread_may.acquire()
        self._owner_may.acquire()
        self.work: Callable[[], Any] | None = None
        self.grad = False
        self.request: Callable[[], Any] | None = None
        self.value: Any = None
        self.error: BaseException | None = None

    def to_thread(self) -> BaseException | None:
        """Let the thread continue until it asks or ends; an error (an interrupt) that this side got while it waited."""
        interrupt = None
        self._thread_may.release()
        while True:
            try:
                self._owner_may.acquire()
            except BaseException as error:
                interrupt = interrupt or error
            else:
                return interrupt

    def to_owner(self) -> None:
        """Let the rank's own line continue until it is the thread's turn again."""
        self._owner_may.release()
        self._thread_may.acquire()

    def end(self) -> None:
        """Let the thread end where it waits for a pass."""
        self.work = None
        self._thread_may.release()

    def serve(self) -> None:
        """The thread: one pass after another."""
        self._thread_may.acquire()
        while (work := self.work) is not None:
            torch.set_grad_enabled(self.grad)
            try:
                self.value, self.error = work(), None
            except BaseException as error:
                self.value, self.error = None, error
            del work
            self.request = self.work = None
            self.to_owner()


class PassThread:
    """A thread in which one rank runs its passes.

    Args:
        waiting: a context for what is asked for; it protects torch's generator, which the ranks of virtual time share.
    """

    def __init__(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        self._waiting = waiting
        self._turns = _Turns()
        self._thread: threading.Thread | None = None
        self._ident: int | None = None
        self._ends: weakref.finalize[..., Any] | None = None

    def run(self, work: Callable[[], Result]) -> Result:
        """Run a pass in the thread, under the caller's grad mode, and carry out what it asks for; its result."""
        if self._ends is None:
            self._start()
        turns = self._turns
        turns.work, turns.grad = work, torch.is_grad_enabled()
        failure = turns.to_thread()
        while turns.request is not None:
            failure = failure or self._carry_out(turns.request)
            turns.error = None if failure is None else PassEnded()
            failure = turns.to_thread() or failure
        value, error = turns.value, turns.error
        turns.value = turns.error = None
        failure = failure or error
        if failure is not None:
            self._stop()
            raise failure
        return value  # type: ignore[no-any-return]

    def _carry_out(self, request: Callable[[], Any]) -> BaseException | None:
        """Do what the pass asks for; the error, if there is one."""
        try:
            with self._waiting():
                self._turns.value = request()
        except BaseException as error:
            return error
        return None

    def ask(self, call: Callable[[], Result]) -> Result:
        """From inside a pass: the result of a call that the rank's own line makes. Elsewhere the call is made here."""
        if threading.get_ident() != self._ident:
            return call()
        turns = self._turns
        turns.request = call
        turns.to_owner()
        value, error = turns.value, turns.error
        turns.value = turns.error = None
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def _start(self) -> None:
        thread = threading.Thread(target=self._turns.serve, name="manyhands passes", daemon=True)
        self._ends = weakref.finalize(self, self._turns.end)
        thread.start()
        self._thread, self._ident = thread, thread.ident

    def end(self) -> None:
        """End the thread, from outside, between two passes; another pass would start a new one."""
        if self._thread is not None:
            thread = self._thread
            self._stop()
            thread.join()

    def _stop(self) -> None:
        """End the thread; another pass would start a new one."""
        assert self._ends is not None
        self._ends()
        self._turns, self._thread, self._ident, self._ends = _Turns(), None, None, None

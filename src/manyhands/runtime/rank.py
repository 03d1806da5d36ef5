"""What a process does that `launch` has started: it joins, runs the program, and hands back what that returns."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from manyhands.core.errors import Refused
from manyhands.runtime.failures import OURS, exit_code
from manyhands.runtime.seat import Seat

if TYPE_CHECKING:
    from manyhands.core.protocols import Transport

TOP_LEVEL = 'a task\'s functions must be at the top of a module, or named as "module:function"'
PR_SET_PDEATHSIG = 1


def main(seat: Seat, program: bytes, pipe: Connection) -> None:
    """The life of a rank. Errors of ours are told, not printed: whoever launched it raises the cause once."""
    _ignore_interrupts()
    _die_with_parent()
    import torch  # only here: whoever launches imports this module, and needs no torch

    from manyhands.runtime.join import TooLate, connect

    torch.set_num_threads(1)
    run = _loaded(program)  # before we meet anybody: whoever sends us a message expects that we know what it is
    try:
        transport = connect(seat)
    except TooLate:
        return
    except OURS as error:
        sys.exit(exit_code(error))
    try:
        result = _answer(run, transport)
        transport.leave()
    except BaseException as error:
        if not isinstance(error, OURS):
            traceback.print_exc()
        transport.fail(error)
        sys.exit(exit_code(error))
    pipe.send_bytes(result)


def _loaded(program: bytes) -> Callable[[Transport], Any] | Exception:
    try:
        run: Callable[[Transport], Any] = pickle.loads(program)
    except (AttributeError, ImportError) as error:
        return error
    return run


def _answer(run: Callable[[Transport], Any] | Exception, transport: Transport) -> bytes:
    """Plain pickles: between processes torch's own would share memory with a process that is about to end."""
    if isinstance(run, Exception):
        raise Refused(f"rank {transport.rank} cannot find the program ({run}): {TOP_LEVEL}")
    result = run(transport)
    try:
        return pickle.dumps(result)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise Refused(
            f"what rank {transport.rank} returns cannot be sent to the process that launched it: {error}"
        ) from None


def _ignore_interrupts() -> None:
    """Ctrl-C is for whoever launched us, who stops us in order. It was held back since our process was made."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _die_with_parent() -> None:
    """The kernel kills us when our parent dies; not under a fork server, which is not who launched us."""
    launcher = multiprocessing.parent_process()
    if launcher is not None and launcher.pid == os.getppid():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if launcher is not None and not launcher.is_alive():
        sys.exit("whoever launched this run is gone: stopping")

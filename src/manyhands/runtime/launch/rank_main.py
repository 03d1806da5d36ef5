"""The main function of a process that `launch` starts: it joins, runs the program, and returns its result."""

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
from manyhands.runtime.launch.program import TOP_LEVEL
from manyhands.runtime.membership.error_codec import OURS, exit_code
from manyhands.runtime.rank_spec import RankSpec

if TYPE_CHECKING:
    from manyhands.core.port import Transport

PR_SET_PDEATHSIG = 1


def main(spec: RankSpec, program: bytes, pipe: Connection) -> None:
    """Run one rank. Errors of manyhands are reported, not printed: the launching process raises the cause once."""
    _ignore_interrupts()
    _die_with_parent()
    import torch  # only here: the launching process imports this module, and needs no torch

    from manyhands.runtime.launch.join import TooLate, connect

    torch.set_num_threads(1)
    run = _unpickled(program)  # before joining: this makes the tags known that other ranks may send
    try:
        transport = connect(spec)
    except TooLate:
        return
    except OURS as error:
        sys.exit(exit_code(error))
    try:
        result = _run(run, transport)
        transport.leave()
    except BaseException as error:
        if not isinstance(error, OURS):
            traceback.print_exc()
        transport.fail(error)
        sys.exit(exit_code(error))
    pipe.send_bytes(result)


def _unpickled(program: bytes) -> Callable[[Transport], Any] | Exception:
    try:
        run: Callable[[Transport], Any] = pickle.loads(program)
    except (AttributeError, ImportError) as error:
        return error
    return run


def _run(run: Callable[[Transport], Any] | Exception, transport: Transport) -> bytes:
    """The result as a plain pickle: torch's own would share memory with a process that is about to end."""
    if isinstance(run, Exception):
        raise Refused(f"rank {transport.rank} cannot import the program ({run}): {TOP_LEVEL}")
    result = run(transport)
    try:
        return pickle.dumps(result)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise Refused(
            f"the result of rank {transport.rank} cannot be pickled for the launching process: {error}"
        ) from None


def _ignore_interrupts() -> None:
    """The launching process handles Ctrl-C and stops this one in order. It was blocked since the process began."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, unless the parent is a fork server."""
    launcher = multiprocessing.parent_process()
    if launcher is not None and launcher.pid == os.getppid():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if launcher is not None and not launcher.is_alive():
        sys.exit("the process that launched this run has ended: stopping")

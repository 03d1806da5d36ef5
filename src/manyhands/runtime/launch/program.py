"""The program of a launch, as the launching process sends it to the processes that it starts.

    by name     pickle: functions and classes of modules, and of a script; every process imports the file that has them
    by value    cloudpickle, if they are in no file (a notebook's cell, a prompt, stdin), or have no name (lambdas)

The bytes are sent through a pipe to our own child processes only: they are neither stored nor sent to another host.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from manyhands.core.errors import Refused

TOP_LEVEL = 'a task\'s functions must be at the top of a module, or named as "module:function"'
IN_A_FILE = (
    "write a function that returns the task into a file (in a notebook: %%writefile my_task.py), and name it: "
    'mh.train("my_task:function", ...); then every process makes the task itself'
)
FAILURES = (pickle.PicklingError, AttributeError, TypeError)


def pickled(program: object) -> bytes:
    """The program for other processes: by name where that is possible, else by value; refused if neither is."""
    try:
        by_name = pickle.dumps(program)
    except FAILURES:
        return _by_value(program)
    return _by_value(program) if _is_interactive() and b"__main__" in by_name else by_name


def _by_value(program: object) -> bytes:
    import cloudpickle  # only here: importing it takes 17 ms

    try:
        return bytes(cloudpickle.dumps(program))
    except FAILURES as error:
        raise Refused(f"the program cannot be sent to other processes ({error}): {IN_A_FILE}") from None


def _is_interactive() -> bool:
    """Whether `__main__` may have functions that no file has."""
    return hasattr(sys, "ps1") or _file_of_main() is None


def _file_of_main() -> str | None:
    """The file that other processes can import as `__main__`; "<stdin>" in its place is no file."""
    path: str | None = getattr(sys.modules["__main__"], "__file__", None)
    return path if path is not None and os.path.exists(path) else None


@contextmanager
def without_imaginary_main() -> Iterator[None]:
    """Processes that are started here do not import a `__main__` whose file does not exist: that would end them."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or _file_of_main() is not None:
        yield
        return
    main.__file__ = None
    try:
        yield
    finally:
        main.__file__ = path

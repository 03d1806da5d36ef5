"""How a script ends, and how it reports an error of manyhands: in one line, with the exit code of that error.

If our launcher knows of the error, it reports it once for all ranks, and the script prints nothing. Any other error
gets Python's traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any, NoReturn

from manyhands.runtime.membership import error_codec
from manyhands.runtime.rank_spec import VARIABLE


class ScriptEnd:
    """What ends the script of this process; made by `report_exit`."""

    def __init__(self) -> None:
        self._traceback_hook, self._has_launcher = sys.excepthook, VARIABLE in os.environ
        self._exit: SystemExit | None = None
        self.on_error: Callable[[BaseException], None] = lambda error: None
        """Called with an error of manyhands before it is reported: it may inform the other ranks."""
        sys.excepthook = self._report
        sys.exit = self._raise_exit

    @property
    def error(self) -> BaseException | None:
        """The error that has ended the script, which may be its own `sys.exit(7)`; None if it ended well."""
        error: BaseException | None = getattr(sys, "last_value", None)
        return error or self._exit

    def conclude(self, last: Callable[[], None]) -> None:
        """Call `last` when the script has ended. Python would ignore its error, so it is reported here."""
        try:
            last()
        except BaseException as error:
            with suppress(SystemExit):
                sys.excepthook(type(error), error, error.__traceback__)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(error_codec.exit_code(error))

    def _report(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, error_codec.OURS):
            self._traceback_hook(kind, error, trace)
            return
        self.on_error(error)
        if not (self._has_launcher and error_codec.was_reported(error)):
            print(f"manyhands: {error or 'interrupted'}", file=sys.stderr, flush=True)
        raise SystemExit(error_codec.exit_code(error))

    def _raise_exit(self, status: Any = None, /) -> NoReturn:
        raise _NotedExit(self._note, status)

    def _note(self, error: SystemExit) -> None:
        self._exit = error if error_codec.exit_status(error) else None


class _NotedExit(SystemExit):
    """What `sys.exit` raises. Python reads `code` when it ends the process, but not if the script catches this."""

    def __init__(self, note: Callable[[SystemExit], None], status: Any) -> None:
        super().__init__(status)
        self.args = (status,)
        self._note = note

    @property
    def code(self) -> Any:
        """The status that was passed to `sys.exit`."""
        self._note(self)
        return self.args[0]

    @code.setter
    def code(self, status: Any) -> None:
        self.args = (status,)


@cache
def report_exit() -> ScriptEnd:
    """Install this as the process's `sys.excepthook` and `sys.exit`; calls after the first do nothing."""
    return ScriptEnd()

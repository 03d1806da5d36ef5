"""How a script reports an error of manyhands: in one line, with the exit code of that error.

If our launcher knows of the error, it reports it once for all ranks, and the script prints nothing. Any other error
gets Python's traceback.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from manyhands.runtime.membership import error_codec
from manyhands.runtime.rank_spec import VARIABLE


def report_exit() -> None:
    """Install this as the process's `sys.excepthook`."""
    traceback_hook, has_launcher = sys.excepthook, VARIABLE in os.environ

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, error_codec.OURS):
            traceback_hook(kind, error, trace)
            return
        if not (has_launcher and error_codec.was_reported(error)):
            print(f"manyhands: {error or 'interrupted'}", file=sys.stderr, flush=True)
        sys.exit(error_codec.exit_code(error))

    sys.excepthook = end

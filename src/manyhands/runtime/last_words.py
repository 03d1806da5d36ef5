"""How a script ends that an error of ours has ended: in a few words, with the exit code that says why.

Where our launcher has been told of the error it says so, once for all ranks; then the script says nothing. Any other
error is shown as Python shows it.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from manyhands.runtime import failures
from manyhands.runtime.seat import VARIABLE


def end_in_few_words() -> None:
    """From now on this process does."""
    show, launcher_speaks = sys.excepthook, VARIABLE in os.environ

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, failures.OURS):
            show(kind, error, trace)
            return
        if not (launcher_speaks and failures.was_told(error)):
            print(f"manyhands: {error or 'interrupted'}", file=sys.stderr, flush=True)
        sys.exit(failures.exit_code(error))

    sys.excepthook = end

"""The command line: one file per verb. Torch is imported only by verbs that need it."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from manyhands import __version__
from manyhands.cli.usage import HelpShown
from manyhands.core.errors import ManyhandsError, unknown
from manyhands.runtime.membership.error_codec import exit_code

VERBS = {
    "train": ("train", "train a task with one method"),
    "compare": ("compare", "methods side by side on one task, ranked, with a report"),
    "run": ("run", "start a script of your own once for each rank"),
    "report": ("report", "make one page of the records of runs"),
    "list": ("listing", "all methods, their families and papers"),
    "explain": ("explain", "one method's card: what it does, its traits, knobs, paper and loops"),
    "cost": ("cost", "parameters, work, storage and parallelism of each layer of a task's model"),
    "bench": ("bench", "measure this installation against its goals"),
    "env": ("env", "versions and machine: what to paste into a bug report"),
}
"""The file and the description of each verb."""

HELP = """usage: manyhands VERB [OPTIONS]

Train one neural network with many workers, by many methods, on one interface.

verbs:
{verbs}

options:
  -h, --help   help for manyhands or, after a verb, for that verb
  --version    the version
  --debug      show where an error came from

examples:
  manyhands list
  manyhands explain ssp
  manyhands train ssp --workers 2 --staleness 3
  manyhands train downpour --virtual --workers 8 --json
  manyhands run -n 4 train.py
  manyhands cost vgg16
  manyhands report runs

exit codes: 0 done, 1 error, 2 bad usage or refused, 3 a peer was lost, 4 training diverged, 130 interrupted (Ctrl-C),
            143 stopped early and saved (SIGTERM)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        ours = words[:1] if "run" in words[:1] else words[:2] if "run" in words[1:2] else words
        ours = ours[: ours.index("--")] if "--" in ours else ours
        debug = "--debug" in ours  # what follows `run` or -- may belong to a script
        code = _answer([word for word in ours if word != "--debug"] + words[len(ours) :], debug)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output has closed it, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _answer(words: list[str], debug: bool) -> int:
    try:
        return _run(words)
    except HelpShown as shown:
        print(str(shown).rstrip())
        return 0
    except KeyboardInterrupt:
        print("manyhands: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"manyhands: {_words(error)}", file=sys.stderr)
        return exit_code(error)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        raise HelpShown(HELP.format(verbs="\n".join(f"  {verb:<9}  {about}" for verb, (_, about) in VERBS.items())))
    if words[0] == "--version":
        raise HelpShown(f"manyhands {__version__}")
    if words[0] not in VERBS:
        raise unknown("verb", words[0], VERBS)
    code: int = importlib.import_module(f"manyhands.cli.{VERBS[words[0]][0]}").run(words[1:])
    return code


def _words(error: Exception) -> str:
    """The error in one line; an error of another package with its class."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    if isinstance(error, ManyhandsError):
        return f"{error}{notes}"
    return f"{type(error).__name__}: {error}{notes}; --debug shows where"

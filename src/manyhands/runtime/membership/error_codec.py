"""Errors between processes: encoded as plain facts, so that every rank can raise the same error."""

from __future__ import annotations

from typing import Any

from manyhands.core.errors import ChangedInFlight, Diverged, ManyhandsError, PeerLost, Refused

Facts = dict[str, Any]

CODES = ((KeyboardInterrupt, 130), (Refused, 2), (PeerLost, 3), (Diverged, 4), (BaseException, 1))
"""The exit code of each error: the first entry that matches. 0 means success."""
OURS = (ManyhandsError, KeyboardInterrupt)
"""Errors that are reported in one line, without a traceback; an interrupt comes from the launching process."""
_reported: list[BaseException] = []


def pack(error: BaseException, rank: int) -> Facts:
    """Encode the error that ended rank `rank`."""
    if isinstance(error, PeerLost):
        return {"kind": "lost", "rank": error.rank, "why": error.why}
    if isinstance(error, Diverged):
        return {"kind": "diverged", "rank": error.rank, "step": error.step, "loss": error.loss, "what": error.what}
    if isinstance(error, ChangedInFlight):
        return {"kind": "changed", "rank": error.rank, "tag": error.tag}
    if isinstance(error, KeyboardInterrupt):
        return {"kind": "interrupted"}
    if isinstance(error, ManyhandsError):
        return {"kind": "refused" if isinstance(error, Refused) else "error", "text": str(error)}
    if isinstance(error, SystemExit):
        return {"kind": "failed", "rank": rank, "text": f"SystemExit: {error}", "code": exit_status(error)}
    return {"kind": "failed", "rank": rank, "text": f"{type(error).__name__}: {error}"}


def unpack(facts: Facts) -> BaseException:
    """Decode an error."""
    match facts["kind"]:
        case "lost":
            return PeerLost(facts["rank"], facts["why"])
        case "diverged":
            return Diverged(facts["rank"], facts["step"], facts["loss"], facts["what"])
        case "changed":
            return ChangedInFlight(facts["rank"], facts["tag"])
        case "interrupted":
            return KeyboardInterrupt()
        case "refused":
            return Refused(facts["text"])
        case "failed":
            return ManyhandsError(f"rank {facts['rank']} failed: {facts['text']}")
        case _:
            return ManyhandsError(facts["text"])


def exit_code(error: BaseException) -> int:
    """The exit code of a process that `error` ends."""
    return next(code for kind, code in CODES if isinstance(error, kind))


def exit_status(error: SystemExit) -> int:
    """The exit code that Python makes of what a script passed to `sys.exit`: of a text, 1."""
    status = error.args[0] if error.args else None
    return 0 if status is None else status & 0xFF if isinstance(status, int) else 1


def mark_reported(error: BaseException) -> None:
    """Remember that the watcher knows of this error."""
    _reported.append(error)


def was_reported(error: BaseException) -> bool:
    """Whether the watcher knows of this very error object."""
    return any(error is one for one in _reported)

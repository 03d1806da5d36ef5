"""Errors on their way between processes: facts only, so that everyone can raise the same one."""

from __future__ import annotations

from typing import Any

from manyhands.core.errors import ChangedInFlight, Diverged, ManyhandsError, PeerLost, Refused

Facts = dict[str, Any]

CODES = ((KeyboardInterrupt, 130), (Refused, 2), (PeerLost, 3), (Diverged, 4), (BaseException, 1))
"""The exit code of each error, the first that fits; 0 is done."""
OURS = (ManyhandsError, KeyboardInterrupt)
"""Errors that are told, not shown with a trace; an interrupt comes from whoever launched us."""
_told: list[BaseException] = []


def pack(error: BaseException, rank: int) -> Facts:
    """What there is to say about an error that ended rank `rank`."""
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
    return {"kind": "failed", "rank": rank, "text": f"{type(error).__name__}: {error}"}


def unpack(facts: Facts) -> BaseException:
    """The same error again."""
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
    """How a process ends that was ended by `error`."""
    return next(code for kind, code in CODES if isinstance(error, kind))


def note_told(error: BaseException) -> None:
    """Whoever watches has been told that `error` has ended this rank."""
    _told.append(error)


def was_told(error: BaseException) -> bool:
    """Whether whoever watches knows of this very error."""
    return any(error is one for one in _told)

"""The errors of the library, each with the facts that are needed to act on it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ManyhandsError(Exception):
    """Base class of the errors this library raises on purpose."""


class Refused(ManyhandsError, ValueError):
    """A setting that cannot work, refused before the first step; the message names the value and the bound."""


class PeerLost(ManyhandsError):
    """A rank died, was stopped or was cut off; `why` says which, or "left" after a clean exit.

    Within a subgroup `rank` is counted in the group; `job_rank` and the message always name the rank of the job.
    """

    def __init__(self, rank: int, why: str, job_rank: int | None = None) -> None:
        self.rank = rank
        self.why = why
        self.job_rank = rank if job_rank is None else job_rank
        super().__init__(f"rank {self.job_rank} is lost: {why}")

    def of_job(self) -> PeerLost:
        """The same loss, with the rank of the job."""
        return self if self.rank == self.job_rank else PeerLost(self.job_rank, self.why)


class ChangedInFlight(ManyhandsError):
    """A sender changed a tensor that it had sent and that the receiver had not released yet."""

    def __init__(self, rank: int, tag: object) -> None:
        super().__init__(f"rank {rank} changed a tensor sent as {tag} before its receiver released it")
        self.rank = rank
        self.tag = str(tag)


class Deadlock(ManyhandsError):
    """All ranks wait and none can continue; the message lists which rank waits for what."""


class MayNotWait(ManyhandsError):
    """A rank waited inside a backward pass, or under a torch mode that would leak into another rank."""


class Diverged(ManyhandsError):
    """A loss, or a number to be sent, is not finite; the message names the rank and the step."""

    def __init__(self, rank: int, step: int, loss: float, what: str = "the loss") -> None:
        super().__init__(f"{what} is {loss} on rank {rank} at step {step}: training diverged (try a smaller lr)")
        self.rank = rank
        self.step = step
        self.loss = loss
        self.what = what


class BadPayload(ManyhandsError):
    """A received payload is not the output of its codec: wrong length or dtype, or out of range."""


class NotWritten(ManyhandsError):
    """A file could not be written, as on a full disk; the message names the path and the reason."""


def not_written(path: object, error: OSError) -> NotWritten:
    """The error of a file that could not be written, in one sentence."""
    return NotWritten(f"{path} cannot be written: {error.strerror or error}")


def refuse_unless(holds: bool, name: str, value: object, bound: str) -> None:
    """Refuse `value` of setting `name` unless `holds`; all such messages are worded here."""
    if not holds:
        raise Refused(f"{name} is {value}, but must be {bound}")


def unknown(kind: str, given: str, known: Iterable[str]) -> Refused:
    """The refusal of an unknown name; it suggests similar names, or lists all."""
    names = {name.lstrip("-"): name for name in known}
    near = [names[name] for name in get_close_matches(given.lstrip("-").lower(), names)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(names.values()) or 'none'}"
    return Refused(f"there is no {kind} {given!r}: {hint}")

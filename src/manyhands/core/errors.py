"""Everything that can go wrong by contract, each with the facts a person needs to act on it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ManyhandsError(Exception):
    """Root of the errors this library raises on purpose."""


class Refused(ManyhandsError, ValueError):
    """A setting that cannot work, refused before the first step; the message names the value and the bound."""


class PeerLost(ManyhandsError):
    """A rank died, was stopped or cut off; `why` says which, or "left" after a clean exit."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} is lost: {why}")
        self.rank = rank
        self.why = why


class ChangedInFlight(ManyhandsError):
    """A sender wrote into a tensor that it had lent and that its receiver had not released yet."""

    def __init__(self, rank: int, tag: object) -> None:
        super().__init__(f"rank {rank} changed a tensor sent as {tag} before its receiver released it")
        self.rank = rank
        self.tag = str(tag)


class Deadlock(ManyhandsError):
    """Nobody can ever go on; the message lists who waits for what."""


class MayNotWait(ManyhandsError):
    """A wait inside a backward pass or under a torch mode that would leak into another rank."""


class Diverged(ManyhandsError):
    """A loss, or a number to be sent, that is not finite; the run stops and names where it was seen."""

    def __init__(self, rank: int, step: int, loss: float, what: str = "the loss") -> None:
        super().__init__(f"{what} is {loss} on rank {rank} at step {step}: training diverged (try a smaller lr)")
        self.rank = rank
        self.step = step
        self.loss = loss
        self.what = what


class BadPayload(ManyhandsError):
    """What came in cannot be what a codec has made: of the wrong length or kind, or out of range."""


def refuse_unless(holds: bool, name: str, value: object, bound: str) -> None:
    """Refuse `value` of setting `name` unless `holds`; the one wording of all such messages."""
    if not holds:
        raise Refused(f"{name} is {value}, but must be {bound}")


def unknown(kind: str, given: str, known: Iterable[str]) -> Refused:
    """The refusal of a name that does not exist; it offers the nearest ones, or else all."""
    names = {name.lstrip("-"): name for name in known}
    near = [names[name] for name in get_close_matches(given.lstrip("-").lower(), names)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(names.values()) or 'none'}"
    return Refused(f"there is no {kind} {given!r}: {hint}")

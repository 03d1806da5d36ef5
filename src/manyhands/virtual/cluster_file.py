"""Reading a cluster file: whatever is wrong in it is refused with the file and the line.

    examples/x.toml:3: bandwidth is '10Gbits', but must be a rate such as 10Gbit or 1.25GB

The keys are the arguments of a Cluster; faults and stragglers are tables. Each value is looked at first by itself (is
it of the right kind?), then together with all others, and each fault by itself in the cluster, so that it is clear
which line is to blame.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from manyhands.core.errors import Refused, unknown
from manyhands.virtual.faults import CutLink, Die, Fault, Slow, SlowLink, Stop
from manyhands.virtual.toml_lines import TomlLines
from manyhands.virtual.units import bytes_per_second, seconds

Made = TypeVar("Made")
Check = Callable[[Any, str], object]
"""Refuses a value of the wrong kind; it is told the name."""

FAULTS: dict[str, type[Fault]] = {"die": Die, "stop": Stop, "cut": CutLink, "slow-link": SlowLink, "slow": Slow}
TABLES = "stragglers", "faults"


def kind(words: str, *types: type) -> Check:
    """A value of one of these types; true and false are no numbers."""

    def check(value: Any, name: str) -> None:
        if not isinstance(value, types) or isinstance(value, bool):
            raise Refused(f"{name} is {value!r}, but must be {words}")

    return check


def unit(words: str, read: Check) -> Check:
    """A value that people write with a unit."""

    def check(value: Any, name: str) -> None:
        kind(words, str, int, float)(value, name)
        read(value, name)

    return check


def each(words: str, one: Check) -> Check:
    """A list of such values."""

    def check(value: Any, name: str) -> None:
        kind(words, list)(value, name)
        for item in value:
            one(item, f"one of {name}")

    return check


WHOLE, NUMBER, TEXT = kind("a whole number", int), kind("a number", int, float), kind("a text", str)
RATE, TIME = unit("a rate such as 10Gbit or 1.25GB", bytes_per_second), unit("a time such as 50us or 2ms", seconds)
RANKS = each("a list of ranks", WHOLE)

SETTINGS: Mapping[str, Check] = {
    **dict.fromkeys(("workers", "servers", "hosts", "cores"), WHOLE),
    **dict.fromkeys(("jitter", "cpu_per_byte"), NUMBER),
    **dict.fromkeys(("latency", "local_latency"), TIME),
    **dict.fromkeys(("bandwidth", "local_bandwidth"), RATE),
    **dict.fromkeys(("order", "turns"), RANKS),
    "speeds": each("a list of numbers", NUMBER),
    "newcomers": each("a list of times", TIME),
}
OF_FAULTS: Mapping[str, Check] = {"rank": WHOLE, "ranks": RANKS, "at": TIME, "factor": NUMBER, "why": TEXT}

KEYS = {
    "the number of speeds": "speeds",
    "the time of a newcomer": "newcomers",
    "a rank in order": "order",
    "a rank in turns": "turns",
    "the rank of a fault": "rank",
    "the time of a fault": "at",
}
"""Of what a refusal speaks, where that is not the key itself."""


class ClusterFile:
    """A file that is being read."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        try:
            text = Path(path).read_text(encoding="utf-8")
            self.given: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise self._syntax(str(error), text) from None
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(f"cannot read the cluster file {path}: {error}") from error
        self._lines = TomlLines(text)

    def _syntax(self, error: str, text: str) -> Refused:
        """What the parser says, with the line in its place: it may also be the last one."""
        found = re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", error, re.DOTALL)
        what, line = found.groups() if found else (error, "1")
        return Refused(f"{self._path}:{line or len(text.splitlines()) or 1}: {what[:1].lower()}{what[1:]}")

    @contextmanager
    def blaming(self, key: str | None = None, *table: Any) -> Iterator[None]:
        """Refusals from here on name the line of this key, or of the one that they speak of."""
        try:
            yield
        except Refused as error:
            subject = str(error).partition(" is ")[0]
            line = self._lines.of(key or KEYS.get(subject, subject), *table)
            raise Refused(f"{self._path}:{line}: {error}") from None

    def settings(self) -> dict[str, Any]:
        """All but the tables, each of the right kind."""
        for key in self.given:
            with self.blaming(key):
                if key not in (*SETTINGS, *TABLES):
                    raise unknown("setting", key, (*SETTINGS, *TABLES))
                if key in SETTINGS:
                    SETTINGS[key](self.given[key], key)
        return {key: value for key, value in self.given.items() if key in SETTINGS}

    def faults(self, name: str) -> list[Fault]:
        """The tables of one name."""
        tables = self.given.get(name, [])
        tables = [tables] if isinstance(tables, dict) else tables
        with self.blaming(name):
            each(f"tables: [[{name}]]", kind("a table", dict))(tables, name)
        return [self._fault({**table}, name, number) for number, table in enumerate(tables)]

    def _fault(self, table: dict[str, Any], name: str, number: int) -> Fault:
        which = table.pop("kind", "slow")
        with self.blaming("kind", name, number):
            known = list(FAULTS) if name == "faults" else ["slow"]
            if which not in known:
                raise Refused(f"the kind of a fault is {which!r}, but must be {' or '.join(known)}")
        settings = {field.name: field.default for field in fields(FAULTS[which])}
        for key, value in table.items():
            with self.blaming(key, name, number):
                if key not in settings:
                    raise unknown(f"setting of a fault of kind {which!r}", key, settings)
                OF_FAULTS[key](value, key)
        with self.blaming(None, name, number):
            for key, default in settings.items():
                if default is MISSING and key not in table:
                    raise Refused(f"a fault of kind {which!r} has no {key}, but must have one")
            return FAULTS[which](**table)


def read(path: str | Path, make: Callable[..., Made]) -> Made:
    """The cluster that `make` makes of a file."""
    file = ClusterFile(path)
    given = file.settings()
    with file.blaming():
        make(**given)
    found = {name: file.faults(name) for name in TABLES}
    for name, faults in found.items():
        for number, fault in enumerate(faults):
            with file.blaming("ranks" if isinstance(fault, Slow) else "rank", name, number):
                make(**given, **{name: [fault]})
    return make(**given, **found)

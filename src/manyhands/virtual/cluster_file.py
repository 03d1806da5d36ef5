"""Reading a cluster file: an error in it is refused with the file and the line.

    examples/x.toml:3: bandwidth is '10Gbits', but must be a rate such as 10Gbit or 1.25GB

The keys are the arguments of a Cluster; faults and stragglers are tables. First the type of each value is checked, then
all settings together, then each fault by itself in the cluster, so that an error belongs to one line.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from manyhands.core.errors import Refused, unknown
from manyhands.core.units import bytes_per_second, seconds
from manyhands.virtual.faults import CutLink, Die, Fault, Slow, SlowLink, Stop

Made = TypeVar("Made")
Check = Callable[[Any, str], object]
"""Refuses a value of the wrong type; the second argument is its name."""

FAULTS: dict[str, type[Fault]] = {"die": Die, "stop": Stop, "cut": CutLink, "slow-link": SlowLink, "slow": Slow}
TABLES = "stragglers", "faults"


def of_type(words: str, *types: type) -> Check:
    """A value of one of these types, which `words` describe; a boolean is not a number."""

    def check(value: Any, name: str) -> None:
        if not isinstance(value, types) or isinstance(value, bool):
            raise Refused(f"{name} is {value!r}, but must be {words}")

    return check


def unit(words: str, read: Check) -> Check:
    """A number, or a text with a unit that `read` understands."""

    def check(value: Any, name: str) -> None:
        of_type(words, str, int, float)(value, name)
        read(value, name)

    return check


def each(words: str, one: Check) -> Check:
    """A list of values that all pass `one`."""

    def check(value: Any, name: str) -> None:
        of_type(words, list)(value, name)
        for item in value:
            one(item, f"one of {name}")

    return check


WHOLE, NUMBER, TEXT = of_type("a whole number", int), of_type("a number", int, float), of_type("a text", str)
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
    "the time at which a worker joins": "newcomers",
    "a rank in order": "order",
    "a rank in turns": "turns",
    "the rank of a fault": "rank",
    "the time of a fault": "at",
}
"""The keys that refusals of a Cluster or a fault mean, where they do not begin with the key itself."""


def line_of(text: str, path: Sequence[str | int]) -> int:
    """The line on which the value at `path` (keys, and positions of tables) begins in a TOML text that is valid.

    tomllib does not say it. But a beginning of the text is valid exactly if it ends between two statements, so the
    statement that defines the value is the one that the first valid beginning with that value ends with. If it is
    nowhere, the line is that of the table which should have it.
    """
    document = tomllib.loads(text)
    while path and not _has(document, path):
        path = path[:-1]
    lines, begin = text.split("\n"), 1
    for end in range(1, len(lines) + 1):
        try:
            document = tomllib.loads("\n".join(lines[:end]))
        except tomllib.TOMLDecodeError:
            continue
        if path and _has(document, path):
            return begin
        begin = end + 1
    return 1


def _has(document: Any, path: Sequence[str | int]) -> bool:
    try:
        for key in path:
            document = document[key]
    except (KeyError, IndexError, TypeError):
        return False
    return True


class ClusterFile:
    """A cluster file, parsed."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        try:
            text = Path(path).read_text(encoding="utf-8")
            self.given: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise self._syntax(str(error), text) from None
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(f"cannot read the cluster file {path}: {error}") from error
        self._text = text

    def _syntax(self, error: str, text: str) -> Refused:
        """The parser's message with its line in front; "end of document" is the last line."""
        found = re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", error, re.DOTALL)
        message, line = found.groups() if found else (error, "1")
        return Refused(f"{self._path}:{line or len(text.splitlines()) or 1}: {message[:1].lower()}{message[1:]}")

    @contextmanager
    def errors_at(self, *table: str | int, key: str | None = None) -> Iterator[None]:
        """Add file and line of this key in this table to refusals; without a key, of the one that a refusal names."""
        try:
            yield
        except Refused as error:
            subject = str(error).partition(" is ")[0]
            line = line_of(self._text, (*table, key or KEYS.get(subject, subject)))
            raise Refused(f"{self._path}:{line}: {error}") from None

    def settings(self) -> dict[str, Any]:
        """All keys but the tables, with their types checked."""
        for key in self.given:
            with self.errors_at(key=key):
                if key not in (*SETTINGS, *TABLES):
                    raise unknown("setting", key, (*SETTINGS, *TABLES))
                if key in SETTINGS:
                    SETTINGS[key](self.given[key], key)
        return {key: value for key, value in self.given.items() if key in SETTINGS}

    def tables(self, name: str) -> dict[tuple[str | int, ...], dict[str, Any]]:
        """The tables of one name by their paths: one `[name]`, or any number of `[[name]]`."""
        value = self.given.get(name, [])
        if isinstance(value, dict):
            return {(name,): value}
        with self.errors_at(key=name):
            each(f"tables: [[{name}]]", of_type("a table", dict))(value, name)
        return {(name, number): table for number, table in enumerate(value)}

    def fault(self, path: tuple[str | int, ...], table: dict[str, Any]) -> Fault:
        """The fault or straggler that a table describes."""
        kind = table.get("kind", "slow")
        with self.errors_at(*path, key="kind"):
            known = list(FAULTS) if path[0] == "faults" else ["slow"]
            if kind not in known:
                raise Refused(f"the kind of a fault is {kind!r}, but must be {' or '.join(known)}")
        defaults = {field.name: field.default for field in fields(FAULTS[kind])}
        given = {key: value for key, value in table.items() if key != "kind"}
        for key, value in given.items():
            with self.errors_at(*path, key=key):
                if key not in defaults:
                    raise unknown(f"setting of a fault of kind {kind!r}", key, defaults)
                OF_FAULTS[key](value, key)
        with self.errors_at(*path):
            for key, default in defaults.items():
                if default is MISSING and key not in given:
                    raise Refused(f"a fault of kind {kind!r} has no {key}, but must have one")
            return FAULTS[kind](**given)


def read(path: str | Path, make: Callable[..., Made]) -> Made:
    """The cluster that `make` makes of the settings in a file."""
    file = ClusterFile(path)
    given = file.settings()
    with file.errors_at():
        make(**given)
    found: dict[str, list[Fault]] = {name: [] for name in TABLES}
    for name, faults in found.items():
        for table_path, table in file.tables(name).items():
            fault = file.fault(table_path, table)
            with file.errors_at(*table_path, key="ranks" if isinstance(fault, Slow) else "rank"):
                make(**given, **{name: [fault]})
            faults.append(fault)
    return make(**given, **found)

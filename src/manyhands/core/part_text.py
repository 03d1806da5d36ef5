"""Parts on the command line: `feedback(topk(0.01))` becomes a codec, `adagrad(lr=0.03)` a rule.

    part = name | name(value, ..., name=value, ...)        value = number | "text" | true | false | none | part

The text is parsed, never evaluated; only the names that `manyhands.codecs` and `manyhands.rules` export are known, in
upper or lower case. A schedule may be used as a number: `sgd(cosine(0.1, 60000))`. Parsing a part does not import
torch, building it does.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.core.errors import Refused, unknown
from manyhands.core.method_index import PACKAGE

HOMES = {"Codec": "codecs", "Rule": "rules", "Rate": "rules.schedules", "Team": "splits.teams"}
"""The module that exports the parts of each kind, below `manyhands`."""
WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class PartSpec:
    """A part that was parsed and is not built yet."""

    home: str
    name: str
    values: tuple[Any, ...] = ()
    knobs: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        inside = ", ".join([*map(str, self.values), *(f"{name}={value}" for name, value in self.knobs)])
        return f"{self.name.lower()}({inside})" if inside else self.name.lower()

    def build(self) -> Any:
        """The codec, rule or schedule, made by its constructor."""
        make = getattr(importlib.import_module(f"manyhands.{self.home}"), self.name)
        try:
            return make(*map(_built, self.values), **{name: _built(value) for name, value in self.knobs})
        except TypeError as error:
            raise Refused(f"cannot make {self.name.lower()}: {error}") from error


def _built(value: Any) -> Any:
    return value.build() if isinstance(value, PartSpec) else value


def exported(package: Path = PACKAGE, kind: str = "Rate") -> dict[str, tuple[str, str]]:
    """The lower-case name of every part, with its module and its name there, read from the source.

    A name that two modules export is that of the module of `kind`.
    """
    found: dict[str, tuple[str, str]] = {}
    for home in sorted(HOMES.values(), key=lambda home: home == HOMES.get(kind)):
        path = package.joinpath(*home.split("."))
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found |= {name.lower(): (home, name) for name in ast.literal_eval(node.value)}
    return found


def read(text: str, kind: str, known: Mapping[str, tuple[str, str]] | None = None) -> PartSpec:
    """Parse the text of a part of this kind ("Codec" or "Rule")."""
    known = exported(kind="Codec" if kind == "Codec" else "Rate") if known is None else known
    home = HOMES.get(kind)
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise Refused(f"cannot read {text!r}: a part is written like feedback(topk(0.01))") from error
    value = _read(node, known)
    if not isinstance(value, PartSpec) or value.home != (home or value.home):
        names = [name for name, (where, _) in known.items() if where == (home or where)]
        raise Refused(f"{text!r} is no {kind.lower()}: there are {', '.join(names)}")
    return value


def _read(node: ast.expr, known: Mapping[str, tuple[str, str]]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=name) if name.lower() in WORDS:
            return WORDS[name.lower()]
        case ast.Name(id=name):
            return PartSpec(*_find(name, known))
        case ast.Call(func=ast.Name(id=name), args=values, keywords=knobs) if all(knob.arg for knob in knobs):
            given = tuple((str(knob.arg), _read(knob.value, known)) for knob in knobs)
            return PartSpec(*_find(name, known), tuple(_read(value, known) for value in values), given)
    raise Refused(
        f"{ast.unparse(node)!r} is not allowed in a part: only numbers, strings, true, false, none and parts are"
    )


def _find(name: str, known: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    if name.lower() not in known:
        raise unknown("codec, rule or team", name, known)
    return known[name.lower()]


def split(text: str, separator: str = ",") -> list[str]:
    """Split at separators that are not inside parentheses."""
    pieces, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == separator and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return [piece.strip() for piece in pieces if piece.strip()]

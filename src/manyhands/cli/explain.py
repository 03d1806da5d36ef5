"""`manyhands explain METHOD`: the method's card and the source of its loops."""

from __future__ import annotations

import ast
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from manyhands.cli.index import Loop, Method, methods
from manyhands.cli.output import console, print_json, print_table
from manyhands.cli.usage import parse
from manyhands.core.errors import unknown

ABOUT = """One method's card: what it does, its knobs, its paper, and the source of its loops.

examples:
  manyhands explain ssp
  manyhands explain ssp --json"""


@dataclass
class Options:
    """What `explain` takes.

    Args:
        method: a name that `manyhands list` shows.
        json: print one object.
    """

    method: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="METHOD")]
    json: bool = False


class Found(NamedTuple):
    """A loop's place and text."""

    path: Path
    line: int
    source: str


def run(argv: Sequence[str]) -> int:
    """Print the card."""
    options = parse(Options, argv, "explain", ABOUT)
    known = methods()
    if options.method not in known:
        raise unknown("method", options.method, known)
    method = known[options.method]
    print_json(facts(method)) if options.json else show(method)
    return 0


def find(package: Path, loop: Loop) -> Found | None:
    """Where a dotted name stands in a file of the package."""
    path = package / loop.path
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    inside: list[ast.stmt] = ast.parse(text).body
    node: ast.stmt | None = None
    for name in loop.name.split("."):
        node = next((inner for inner in inside if getattr(inner, "name", None) == name), None)
        inside = getattr(node, "body", [])
    if node is None:
        return None
    source = textwrap.dedent("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]))
    return Found(path, node.lineno, source)


def facts(method: Method) -> dict[str, Any]:
    """The card as one object."""
    knobs = [
        {"name": k.name, "type": k.annotation, "default": k.default, "required": k.required, "help": k.help}
        for k in method.knobs
    ]
    loops = []
    for loop in method.card.loops:
        found = find(method.package, loop)
        place = {"file": method.where(found.path), "line": found.line, "source": found.source} if found else {}
        loops.append({"name": loop.name, **place})
    return {**method.facts(), "text": method.card.text, "knobs": knobs, "loops": loops}


def show(method: Method) -> None:
    """The card for people."""
    out = console()
    out.print(f"[bold]{method.name}[/bold] ({method.family})", method.card.summary, sep="\n")
    out.print(f"\n{method.card.text}\n", markup=False, soft_wrap=True)
    knobs = [(k.flag, k.annotation, "required" if k.required else k.default, k.help) for k in method.knobs]
    print_table(("knob", "type", "default", "meaning"), knobs)
    out.print(f"[bold]Reference[/bold]\n{method.card.paper}\n", soft_wrap=True)
    out.print(f"[bold]Recipe[/bold]\n{nearby(method.recipe)}:{method.line}\n", soft_wrap=True)
    for loop in method.card.loops:
        found = find(method.package, loop)
        place = f"{nearby(found.path)}:{found.line}" if found else f"{loop.path} (not found)"
        out.print(f"[bold]{loop.name}[/bold]  {place}", soft_wrap=True)
        if found:
            _print_source(found.source)
    out.print(f"Try it: manyhands train {method.name} --virtual", soft_wrap=True)


def nearby(path: Path) -> str:
    """The path from here if it is below, so that it can be opened as printed."""
    here = os.path.relpath(path)
    return str(path) if here.startswith("..") else here


def _print_source(source: str) -> None:
    from rich.syntax import Syntax

    out = console()
    if out.is_terminal:
        out.print(Syntax(source, "python", background_color="default"))
    else:
        print(source)
    print()

"""`manyhands explain METHOD`: the method's card, its traits and the source of its loops."""

from __future__ import annotations

import ast
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from manyhands.cli.drawing import drawings
from manyhands.cli.output import console, print_json, print_table
from manyhands.cli.usage import parse
from manyhands.core.errors import unknown
from manyhands.core.method_index import Loop, Method, methods

ABOUT = """One method's card: what it does, its traits, its knobs, its paper, and the source of its loops.

examples:
  manyhands explain ssp
  manyhands explain ssp --json"""


@dataclass
class ExplainOptions:
    """What `explain` takes.

    Args:
        method: a name that `manyhands list` shows.
        json: print one object.
    """

    method: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="METHOD")]
    json: bool = False


LABELS = {
    "lockstep": "in lock step",
    "on_worker_loss": "when a worker is lost",
    "one_host": "on one host only",
    "servers": "may have server ranks",
    "joiners": "workers may join a running job",
    "resumable": "has checkpoints",
    "bounded": "fast workers wait for slow ones",
    "draws_from_all": "every worker draws from all samples",
    "peekable": "can be evaluated without quiescing",
    "may_end_early": "a worker may take fewer steps than the others",
    "averages_gradients": "an update is the mean gradient of all workers",
    "equal_replicas": "all replicas are equal after each step",
    "keeps_changes": "a change of the weights by the script is in force",
    "plans_ahead": "must know the number of steps",
    "needs_step": "in a loop with its own backward and optimizer step",
    "needs_whole_model": "over teams of ranks",
    "lag": "the lag of a gradient",
    "lag_counts": "what that counts, or why",
    "streams": "mini-batches of several steps are in flight",
}
"""What the traits of a strategy are called here."""
TEXTS = ("lag", "lag_counts")
"""Traits that are printed as they are."""


class LoopSource(NamedTuple):
    """Where the source of a loop is, and its text."""

    path: Path
    line: int
    source: str


def run(argv: Sequence[str]) -> int:
    """Print the card of one method."""
    options = parse(ExplainOptions, argv, "explain", ABOUT)
    known = methods()
    if options.method not in known:
        raise unknown("method", options.method, known)
    method = known[options.method]
    traits = traits_of(method)
    print_json({**facts(method), "traits": traits}) if options.json else show(method, traits)
    return 0


def traits_of(method: Method) -> dict[str, Any]:
    """The traits of the method's strategy, with the default knobs."""
    from manyhands import catalog  # here, because it imports torch

    return asdict(getattr(catalog, method.function)().traits)


def trait_lines(traits: Mapping[str, Any]) -> list[str]:
    """The traits in words."""
    words = {True: "yes", False: "no", "ends": "the run ends", "continues": "the run continues", "": "yes"}
    texts = {name: value if name in TEXTS else words.get(value) or f"no, {value}" for name, value in traits.items()}
    return [f"{LABELS[name]}: {text}" for name, text in texts.items()]


def find(package: Path, loop: Loop) -> LoopSource | None:
    """The source of a dotted name in a file of the package; None if it is not there."""
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
    return LoopSource(path, node.lineno, source)


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
    pictures = [{"title": title, "picture": picture} for title, picture in drawings(method)]
    return {**method.facts(), "text": method.card.text, "pictures": pictures, "knobs": knobs, "loops": loops}


def show(method: Method, traits: Mapping[str, Any]) -> None:
    """Print the card as text."""
    out = console()
    out.print(f"[bold]{method.name}[/bold] ({method.family})", method.card.summary, sep="\n")
    out.print(f"\n{method.card.text}\n", markup=False, soft_wrap=True)
    out.print("[bold]Traits[/bold] (with the default knobs)", *trait_lines(traits), "", sep="\n")
    for title, picture in drawings(method):
        out.print(f"[bold]{title}[/bold]")
        out.print(f"{picture}\n", markup=False, highlight=False, no_wrap=True, overflow="ignore", crop=False)
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
    """The path relative to the working directory if it is inside, so that it can be opened as printed."""
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

"""The index of methods, read from the source of the catalog without running it.

    catalog/stale.py      ->  the family "stale"
    def ssp(staleness=3)  ->  the method "ssp" with the knob "staleness"
    its docstring         ->  the card: a sentence, text, `Reference:`, `Loops:`, `Args:`

Nothing is imported, so that lists and help texts do not wait for torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent
PLAIN = {"int": int, "float": float, "bool": bool, "str": str}
"""Types that the command line parses itself; all others are parts, given as text."""


class Loop(NamedTuple):
    """One loop of a method: a file of the package and a dotted name in it."""

    path: str
    name: str


@dataclass(frozen=True)
class Knob:
    """One parameter of a recipe."""

    name: str
    annotation: str
    type: Any
    """The type that the command line parses; `str` for a part."""
    part: str | None = None
    """The kind of part, such as "Codec"."""
    default: Any = None
    """The default value; of a part its source text."""
    required: bool = False
    help: str = ""

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return f"--{self.name.replace('_', '-')}"


@dataclass(frozen=True)
class Card:
    """The docstring of a recipe, taken apart."""

    summary: str
    text: str
    paper: str
    loops: tuple[Loop, ...]
    args: Mapping[str, str]


@dataclass(frozen=True)
class Method:
    """One recipe of the catalog."""

    name: str
    family: str
    recipe: Path
    line: int
    card: Card
    knobs: tuple[Knob, ...]
    package: Path = field(default=PACKAGE, repr=False)

    @property
    def function(self) -> str:
        """The recipe's name in Python."""
        return self.name.replace("-", "_")

    def where(self, path: Path) -> str:
        """The path of a file of the package, from the root of the repository."""
        inside = path.relative_to(self.package)
        base = Path("src", self.package.name) if self.package.parent.name == "src" else Path(self.package.name)
        return str(base / inside)

    def facts(self) -> dict[str, Any]:
        """The entry of `manyhands list --json`."""
        first = self.package / self.card.loops[0].path if self.card.loops else self.recipe
        return {
            "name": self.name,
            "family": self.family,
            "summary": self.card.summary,
            "paper": self.card.paper,
            "file": self.where(first),
            "recipe": self.where(self.recipe),
            "knobs": [knob.name for knob in self.knobs],
        }


def methods(package: Path = PACKAGE) -> dict[str, Method]:
    """All methods by name, family by family."""
    files = [path for path in sorted((package / "catalog").glob("*.py")) if not path.name.startswith("_")]
    return {method.name: method for path in files for method in _recipes(path, package)}


def _recipes(path: Path, package: Path) -> Iterator[Method]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            card = read_card(ast.get_docstring(node) or "")
            knobs = tuple(_knobs(node.args, card.args, constants))
            yield Method(node.name.replace("_", "-"), path.stem, path, node.lineno, card, knobs, package)


def _knobs(given: ast.arguments, texts: Mapping[str, str], constants: Mapping[str, ast.expr]) -> Iterator[Knob]:
    named = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [*[None] * (len(named) - len(given.defaults)), *given.defaults]
    for arg, default in zip(named + given.kwonlyargs, defaults + given.kw_defaults, strict=True):
        annotation = arg.annotation or ast.Name("str")
        kind, part = _kind(annotation, constants)
        text = ast.unparse(annotation)
        value = None if default is None else _value(default, constants)
        yield Knob(arg.arg, text, kind, part, value, default is None, texts.get(arg.arg, ""))


def _kind(node: ast.expr, constants: Mapping[str, ast.expr]) -> tuple[Any, str | None]:
    """The type the command line parses, and the kind of part if it is one."""
    match node:
        case ast.Name(id=name) if name in PLAIN:
            return PLAIN[name], None
        case ast.Name(id=name) if name in constants:
            return _kind(constants[name], constants)
        case ast.BinOp(left=left, op=ast.BitOr(), right=ast.Constant(value=None)):
            kind, part = _kind(left, constants)
            return kind | None, part
        case ast.BinOp(op=ast.BitOr(), right=ast.Name(id=name)) if name in PLAIN:
            return PLAIN[name], None
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            given = ast.literal_eval(choices)
            return Literal[given], None
    return str, ast.unparse(node)


def _value(node: ast.expr, constants: Mapping[str, ast.expr]) -> Any:
    """The default itself if it is a literal, else its source: a part."""
    if isinstance(node, ast.Name) and node.id in constants:
        return _value(constants[node.id], constants)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def read_card(docstring: str) -> Card:
    """Take a recipe's docstring apart."""
    summary, _, rest = docstring.partition("\n")
    blocks: dict[str, list[str]] = {"": [], "Reference": [], "Loops": [], "Args": []}
    block = ""
    for line in rest.splitlines():
        key, colon, value = line.partition(":")
        if colon and key in blocks:
            block, line = key, value.strip()
        elif (block == "Args" and line[:1].strip()) or (block != "Args" and not line.strip()):
            block = ""
        blocks[block].append(line)
    paper, loops = (" ".join(" ".join(blocks[name]).split()) for name in ("Reference", "Loops"))
    places = (entry.split() for entry in loops.split(";") if entry.strip())
    text = "\n".join(blocks[""]).strip("\n")
    return Card(summary.strip(), text, paper, tuple(Loop(*place) for place in places), _args(blocks["Args"]))


def _args(lines: list[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    name = ""
    for line in lines:
        depth = len(line) - len(line.lstrip())
        key, colon, value = line.strip().partition(":")
        if depth == 4 and colon and key.isidentifier():
            name, line = key, value
        if name and line.strip():
            texts[name] = f"{texts.get(name, '')} {line.strip()}".strip()
    return texts

"""The shape of the house: imports go downwards only, files stay small, the public names are complete."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

import manyhands
from manyhands.core.method_index import methods

PACKAGE = Path(manyhands.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]
LONGEST = 250

PARTS = {"splits", "consistency", "codecs", "rules"}
"""Each of them answers one question and knows nothing of the others."""
TALK = {"collectives", "servers", "peers"}
"""Parts in which ranks exchange messages: they may use what is exchanged, and how it is applied."""
METHODS = {"core", *PARTS, *TALK, "strategies"}
MAY_IMPORT = {
    "core": set(),
    **{part: {"core"} for part in PARTS},
    "splits": {"core", "collectives"},
    **{part: {"core", "codecs", "rules", "consistency"} for part in TALK},
    "virtual": {"core"},
    "tasks": {"core"},
    "cost": {"core", "splits", "strategies"},
    "report": {"core", "__version__"},
    "strategies": {"core", *PARTS, *TALK},
    "catalog": METHODS,
    "runtime": {"core"},
    "engines": {*METHODS, "virtual", "tasks", "runtime"},
    "run": {*METHODS, "catalog", "virtual", "tasks", "report", "engines", "runtime"},
    "cli": {*METHODS, "virtual", "tasks", "cost", "report", "run", "engines", "catalog", "runtime", "__version__"},
}
"""What each folder, or module at the top, may import besides itself. `__init__` may import everything but the cli."""


def imported(path):
    """The modules of ours that a file imports when it runs; imports for type checkers do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    ignored = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def folders_imported(path):
    names = [name.split(".") for name in imported(path)]
    return {name[1] for name in names if name[0] == "manyhands" and len(name) > 1}


@pytest.mark.parametrize("name", NAMES)
def test_imports_go_downwards(name):
    home = Path(name).parts[0].removesuffix(".py")
    allowed = set(MAY_IMPORT) - {"cli"} if home == "__init__" else MAY_IMPORT[home] | {home}
    assert folders_imported(PACKAGE / name) <= allowed


def code_lines(path):
    """Lines with code: no blanks, no comments, no docstrings."""
    text = path.read_text(encoding="utf-8")
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in silent]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


@pytest.mark.parametrize("name", NAMES)
def test_files_are_small(name):
    assert code_lines(PACKAGE / name) <= LONGEST


def test_the_public_names_are_complete():
    public = manyhands.__all__
    assert public == sorted(public)
    assert all(getattr(manyhands, name) is not None for name in public)
    assert {method.function for method in methods().values()} == set(manyhands.catalog.__all__)
    assert all(callable(getattr(manyhands, name)) for name in manyhands.catalog.__all__)
    assert set(manyhands.catalog.__all__) <= set(dir(manyhands))
    assert set(public) <= set(dir(manyhands))
    assert {"Cluster", "Result", "Slow", "Task", "train", "Refused", "PeerLost", "Diverged"} <= set(public)

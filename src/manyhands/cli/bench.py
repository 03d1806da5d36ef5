"""`manyhands bench NAME`: runs one benchmark and compares its numbers with their goals.

A benchmark is a module in `benchmarks/` with `run(progress) -> [{"name": ..., "value": ..., "goal": ">= 100000"}]`;
the first line of its docstring says what it measures. Modules whose names begin with an underscore are shared by
several benchmarks.
"""

from __future__ import annotations

import ast
import importlib.util
import operator
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from manyhands.cli.env import machine
from manyhands.cli.output import print_json, print_table
from manyhands.cli.usage import parse
from manyhands.core.errors import ManyhandsError, unknown
from manyhands.core.method_index import PACKAGE
from manyhands.report.progress import Progress, choose

ABOUT = """Measure this installation against its goals; without a name, list the benchmarks.

examples:
  manyhands bench
  manyhands bench virtual --json"""

BOUNDS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


@dataclass
class BenchOptions:
    """What `bench` takes.

    Args:
        name: a benchmark; none: list them.
        json: print one object: bench, results, machine.
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None
    json: bool = False


def run(argv: Sequence[str]) -> int:
    """Run one benchmark, or list them all."""
    options = parse(BenchOptions, argv, "bench", ABOUT)
    known = benchmarks()
    if options.name is None:
        about = [{"name": name, "about": _about(path)} for name, path in known.items()]
        print_json(about) if options.json else print_table(("benchmark", "measures"), [list(b.values()) for b in about])
        return 0
    if options.name not in known:
        raise unknown("benchmark", options.name, known)
    results = measure(known[options.name], choose())
    if options.json:
        print_json({"bench": options.name, "results": results, "machine": machine()})
    else:
        rows = [[result.get(key, "") for key in ("name", "value", "goal")] + [_verdict(result)] for result in results]
        print_table(("what", "value", "goal", ""), rows)
    return 0


def benchmarks(package: Path = PACKAGE) -> dict[str, Path]:
    """The benchmarks by name: inside an installed package, else beside its source."""
    folder = package / "benchmarks"
    if not folder.is_dir():
        folder = package.parent.parent / "benchmarks"
    return {path.stem: path for path in sorted(folder.glob("*.py")) if not path.name.startswith("_")}


def measure(path: Path, progress: Progress) -> list[dict[str, Any]]:
    """Run one benchmark; `met` is added to each result."""
    name = f"manyhands_benchmark_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ManyhandsError(f"cannot load the benchmark {path}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for modules that benchmarks share; last, so that they hide nothing
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        return [{**result, "met": met(result)} for result in module.run(progress)]
    finally:
        signal.signal(signal.SIGTERM, before)
        progress.stop()


def _leave(*_: Any) -> None:
    """Exit as after Ctrl-C, so that a benchmark removes what it has made, such as network namespaces."""
    sys.exit(128 + signal.SIGTERM)


def met(result: dict[str, Any]) -> bool | None:
    """Whether the value is within its goal; None if there is no goal."""
    sign, _, bound = str(result.get("goal") or "").partition(" ")
    return bool(BOUNDS[sign](result["value"], float(bound))) if sign in BOUNDS else None


def _verdict(result: dict[str, Any]) -> str:
    return {True: "met", False: "missed", None: ""}[result["met"]]


def _about(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]

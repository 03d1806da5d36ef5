"""`manyhands env`: what to paste into a bug report."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from manyhands import __version__
from manyhands.cli.output import print_json, print_table
from manyhands.cli.usage import parse

ABOUT = """Versions and machine: what to paste into a bug report.

examples:
  manyhands env
  manyhands env --json"""

PACKAGES = ("torch", "numpy", "greenlet", "rich", "tyro")


@dataclass
class Options:
    """What `env` takes.

    Args:
        json: print one object.
    """

    json: bool = False


def run(argv: Sequence[str]) -> int:
    """Print it."""
    options = parse(Options, argv, "env", ABOUT)
    facts = machine()
    if options.json:
        print_json(facts)
    else:
        print_table(
            ("what", "is"),
            [(name.removesuffix("_bytes").replace("_", " "), _words(name, value)) for name, value in facts.items()],
        )
    return 0


def machine() -> dict[str, Any]:
    """Everything about this installation and machine that changes results or speed."""
    return {
        "manyhands": __version__,
        **{name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory(),
        "shared_memory_bytes": _shared_memory(),
        "c_kernels": _kernels(),
    }


def version(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _shared_memory() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def _kernels() -> str:
    from manyhands.codecs import native

    return "compiled" if native.loaded() else "fallback"


def _words(name: str, value: object) -> str:
    if value is None:
        return "not found"
    return f"{int(str(value)) / 2**30:.1f} GiB" if name.endswith("_bytes") else str(value)

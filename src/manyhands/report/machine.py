"""Provenance of a run: versions, machine, and the command that started it."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from manyhands import __version__

PACKAGES = ("torch", "numpy", "greenlet", "msgpack", "orjson", "safetensors", "rich", "tyro", "plotly")


@cache
def versions() -> dict[str, str | None]:
    """The versions of manyhands, Python and the packages it uses."""
    return {"manyhands": __version__, **{name: version(name) for name in PACKAGES}, "python": platform.python_version()}


def version(name: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@cache
def hardware() -> dict[str, Any]:
    """System, processor, usable cores, memory."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory(),
    }


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def provenance() -> dict[str, Any]:
    """What it takes to repeat a run: time, command, versions, machine."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv[0] else None,
        "versions": dict(versions()),
        "machine": dict(hardware()),
    }

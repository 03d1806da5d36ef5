"""`manyhands env`: what to paste into a bug report."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.cli.output import print_json, print_table
from manyhands.cli.usage import parse
from manyhands.report.machine import hardware, versions
from manyhands.runtime.membership.memfd import free_bytes

ABOUT = """Versions and machine: what to paste into a bug report.

examples:
  manyhands env
  manyhands env --json"""


@dataclass
class EnvOptions:
    """What `env` takes.

    Args:
        json: print one object.
    """

    json: bool = False


def run(argv: Sequence[str]) -> int:
    """Print versions and machine."""
    options = parse(EnvOptions, argv, "env", ABOUT)
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
    """Everything about this installation and machine that affects results or speed."""
    return {
        **versions(),
        **hardware(),
        "free_memory_bytes": _free_memory(),
        "shared_memory": _shared_memory(),
        "loopback": _loopback(),
        "torch_distributed": _backends(),
        "c_kernels": _kernels(),
    }


def _free_memory() -> int | None:
    """Free memory of the machine or, in a container, of its limit."""
    try:
        return free_bytes()
    except (OSError, KeyError, ValueError):
        return None


def _shared_memory() -> str:
    """Whether --link shm works; it does not depend on the size of /dev/shm."""
    try:
        file = os.memfd_create("manyhands-env", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        return f"does not work: {error}"
    try:
        os.posix_fallocate(file, 0, 4096)
        return "works"
    except OSError as error:
        return f"does not work: {error.strerror}"
    finally:
        os.close(file)


def _loopback() -> str:
    """Whether --link tcp works on this machine."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname(), 2):
            return "works"
    except OSError as error:
        return f"does not work: {error}"


def _backends() -> str | None:
    """The backends that `collective=native` can use."""
    from torch import distributed

    if not distributed.is_available():
        return None
    return ", ".join(name for name in ("gloo", "nccl", "mpi") if getattr(distributed, f"is_{name}_available")()) or None


def _kernels() -> str:
    from manyhands.codecs import vector_kernels

    return "compiled" if vector_kernels.loaded() else "fallback"


def _words(name: str, value: object) -> str:
    if value is None:
        return "not found"
    return f"{int(str(value)) / 2**30:.1f} GiB" if name.endswith("_bytes") else str(value)

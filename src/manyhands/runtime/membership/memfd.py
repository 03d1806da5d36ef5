"""Shared memory of the ranks of one host: anonymous files (memfd), so that nothing remains after a crash."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

MB = 10**6


class Memories:
    """The shared memory of a job, by host and name. It lives as long as the job."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, str], tuple[int, int]] = {}

    def ask(self, host: int, name: str, nbytes: int) -> tuple[int | None, str]:
        """The file descriptor of a region, created at the first request; or the reason why there is none."""
        file, size = self._files.get((host, name), (None, nbytes))
        if size != nbytes:
            return None, f"the shared memory {name!r} has {size} bytes, but {nbytes} were requested"
        if file is None:
            try:
                file = _reserve(name, nbytes)
            except OSError as error:
                return None, f"the shared memory {name!r} needs {nbytes / MB:,.1f} MB: {error.strerror}"
            self._files[host, name] = file, nbytes
        return file, ""

    def close(self) -> None:
        """Close all regions; ranks that have mapped one keep it."""
        for file, _ in self._files.values():
            os.close(file)
        self._files.clear()


def _reserve(name: str, nbytes: int) -> int:
    """Allocate the pages now: a shortage later would be a bus error in the first rank that touches them.

    A memfd has no size limit of its own, and when memory runs out the kernel kills processes instead of refusing pages.
    So a request for more than is free is refused here.
    """
    if nbytes > (free := free_bytes()):
        raise OSError(errno.ENOMEM, f"only {free / MB:,.1f} MB are free")
    file = os.memfd_create(name[:30], os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError:
        os.close(file)
        raise
    return file


def free_bytes(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be allocated before the kernel kills processes: of the machine, or of its container's limit."""
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free = 1024 * int(lines["MemAvailable"].split()[0])
    with suppress(OSError, ValueError):  # no container, or no limit
        used, limit = (int((group / f"memory.{name}").read_text()) for name in ("current", "max"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        free = min(free, limit - used + int(cached))
    return max(0, free)

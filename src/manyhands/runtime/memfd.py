"""Memory that ranks of one host share: open files without a name, so nothing is left behind whoever dies."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

MB = 10**6


class Memories:
    """The memories of a job, by host and name. They live as long as the job."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, str], tuple[int, int]] = {}

    def ask(self, host: int, name: str, nbytes: int) -> tuple[int | None, str]:
        """The open file of that name, made when first asked for; or why there is none."""
        file, size = self._files.get((host, name), (None, nbytes))
        if size != nbytes:
            return None, f"the shared memory {name!r} has {size} bytes, but {nbytes} were asked for"
        if file is None:
            try:
                file = _reserve(name, nbytes)
            except OSError as error:
                return None, f"the shared memory {name!r} needs {nbytes / MB:,.1f} MB: {error.strerror}"
            self._files[host, name] = file, nbytes
        return file, ""

    def close(self) -> None:
        for file, _ in self._files.values():
            os.close(file)
        self._files.clear()


def _reserve(name: str, nbytes: int) -> int:
    """The pages are taken now: later a shortage would be a bus error in whoever touches them first.

    Such a file has no limit of its own, and when memory runs out the kernel kills processes instead of refusing pages.
    So we refuse before.
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
    """Memory that can be taken without anybody being killed: of the machine and, in a container, of its limit."""
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free = 1024 * int(lines["MemAvailable"].split()[0])
    with suppress(OSError, ValueError):  # no container, or no limit
        used, limit = (int((group / f"memory.{name}").read_text()) for name in ("current", "max"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        free = min(free, limit - used + int(cached))
    return max(0, free)

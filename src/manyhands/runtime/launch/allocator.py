"""The C allocator of a rank keeps the memory that one step frees, because the next step needs as much again.

glibc returns the free end of its heap to the kernel. The gradients and activations of the next step then begin with a
page fault for every 4 KiB, and the kernel clears each page: about 8,000 faults and a fifth of the time in a step of an
MLP of 10 M parameters. A user who has chosen other settings, or another allocator, keeps them.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEEPS = 2**31 - 1
"""So many free bytes at the end of the heap are kept: the most that `mallopt` takes."""
FROM_HEAP = 2**25
"""Smaller tensors than this come from the heap: the largest threshold that glibc has, which it otherwise reaches by
itself, but not if another threshold has been set."""


def keep_freed_memory() -> bool:
    """Set both thresholds, unless the environment does; whether they are in force."""
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if chosen or mallopt is None:  # musl and macOS have other allocators
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, FROM_HEAP) and mallopt(M_TRIM_THRESHOLD, KEEPS))

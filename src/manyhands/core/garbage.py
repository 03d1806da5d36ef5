"""Fewer runs of Python's cyclic garbage collector, where many objects are made that are not garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rare_collections(young: int) -> Iterator[None]:
    """Let `young` new objects come between two runs of the collector.

    Objects that live a little while (messages in transit) or for good (the lines of a record) survive several
    collections at the default threshold and are promoted to the old generation, which makes Python scan all old
    objects again and again.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(max(thresholds[0], young) if thresholds[0] else 0, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)

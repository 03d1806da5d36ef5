"""ServerSetup: what a strategy wants of its parameter servers, as one value for workers and servers alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from manyhands.core.codec import Codec
from manyhands.core.consistency import Consistency
from manyhands.core.rule import Rule
from manyhands.core.sharding import Sharding


@dataclass(frozen=True)
class AggregationTree:
    """Workers in groups of neighbouring ranks, of sizes that differ by at most one.

    Args:
        groups: how many.
        what: what a sum of gradients is encoded with; a codec without memory.
    """

    groups: int
    what: Codec

    def divide(self, workers: Sequence[int]) -> list[Sequence[int]]:
        """The workers of every group; the first of each is its aggregator."""
        base, larger = divmod(len(workers), self.groups)
        starts = [number * base + min(number, larger) for number in range(self.groups + 1)]
        return [workers[start:stop] for start, stop in pairwise(starts)]

    def aggregators(self, workers: Sequence[int]) -> list[int]:
        """The first worker of every group."""
        return [group[0] for group in self.divide(workers)]


@dataclass(frozen=True)
class ServerSetup:
    """What all ranks of a run must know of its shards.

    Args:
        shard: how the weights are cut over the shards.
        when: when workers agree.
        rule: how a shard applies a gradient.
        codec: what a push is encoded with.
        tree: the groups of workers whose gradients are summed before a shard receives them; None: no groups.
        copies: how many servers hold each shard.
    """

    shard: Sharding
    when: Consistency
    rule: Rule
    codec: Codec
    tree: AggregationTree | None = None
    copies: int = 1

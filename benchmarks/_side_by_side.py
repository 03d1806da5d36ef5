"""Several implementations of the same work, measured side by side.

Every side is a group of processes that exists for the whole run. One side at a time runs a block of steps and reports
its seconds; the others are blocked on a read and cost nothing. In every round each side has one turn, and the first
side changes from round to round, so that disturbances of the machine affect all of them equally. After each side has
been first, the order is reversed, so that no side always follows the same one.

    round 0    ddp    shm    floor
    round 1    shm    floor  ddp
    round 2    floor  ddp    shm
    round 3    floor  shm    ddp
    round 4    ddp    floor  shm
    round 5    shm    ddp    floor

A result is the median over the rounds of the ratio within a round.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from statistics import median, quantiles
from typing import Any

from _ranks import Pair, Side, free_ports

ROUNDS = 30
WARM_UP = 2
"""Blocks per side before the first round: every side has started, touched its memory and connected to its peer."""

Seconds = dict[str, list[float]]
"""Seconds of one step, by side, one number per round."""


def say(words: str) -> None:
    """Print one line of progress to stderr; stdout is for the results."""
    print(words, file=sys.stderr, flush=True)


def measure(title: str, sides: Sequence[Side], *, steps: int, rounds: int = ROUNDS) -> Seconds:
    """Start all sides, run blocks of `steps` steps in turn, end them."""
    say(f"{title}: {rounds} rounds of {steps} steps of {', '.join(side.name for side in sides)}")
    with ExitStack() as stack:
        ports = free_ports(len(sides))
        pairs = [stack.enter_context(Pair(side, port)) for side, port in zip(sides, ports, strict=True)]
        for pair in pairs * WARM_UP:
            pair.run(steps)
        return take_turns({pair.side.name: pair.run for pair in pairs}, steps, rounds)


def take_turns(sides: Mapping[str, Callable[[int], float]], steps: int, rounds: int) -> Seconds:
    """The seconds per step of every side in every round."""
    seconds: Seconds = {name: [] for name in sides}
    for turn in range(rounds):
        for name in order(list(sides), turn):
            seconds[name].append(sides[name](steps) / steps)
        if (turn + 1) % max(1, rounds // 5) == 0:
            times = "  ".join(f"{name} {1000 * median(times):.3f} ms" for name, times in seconds.items())
            say(f"  {turn + 1:3d} of {rounds}  {times}")
    return seconds


def order(names: list[str], turn: int) -> list[str]:
    """The order of the sides in one round."""
    cycle, first = divmod(turn, len(names))
    turned = names[first:] + names[:first]
    return turned[::-1] if cycle % 2 else turned


def slowness(name: str, ours: list[float], peer: list[float], goal: str | None = None) -> dict[str, Any]:
    """A result: our time over the peer's."""
    return _result(name, [o / p for o, p in zip(ours, peer, strict=True)], ours, peer, goal)


def speed(name: str, ours: list[float], peer: list[float], goal: str | None = None) -> dict[str, Any]:
    """A result: our speed over the peer's."""
    return _result(name, [p / o for o, p in zip(ours, peer, strict=True)], ours, peer, goal)


def _result(name: str, ratios: list[float], ours: list[float], peer: list[float], goal: str | None) -> dict[str, Any]:
    low, middle, high = (round(cut, 3) for cut in quantiles(ratios, n=4, method="inclusive"))
    ours_ms, peer_ms = round(1000 * median(ours), 3), round(1000 * median(peer), 3)
    say(f"{name}: {middle} (quartiles {low} to {high}), ours {ours_ms} ms, peer {peer_ms} ms")
    result = {"name": name, "value": middle, "quartiles": [low, high], "ours_ms": ours_ms, "peer_ms": peer_ms}
    return result if goal is None else {**result, "goal": goal}

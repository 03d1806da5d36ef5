"""Numbers the way people read them, in tables."""

from __future__ import annotations

from typing import Any

from manyhands.report.measures import Target

NOTHING = "–"
PREFIXES = ("", "k", "M", "G", "T", "P")


def seconds(value: float | None) -> str:
    """1.23 s, 12.3 ms, 2 min 5 s."""
    if value is None:
        return NOTHING
    if value >= 120:
        return f"{int(value // 60)} min {value % 60:.0f} s"
    scale, unit = (1.0, "s") if value >= 0.1 else (1e3, "ms") if value >= 1e-4 else (1e6, "µs")
    return f"{value * scale:.3g} {unit}"


def scaled(value: float | None, unit: str = "") -> str:
    """12.3 MB, 4.56 k."""
    if value is None:
        return NOTHING
    power = 0
    while abs(value) >= 999.5 and power < len(PREFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {PREFIXES[power]}{unit}".rstrip()


def number(value: float | None, form: str = ".4f") -> str:
    """With a fixed number of digits."""
    return NOTHING if value is None else format(value, form)


def percent(value: float | None) -> str:
    """Of one."""
    return NOTHING if value is None else f"{value:.0%}"


def lag(mean: float | None, most: float | None) -> str:
    """The mean, and the most if it is another."""
    if mean is None:
        return NOTHING
    return f"{mean:.2g}" if not most else f"{mean:.2g} (≤ {most:.0f})"


def time_to_target(row: dict[str, Any]) -> str:
    """The median, and how far the seeds lie apart; how many reached it, if not all did."""
    if not row["reached"]:
        return "not reached"
    few = f", {row['reached']} of {row['seeds']}" if row["reached"] < row["seeds"] else ""
    if row["spread"] is None:
        return seconds(row["seconds_to_target"]) + few
    low, high = row["spread"]
    return f"{seconds(row['seconds_to_target'])} ({seconds(low)} to {seconds(high)}){few}"


def cells(row: dict[str, Any], target: Target | None) -> list[str]:
    """One row of the ranking, for the terminal."""
    if row["failed"] == row["seeds"]:
        middle = ["failed"] if target is None else [NOTHING, NOTHING, "failed"]
        middle += [NOTHING] if target is None else []
    elif target is None:
        middle = [seconds(row["seconds"]), scaled(row["samples_per_second"])]
    else:
        middle = [scaled(row["samples_to_target"]), scaled(row["samples_per_second"]), time_to_target(row)]
    tail = [number(row["accuracy"]), number(row["loss"]), scaled(row["bytes"], "B")]
    return [str(row["rank"]), str(row["method"]), *middle, *tail, lag(row["mean_lag"], row["max_lag"])]

"""The tables of one result and of a ranking, as text: the command line prints them, notebooks show them as HTML.

test accuracy  0.9722                         method   time to target   accuracy   ...
time           1.2 seconds (2.3 s ...)     1  ssp      0.42 s           0.9722
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from manyhands.report.measures import Target
from manyhands.report.theme import bytes_text, count_text, number_text, seconds_text, share_text

UNKNOWN = "-"
"""In a narrow table: a measure that is unknown, or not defined for the method."""


def result_rows(facts: Mapping[str, Any]) -> dict[str, str]:
    """The rows of one result, from its fields by name; those without a value are left out."""
    f = facts
    virtual = "virtual " if f["world"] == "virtual" else ""
    wall = f"{f['wall_seconds']:.1f} s {'of real time' if virtual else 'with start and end'}"
    steps = f"{f['steps']:,} steps" if f["stopped_at"] is None else f"stopped before step {f['steps']:,}"
    rows = {
        "test accuracy": None if f["test_accuracy"] is None else f"{f['test_accuracy']:.4f}",
        "final loss": None if f["final_loss"] is None else f"{f['final_loss']:.4f}",
        "time": f"{f['seconds']:.4g} {virtual}seconds ({wall})",
        "speed": f"{f['samples_per_second']:,.0f} samples per {virtual}second, {steps}",
        "sent": f"{f['bytes_sent'] / 1e6:,.1f} MB",
        **lag_rows(f),
        "waited": f"{f['waited_seconds']:.4g} s",
        "memory": memory_text(f["memory"]) if f.get("memory") else None,
        "record": None if f["record"] is None else str(f["record"]),
    }
    return {name: text for name, text in rows.items() if text is not None}


def result_title(facts: Mapping[str, Any]) -> str:
    """What ran, and where."""
    f = facts
    engine = "a virtual cluster" if f["world"] == "virtual" else f"link {f['link']}"
    return f"{f['method']} on {f['task']}: {f['workers']} workers, {f['servers']} servers, {engine}, seed {f['seed']}"


def ranking_columns(target: Target | None) -> tuple[str, ...]:
    """The heads of the ranking's columns."""
    first = ("time", "samples/s") if target is None else ("samples to target", "samples/s", "time to target")
    return ("", "method", *first, "accuracy", "loss", "bytes", "lag", "waiting", "memory")


def ranking_cells(row: Mapping[str, Any], target: Target | None) -> list[str]:
    """The columns of one method in the ranking."""
    if target is None:
        first = [seconds_text(row["seconds"]), count_text(row["samples_per_second"])]
    else:
        first = [count_text(row["samples_to_target"]), count_text(row["samples_per_second"]), time_to_target(row)]
    if row["failed"] == row["seeds"]:
        first[-1] = "failed"
    last = [number_text(row["accuracy"]), number_text(row["loss"]), bytes_text(row["bytes"])]
    last += [lag_text(row), share_text(row["waiting"]), bytes_text(row["memory"] or None)]
    return [str(row["rank"]), str(row["method"]), *first, *last]


def memory_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """What the rank with the most memory keeps, and what more while mini-batches are in flight."""
    line = max(lines, key=lambda one: one["bytes"])
    flying = [
        f"{bytes_text(line[field])} of {name}"
        for name, field in (("other versions of the weights", "version_bytes"), ("activations", "activations"))
        if line.get(field)
    ]
    return f"{bytes_text(line['bytes'])} of a rank" + (f", in flight {' and '.join(flying)}" if flying else "")


def lag_rows(facts: Mapping[str, Any]) -> dict[str, str | None]:
    """What is known of lags; what the method does not have is None."""
    f, lag = facts, "not defined" if facts.get("lag") == "not defined" else "unknown"
    if f["mean_lag"] is not None:
        lag = f"{f['mean_lag']:.2f} on average, {f['max_lag']} at most"
    dropped, apart, ahead = f.get("dropped"), f.get("mean_apart"), f.get("max_ahead")
    return {
        "lag": lag,
        "dropped": f"{dropped} gradients, with a lag of {f['dropped_mean_lag']:.2f} on average" if dropped else None,
        "shards": None if apart is None else f"{apart:.2f} versions apart on average, {f['max_apart']} at most",
        "ahead": None if ahead is None else f"at most {ahead} clocks of the slowest worker",
    }


def lag_text(row: Mapping[str, Any]) -> str:
    """The mean lag, and the largest one if there was any; - if it is unknown or not defined."""
    if row["mean_lag"] is None:
        return UNKNOWN
    return count_text(row["mean_lag"]) + (f" (≤ {row['max_lag']:.0f})" if row["max_lag"] else "")


def time_to_target(row: Mapping[str, Any]) -> str:
    """The median over the seeds, their spread, and how many reached the target if not all did."""
    if not row["reached"]:
        return "not reached"
    count = f", {row['reached']} of {row['seeds']}" if row["reached"] < row["seeds"] else ""
    spread = "" if row["spread"] is None else f" ({' to '.join(map(seconds_text, row['spread']))})"
    return seconds_text(row["seconds_to_target"]) + spread + count


def html_table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), caption: str = "") -> str:
    """A table for a notebook; all texts are escaped."""
    titles = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{above}{f'<thead><tr>{titles}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"

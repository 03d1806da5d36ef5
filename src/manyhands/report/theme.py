"""The look of reports: colours that colour-blind people can distinguish, dashes and markers, formatted numbers."""

from __future__ import annotations

import re
from typing import Any

SERIES = 8
"""The number of colours for methods; two more are for activities of ranks, the last one is that of hatching."""
SERIES_LIGHT = ("#0072b2", "#c94f00", "#00805c", "#a3458c", "#806600", "#3f3f46", "#6a5acd", "#b3273f")
LIGHT = (*SERIES_LIGHT, "#bd8200", "#7d848e", "#ffffff")
"""All but the last have a contrast of more than 3 to 1 on white."""
SERIES_DARK = ("#5ab4ea", "#ff9a57", "#3fcf9f", "#eda3d3", "#e2c548", "#d4d4d8", "#b3a8ff", "#ff8fa0")
DARK = (*SERIES_DARK, "#a98a45", "#868e99", "#14171a")
"""The same colours for a dark page."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")

PATTERNS = ("", "/", "x", ".", "-", "\\", "+", "|")

ACTIVITIES = {"compute": 0, "encode": 3, "send": 2, "wait": 8, "other": 9}
"""The activities of a rank, each with the index of its colour."""
HATCHED = {"compute": "", "encode": ".", "send": "x", "wait": "/", "other": "-"}

PREFIXES = ("", "k", "M", "G", "T", "P")


def colour(index: int) -> str:
    """The colour of the series at this index; pages replace it by its counterpart in `DARK` if need be."""
    return LIGHT[index % SERIES]


def line(index: int, **more: Any) -> dict[str, Any]:
    """The style of a line: where colours repeat, dashes differ."""
    return {"color": colour(index), "dash": DASHES[(index + index // SERIES) % len(DASHES)], **more}


def marker(index: int, **more: Any) -> dict[str, Any]:
    """The style of a marker: where colours repeat, symbols differ."""
    return {"color": colour(index), "symbol": SYMBOLS[(index + index // SERIES) % len(SYMBOLS)], **more}


def bar(index: int) -> dict[str, Any]:
    """The style of a bar: where colours repeat, the hatching differs."""
    return {
        "color": colour(index),
        "line": {"width": 0},
        "pattern": hatching(PATTERNS[(index + index // SERIES) % len(PATTERNS)]),
    }


def activity(name: str) -> dict[str, Any]:
    """The style of a bar for an activity of a rank."""
    return {"color": LIGHT[ACTIVITIES[name]], "line": {"width": 0}, "pattern": hatching(HATCHED[name])}


def hatching(shape: str) -> dict[str, Any]:
    """Hatching on a colour: light lines, or dark ones on a dark page."""
    return {"shape": shape, "fillmode": "overlay", "fgcolor": LIGHT[-1], "fgopacity": 0.55, "solidity": 0.2, "size": 8}


def wrapped(text: str, width: int = 24) -> str:
    """A name in several lines, broken after punctuation."""
    lines = [""]
    for word in re.split(r"(?<=[:,\s(])", text):
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += word
    return "<br>".join(line.strip() for line in lines)


def bytes_text(count: float | None) -> str:
    """Bytes as text, such as 3.2 MB."""
    return "" if count is None else f"{amount_text(count)}B"


def amount_text(count: float) -> str:
    """A number with the prefix of a unit, such as 3.2 M, to be followed by it."""
    for prefix in PREFIXES:
        if abs(count) < 999.5 or prefix == PREFIXES[-1]:
            break
        count /= 1000
    return f"{count:.3g} {prefix}"


def seconds_text(value: float | None) -> str:
    """A duration as text, such as 12.3 s or 1.2 ms."""
    if value is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= size:
            return f"{value / size:,.0f} {unit}" if abs(value / size) >= 1000 else f"{value / size:.3g} {unit}"
    return f"{value:.3g} s"


def count_text(value: float | None) -> str:
    """A count as text, such as 12,345, with decimals if it is small."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def number_text(value: float | None) -> str:
    """A number as text, such as 0.9722."""
    return "" if value is None else f"{value:.4f}" if abs(value) < 1000 else f"{value:.3g}"


def share_text(value: float | None) -> str:
    """A share as text, such as 12.5 %."""
    return "" if value is None else f"{100 * value:.3g} %"


def plural(count: int, noun: str) -> str:
    """A count with its noun, such as 1 run, 2 runs."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

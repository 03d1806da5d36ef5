"""How reports look: colours that colour-blind people tell apart, dashes and markers beside them, numbers for people."""

from __future__ import annotations

import re
from typing import Any

SERIES = 8
"""So many colours are for methods; two more are for what ranks do, the last one is that of hatching."""
SERIES_LIGHT = ("#0072b2", "#c94f00", "#00805c", "#a3458c", "#806600", "#3f3f46", "#6a5acd", "#b3273f")
LIGHT = (*SERIES_LIGHT, "#bd8200", "#7d848e", "#ffffff")
"""Each but the last has a contrast of more than 3 to 1 on white."""
SERIES_DARK = ("#5ab4ea", "#ff9a57", "#3fcf9f", "#eda3d3", "#e2c548", "#d4d4d8", "#b3a8ff", "#ff8fa0")
DARK = (*SERIES_DARK, "#a98a45", "#868e99", "#14171a")
"""The same ones for a dark page."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")

PATTERNS = ("", "/", "x", ".", "-", "\\", "+", "|")

ACTIVITIES = {"compute": 0, "encode": 3, "send": 2, "wait": 8, "other": 9}
"""What a rank does, and its colour."""
HATCHED = {"compute": "", "encode": ".", "send": "x", "wait": "/", "other": "-"}

PREFIXES = ("", "k", "M", "G", "T", "P")


def colour(place: int) -> str:
    """Of the series at this place; pages replace it by its twin in the dark."""
    return LIGHT[place % SERIES]


def line(place: int, **more: Any) -> dict[str, Any]:
    """A line like no other: where colours begin again, dashes do not."""
    return {"color": colour(place), "dash": DASHES[(place + place // SERIES) % len(DASHES)], **more}


def marker(place: int, **more: Any) -> dict[str, Any]:
    """A marker like no other."""
    return {"color": colour(place), "symbol": SYMBOLS[(place + place // SERIES) % len(SYMBOLS)], **more}


def bar(place: int) -> dict[str, Any]:
    """The face of a bar like no other: a colour and hatching."""
    return {
        "color": colour(place),
        "line": {"width": 0},
        "pattern": hatching(PATTERNS[(place + place // SERIES) % len(PATTERNS)]),
    }


def activity(name: str) -> dict[str, Any]:
    """The face of a bar for what a rank does."""
    return {"color": LIGHT[ACTIVITIES[name]], "line": {"width": 0}, "pattern": hatching(HATCHED[name])}


def hatching(shape: str) -> dict[str, Any]:
    """Lines on a colour: light ones, or dark ones on a dark page."""
    return {"shape": shape, "fillmode": "overlay", "fgcolor": LIGHT[-1], "fgopacity": 0.55, "solidity": 0.2, "size": 8}


def wrapped(text: str, width: int = 24) -> str:
    """A name in several lines, broken after its signs."""
    lines = [""]
    for word in re.split(r"(?<=[:,\s(])", text):
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += word
    return "<br>".join(line.strip() for line in lines)


def bytes_text(count: float | None) -> str:
    """Such as 3.2 MB."""
    if count is None:
        return ""
    for prefix in PREFIXES:
        if abs(count) < 999.5 or prefix == PREFIXES[-1]:
            break
        count /= 1000
    return f"{count:.3g} {prefix}B"


def seconds_text(value: float | None) -> str:
    """Such as 12.3 s, or 1.2 ms if it is short."""
    if value is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= size:
            return f"{value / size:,.0f} {unit}" if abs(value / size) >= 1000 else f"{value / size:.3g} {unit}"
    return f"{value:.3g} s"


def count_text(value: float | None) -> str:
    """Such as 12,345, with decimals if it is small."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def number_text(value: float | None) -> str:
    """Such as 0.9722."""
    return "" if value is None else f"{value:.4f}" if abs(value) < 1000 else f"{value:.3g}"


def share_text(value: float | None) -> str:
    """Such as 12.5 %."""
    return "" if value is None else f"{100 * value:.3g} %"


def plural(count: int, noun: str) -> str:
    """Such as 1 run, 2 runs."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

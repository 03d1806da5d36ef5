"""How reports look: colours that colour-blind people tell apart, dashes and markers beside them, numbers for people."""

from __future__ import annotations

from typing import Any

LIGHT = ("#0072b2", "#c94f00", "#00805c", "#a3458c", "#806600", "#3f3f46", "#6a5acd", "#b3273f")
"""Each has a contrast of more than 4 to 1 on white."""
DARK = ("#5ab4ea", "#ff9a57", "#3fcf9f", "#eda3d3", "#e2c548", "#d4d4d8", "#b3a8ff", "#ff8fa0")
"""The same ones for a dark page."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")

ACTIVITIES = {"compute": 0, "encode": 3, "send": 2, "wait": 4, "other": 5}
"""What a rank does, and its colour."""
PATTERNS = {"compute": "", "encode": ".", "send": "x", "wait": "/", "other": "-"}

PREFIXES = ("", "k", "M", "G", "T", "P")


def colour(place: int) -> str:
    """Of the series at this place; pages replace it by its twin in the dark."""
    return LIGHT[place % len(LIGHT)]


def line(place: int, **more: Any) -> dict[str, Any]:
    """A line like no other: where colours begin again, dashes do not."""
    return {"color": colour(place), "dash": DASHES[(place + place // len(LIGHT)) % len(DASHES)], **more}


def marker(place: int, **more: Any) -> dict[str, Any]:
    """A marker like no other."""
    return {"color": colour(place), "symbol": SYMBOLS[(place + place // len(LIGHT)) % len(SYMBOLS)], **more}


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


def share_text(value: float | None) -> str:
    """Such as 12.5 %."""
    return "" if value is None else f"{100 * value:.3g} %"


def plural(count: int, noun: str) -> str:
    """Such as 1 run, 2 runs."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

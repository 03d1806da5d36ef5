"""Rates and times the way people write them: "10Gbit", "1.25GB", "50us", or plain numbers."""

from __future__ import annotations

import math
import re

from manyhands.core.errors import Refused

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0}


def seconds(text: str | float, name: str = "a time") -> float:
    """Seconds meant by "50us", "2ms", "1.5 s" or a number of seconds."""
    value = _number(text, r"(s|ms|us|µs|ns|min)", name, "a time such as 50us or 2ms")
    return value[0] * _SECONDS[value[1] or "s"]


def bytes_per_second(text: str | float, name: str = "a rate") -> float:
    """Bytes per second meant by "10Gbit", "125MB" (both per second) or a number of bytes per second."""
    value, unit = _number(text, r"([kKMGT]?(?:bit|B))(?:/s)?", name, "a rate such as 10Gbit or 1.25GB")
    if not unit or unit.endswith("B"):
        return value * _PREFIX[unit[:-1]]
    return value * _PREFIX[unit[:-3]] / 8


def _number(text: str | float, unit: str, name: str, wanted: str) -> tuple[float, str]:
    if isinstance(text, int | float):
        value, suffix = float(text), ""
    else:
        match = re.fullmatch(rf"\s*([0-9.]+(?:e[-+]?\d+)?|inf)\s*(?:{unit})?\s*", text)
        try:
            value, suffix = (float(match[1]), match[2] or "") if match else (math.nan, "")
        except ValueError:
            value, suffix = math.nan, ""
    if not value >= 0:
        raise Refused(f"{name} is {text!r}, but must be {wanted}")
    return value, suffix

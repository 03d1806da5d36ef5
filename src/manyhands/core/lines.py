"""Lines of a record as bytes: one JSON object each, made where a step ends and only passed on from there.

{"step": 3, "loss": nan}   encoded   {"step":3,"loss":null}\\n   decoded   {"step": 3, "loss": None}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any

import orjson

Line = dict[str, Any]
"""One line of the record, by the names of its fields."""

SIMPLE = frozenset([int, str, bool, type(None)])
"""What JSON carries as it is."""


def encoded(line: Line) -> bytes:
    """One line of the file; a number that is not finite becomes null."""
    try:
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        return (json.dumps(plain(line)) + "\n").encode()


def decoded(parcel: bytes) -> Iterator[Line]:
    """The lines of a parcel."""
    for row in BytesIO(parcel):
        try:
            yield orjson.loads(row)
        except ValueError:  # half a character, such as in the name of a file that is not UTF-8
            yield json.loads(row)


def plain(value: Any) -> Any:
    """A value that JSON can carry; a number that is not finite becomes null, and what nobody foresaw a text."""
    if type(value) in SIMPLE:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain(one) for one in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)

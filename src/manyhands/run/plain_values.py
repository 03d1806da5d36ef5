"""Plain values: the state of a user's objects as JSON and tensors, so that it is saved without pickling anything.

    (0.9, 0.99)                 {"tuple": [0.9, 0.99]}
    {"best": inf}               {"best": {"float": "inf"}}
    {0: {"exp_avg": tensor}}    {"dict": [[0, {"exp_avg": {"tensor": "optimizer0/0/exp_avg"}}]]}

JSON has neither tuples nor infinity nor keys that are numbers: they are written as an object with one key that names
the kind, and read back as what they were. A value of any other kind is refused with the path to it.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from manyhands.core.errors import Refused
from manyhands.core.strategy import Saved

KINDS = frozenset({"tuple", "float", "dict", "counter", "tensor"})
"""The keys of objects that are read back as something else."""


def encode(value: Any, path: str, tensors: Saved | None = None) -> Any:
    """A value as JSON; its tensors are put into `tensors` under their paths, or refused if there is no such place."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor) and tensors is not None:
        tensors[path] = value.detach()
        return {"tensor": path}
    if type(value) in (list, tuple):
        found = [encode(one, f"{path}/{number}", tensors) for number, one in enumerate(value)]
        return found if type(value) is list else {"tuple": found}
    if type(value) in (dict, OrderedDict, Counter):
        return _encode_dict(value, path, tensors)
    hint = ": float(x) or x.tolist()" if isinstance(value, Tensor) else ""
    raise Refused(
        f"{path} is a {type(value).__name__}, but only numbers, strings, None, and lists and dicts of them can be "
        f"saved{hint}"
    )


def _encode_dict(value: Mapping[Any, Any], path: str, tensors: Saved | None) -> Any:
    if odd := [key for key in value if not isinstance(key, str | int)]:
        raise Refused(f"a key of {path} is a {type(odd[0]).__name__}, but must be a string or a whole number")
    found = {key: encode(one, f"{path}/{key}", tensors) for key, one in value.items()}
    if isinstance(value, Counter):
        return {"counter": [[key, one] for key, one in found.items()]}
    if all(isinstance(key, str) for key in found) and not (len(found) == 1 and KINDS & found.keys()):
        return found
    return {"dict": [[key, one] for key, one in found.items()]}


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value)) if len(value) == 1 else ""
    if kind not in KINDS:
        return {key: decode(one, tensors) for key, one in value.items()}
    inner = value[kind]
    if kind == "float":
        return float(inner)
    if kind == "tensor":
        return tensors[inner]
    if kind == "tuple":
        return tuple(decode(inner, tensors))
    pairs = {key: decode(one, tensors) for key, one in inner}
    return Counter(pairs) if kind == "counter" else pairs

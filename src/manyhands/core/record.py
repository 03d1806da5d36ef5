"""Lines of a record: the shape of each kind, and their encoding as one JSON object per line.

header  ->  step, evaluation, pause, numbers, unsaved (any number, in any order)  ->  memory (one per worker)  ->  end

{"kind": "step", "step": 3, "loss": nan}   encoded   {"kind":"step","step":3,"loss":null}\\n

A line is encoded by the rank that makes it; from there on its bytes are only copied. docs/records.md describes every
field.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any, Literal, NotRequired, TypedDict

import orjson

Line = dict[str, Any]
"""One line of any kind, by the names of its fields; `kind` says which of the shapes below it has."""

SIMPLE = frozenset([int, str, bool, type(None)])
"""Types that JSON has, too."""


class HeaderLine(TypedDict):
    """What ran, where and with which settings: the first line, and again where a run was resumed."""

    kind: Literal["header"]
    format: int
    task: str
    method: str
    strategy: str
    bounded: bool
    lag: NotRequired[Literal["always 0", "counted", "not defined"]]
    lag_counts: NotRequired[str]
    world: str
    link: str | None
    cluster: dict[str, Any] | None
    workers: int
    servers: int
    replicas: int
    seed: int
    start: int
    steps: int | None
    batch_size: int
    evaluate_every: int | None
    remarks: list[str]
    participants: list[dict[str, Any]]
    made: dict[str, Any]
    schedule: NotRequired[str]


class StepLine(TypedDict):
    """One step of one worker; a strategy may add fields of its own (`Strategy.notes`)."""

    kind: Literal["step"]
    step: int
    rank: int
    time: float
    loss: float | None
    samples: int
    bytes: int
    lag: int | None
    waited: float
    began: float
    compute_began: float
    compute: float
    encode: float
    wait: float
    send: float
    applied: NotRequired[int]
    lag_sum: NotRequired[int]
    dropped: NotRequired[int]
    dropped_lag_sum: NotRequired[int]
    apart: NotRequired[int]
    ahead: NotRequired[int]


class EvaluationLine(TypedDict):
    """The task's metric on the test data, measured during the run."""

    kind: Literal["evaluation"]
    evaluated: int
    time: float
    accuracy: float | None


PauseLine = TypedDict(
    "PauseLine",
    {"kind": Literal["pause"], "paused": int, "from": float, "to": float, "bytes": int},
)
"""The pause of one worker while weights were saved or evaluated; `from` is no name for a field of a class."""


class NumbersLine(TypedDict):
    """Numbers that a user's own loop has recorded (`hands.record`), by name."""

    kind: Literal["numbers"]
    step: int
    rank: int
    time: float
    values: dict[str, float | None]


class UnsavedLine(TypedDict):
    """A checkpoint during the run that could not be written; the run continued."""

    kind: Literal["unsaved"]
    unsaved: int
    time: float
    why: str


class MemoryLine(TypedDict):
    """Bytes of tensors that one worker keeps: between steps, and at most while mini-batches are in flight."""

    kind: Literal["memory"]
    held: int
    bytes: int
    weights: NotRequired[int]
    gradient: NotRequired[int]
    optimizer: NotRequired[int]
    versions: NotRequired[int | None]
    version_bytes: NotRequired[int | None]
    activations: NotRequired[int | None]


class EndLine(TypedDict):
    """The result; of a run that failed only `error`, `error_kind` and `lost`."""

    kind: Literal["end"]
    end: Literal[True]
    lost: Sequence[Sequence[Any]]
    seconds: NotRequired[float]
    wall_seconds: NotRequired[float]
    samples: NotRequired[int]
    final_loss: NotRequired[float | None]
    test_accuracy: NotRequired[float | None]
    bytes_sent: NotRequired[int]
    weights_sha256: NotRequired[str | None]
    error: NotRequired[str]
    error_kind: NotRequired[str]


SHAPES: Mapping[str, Any] = {
    "header": HeaderLine,
    "step": StepLine,
    "evaluation": EvaluationLine,
    "pause": PauseLine,
    "numbers": NumbersLine,
    "unsaved": UnsavedLine,
    "memory": MemoryLine,
    "end": EndLine,
}
"""Every kind of line with its shape."""


def encoded(line: Mapping[str, Any]) -> bytes:
    """One line of the file; a number that is not finite becomes null."""
    try:
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        return (json.dumps(plain(line)) + "\n").encode()


def decoded(encoded_lines: bytes) -> Iterator[Line]:
    """The lines that these bytes hold."""
    for row in BytesIO(encoded_lines):
        try:
            yield orjson.loads(row)
        except ValueError:  # half a character, such as in the name of a file that is not UTF-8
            yield json.loads(row)


def plain(value: Any) -> Any:
    """A value that JSON can carry: a number that is not finite becomes null, a value of an unknown type its text."""
    if type(value) in SIMPLE:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain(one) for one in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)

"""The wire format: what goes over a link, byte by byte. Nothing is ever unpickled.

    prefix   magic, kind, length of the header, length of the body          20 bytes
    header   msgpack, at most 16 MiB: tag name, key, serial number, credit, latest, meta, tensors, acknowledgements
    body     the tensors' bytes, each padded to 16

A header is checked before anything is allocated: the tag must be known, its tensors must be what the tag may carry, and
their sizes must add up to the body. A tensor may also lie in shared memory; then the header says where, and its bytes
are not in the body.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError
from manyhands.core.port import Meta, carried_by

MAGIC = b"mh01"
MESSAGE, RELEASE, LEAVE = 1, 2, 3
PREFIX = struct.Struct("<4sIIQ")
LONGEST_HEADER = 16 * 2**20
LARGEST_BODY = 2**35
MOST_ITEMS = 2**16
"""Items of any one list in a header: a list is allocated before its items are read, so the mere claim costs memory."""
MOST_DIMENSIONS = 64
"""The most that torch allows."""
ALIGNMENT = 16

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16),
    *(torch.int32, torch.int64, torch.bool, torch.uint16, torch.uint32, torch.uint64),
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class Garbled(ManyhandsError):
    """Bytes that are not a valid frame."""


class TensorHeader(NamedTuple):
    """One tensor of a message; `region` names the shared memory it lies in, "" if its bytes are in the body."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    region: str = ""
    size: int = 0
    """Bytes of the whole region."""
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Acks = tuple[tuple[str, int], ...]
"""Acknowledgements of released messages, by tag name and serial number."""


class Head(NamedTuple):
    """The header of a message."""

    name: str
    key: int
    serial: int
    credit: int
    latest: bool
    meta: Meta
    tensors: tuple[TensorHeader, ...]
    acks: Acks


def padded(nbytes: int) -> int:
    """Bytes of a body that a tensor of `nbytes` occupies."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pack(head: Head) -> bytes:
    """Prefix and header of a message; its body follows."""
    try:
        tensors = [(_CODES[x.dtype], x.shape, x.region, x.size, x.offset) for x in head.tensors]
    except KeyError as error:
        raise ManyhandsError(f"a {head.name} message may not carry a tensor of {error}") from None
    text: bytes = msgpack.packb((*head[:6], tensors, head.acks))
    body = sum([padded(x.nbytes) for x in head.tensors if not x.region])
    if len(text) > MOST_ITEMS or body > LARGEST_BODY:  # shorter ones cannot have a list that is too long
        _refuse_oversize(head.name, text, body)
    return PREFIX.pack(MAGIC, MESSAGE, len(text), body) + text


def _refuse_oversize(name: str, text: bytes, body: int) -> None:
    """Raise in the sender: the receiver would reject such a message as garbage."""
    if len(text) > LONGEST_HEADER:
        raise ManyhandsError(f"the header of a {name} message has {len(text)} bytes, but must have at most 16 MiB")
    if body > LARGEST_BODY:
        raise ManyhandsError(f"the tensors of a {name} message have {body} bytes, but must have at most {LARGEST_BODY}")
    try:
        _unpacked(text)
    except Garbled:
        raise ManyhandsError(
            f"a {name} message has a list of more than {MOST_ITEMS} items, the most that is allowed"
        ) from None


def pack_acks(acks: Acks) -> bytes:
    """A frame that carries only acknowledgements."""
    text: bytes = msgpack.packb(acks)
    return PREFIX.pack(MAGIC, RELEASE, len(text), 0) + text


def pack_leave() -> bytes:
    """The last frame of a clean exit."""
    return PREFIX.pack(MAGIC, LEAVE, 0, 0)


def unpack_prefix(data: bytes | bytearray | memoryview) -> tuple[int, int, int]:
    """Kind, length of the header, length of the body."""
    magic, kind, header, body = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise Garbled("it does not begin with the magic bytes of a frame")
    if kind not in (MESSAGE, RELEASE, LEAVE):
        raise Garbled(f"{kind} is not a kind of frame")
    if header > (LONGEST_HEADER if kind != LEAVE else 0):
        raise Garbled(f"its header claims {header} bytes, more than {LONGEST_HEADER if kind != LEAVE else 0}")
    if body > (LARGEST_BODY if kind == MESSAGE else 0):
        raise Garbled(f"its body claims {body} bytes, more than {LARGEST_BODY if kind == MESSAGE else 0}")
    return kind, header, body


def unpack(text: bytes | memoryview, body: int) -> Head:
    """The header of a message; `Garbled` unless every field is valid."""
    fields = _unpacked(text)
    if not (isinstance(fields, tuple) and len(fields) == len(Head._fields)):
        raise Garbled("its header does not have the fields of a message")
    name, key, serial, credit, latest, meta, tensors, acks = fields
    right = isinstance(name, str) and isinstance(meta, tuple) and isinstance(latest, bool)
    if not (right and type(key) is type(serial) is type(credit) is int and credit > 0):
        raise Garbled("the fields of its header have wrong types")
    head = Head(name, key, serial, credit, latest, meta, _tensor_headers(tensors), _checked_acks(acks))
    _check(head, body)
    return head


def unpack_acks(text: bytes | memoryview) -> Acks:
    """The acknowledgements of a frame that carries only these."""
    return _checked_acks(_unpacked(text))


def _checked_acks(acks: Any) -> Acks:
    """Pairs of name and serial number, or `Garbled`."""
    right = isinstance(acks, tuple) and all(
        isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) and type(one[1]) is int for one in acks
    )
    if not right:
        raise Garbled("its acknowledgements are not a list of names and numbers")
    found: Acks = acks
    return found


def _unpacked(text: bytes | memoryview) -> Any:
    try:
        return msgpack.unpackb(
            text, use_list=False, strict_map_key=False, max_array_len=MOST_ITEMS, max_map_len=MOST_ITEMS
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise Garbled(f"its header cannot be read: {type(error).__name__}") from None


def _tensor_headers(found: Any) -> tuple[TensorHeader, ...]:
    if not isinstance(found, tuple):
        raise Garbled("its list of tensors is not a list")
    return tuple([_tensor_header(one) for one in found])


def _tensor_header(found: Any) -> TensorHeader:
    """The messages do not quote what was found: it may be anything, of any size."""
    if not (isinstance(found, tuple) and len(found) == 5):
        raise Garbled("a tensor is not described by five fields")
    code, shape, region, size, offset = found
    if not (type(code) is int and 0 <= code < len(DTYPES)):
        raise Garbled("the dtype of a tensor does not exist")
    sizes = isinstance(shape, tuple) and len(shape) <= MOST_DIMENSIONS and all([type(n) is int for n in shape])
    if not sizes or min(shape, default=0) < 0 or math.prod([n or 1 for n in shape]) > LARGEST_BODY:
        raise Garbled("the shape of a tensor is not possible")
    header = TensorHeader(DTYPES[code], shape, region, size, offset)
    placed = isinstance(region, str) and type(size) is type(offset) is int
    if not placed or (region and not 0 <= offset <= offset + header.nbytes <= size):
        raise Garbled("a tensor lies outside its memory")
    if offset % header.dtype.itemsize:
        raise Garbled("the offset of a tensor is not a multiple of its item size")
    return header


def _check(head: Head, body: int) -> None:
    carries = carried_by(head.name)
    if carries is None:
        raise Garbled(f"the tag {head.name!r:.80} is not known")
    for header in head.tensors:
        if not _may_carry(carries, header):
            kind = f"{header.dtype} of shape {list(header.shape)}"
            raise Garbled(f"a {head.name:.80} message may carry {carries}, but this one has {kind}")
    if body != sum(padded(x.nbytes) for x in head.tensors if not x.region):
        raise Garbled(f"its body has {body} bytes, which is not the size of its tensors")


def _may_carry(carries: str, header: TensorHeader) -> bool:
    if carries == "tensors":
        return True
    vector = len(header.shape) == 1 and carries != "nothing"
    return vector and (carries == "vectors" or header.dtype.is_floating_point)


def as_bytes(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(x.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def tensors_of(body: Tensor, headers: Sequence[TensorHeader]) -> list[Tensor]:
    """The tensors that lie one after the other in the bytes of a body."""
    tensors, start = [], 0
    for header in headers:
        if not header.region:
            tensors.append(tensor_at(body, header, start))
            start += padded(header.nbytes)
    return tensors


def tensor_at(memory: Tensor, header: TensorHeader, offset: int) -> Tensor:
    """The tensor at a byte offset of some memory, as a view."""
    return memory[offset : offset + header.nbytes].view(header.dtype).view(header.shape)

"""The wire format: what goes over a link, byte by byte. Nothing here is ever unpickled.

    prefix   magic, kind, length of the header, length of the body          20 bytes
    header   msgpack, at most 16 MiB: tag, key, serial number, what comes with it
    body     the tensors' bytes, each padded to 16

A header is checked before anything is allocated: the tag must be one of ours, its tensors must be what the tag may
carry, and their sizes must add up to the body. A tensor may also lie in memory that both ranks can see; then its place
is in the header and its bytes are not in the body.
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
from manyhands.core.protocols import Meta, carried_by

MAGIC = b"mh01"
MESSAGE, RELEASE, LEAVE = 1, 2, 3
PREFIX = struct.Struct("<4sIIQ")
LONGEST_HEADER = 16 * 2**20
LARGEST_BODY = 2**35
MOST_ITEMS = 2**16
"""Items of any one list in a header. A list is made before its items are read, so a claim alone costs memory."""
MOST_DIMENSIONS = 64
"""As in torch."""
ALIGNMENT = 16

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16),
    *(torch.int32, torch.int64, torch.bool, torch.uint16, torch.uint32, torch.uint64),
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class Garbled(ManyhandsError):
    """Bytes that no rank of ours would send."""


class Piece(NamedTuple):
    """One tensor of a message; `region` names the shared memory it lies in, "" if its bytes follow."""

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
"""Messages that come back to their sender, by tag name and serial number."""


class Head(NamedTuple):
    """The header of a message."""

    name: str
    key: int
    serial: int
    credit: int
    latest: bool
    meta: Meta
    pieces: tuple[Piece, ...]
    acks: Acks


def padded(nbytes: int) -> int:
    """How much room a tensor takes in a body."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pack(head: Head) -> bytes:
    """Prefix and header of a message; its body follows."""
    try:
        pieces = [(_CODES[p.dtype], p.shape, p.region, p.size, p.offset) for p in head.pieces]
    except KeyError as error:
        raise ManyhandsError(f"a {head.name} message may not carry a tensor of {error}") from None
    text: bytes = msgpack.packb((*head[:6], pieces, head.acks))
    body = sum([padded(p.nbytes) for p in head.pieces if not p.region])
    if len(text) > MOST_ITEMS or body > LARGEST_BODY:  # shorter ones cannot have a list that is too long
        _refuse_oversize(head.name, text, body)
    return PREFIX.pack(MAGIC, MESSAGE, len(text), body) + text


def _refuse_oversize(name: str, text: bytes, body: int) -> None:
    """The receiver would take it for garbage, so the sender must hear of it."""
    if len(text) > LONGEST_HEADER:
        raise ManyhandsError(f"the small part of a {name} message has {len(text)} bytes, more than 16 MiB")
    if body > LARGEST_BODY:
        raise ManyhandsError(f"the tensors of a {name} message have {body} bytes, more than {LARGEST_BODY}")
    try:
        _unpacked(text)
    except Garbled:
        raise ManyhandsError(f"a {name} message has a list of more than {MOST_ITEMS} items") from None


def pack_acks(acks: Acks) -> bytes:
    """A frame that only gives messages back."""
    text: bytes = msgpack.packb(acks)
    return PREFIX.pack(MAGIC, RELEASE, len(text), 0) + text


def pack_leave() -> bytes:
    """The last frame of a rank that leaves."""
    return PREFIX.pack(MAGIC, LEAVE, 0, 0)


def unpack_prefix(data: bytes | bytearray | memoryview) -> tuple[int, int, int]:
    """Kind, length of the header, length of the body."""
    magic, kind, header, body = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise Garbled("it does not begin like a frame of ours")
    if kind not in (MESSAGE, RELEASE, LEAVE):
        raise Garbled(f"there is no frame of kind {kind}")
    if header > (LONGEST_HEADER if kind != LEAVE else 0):
        raise Garbled(f"its header claims {header} bytes, more than {LONGEST_HEADER if kind != LEAVE else 0}")
    if body > (LARGEST_BODY if kind == MESSAGE else 0):
        raise Garbled(f"its body claims {body} bytes, more than {LARGEST_BODY if kind == MESSAGE else 0}")
    return kind, header, body


def unpack(text: bytes | memoryview, body: int) -> Head:
    """The header of a message, refused unless it is one that we would send."""
    fields = _unpacked(text)
    if not (isinstance(fields, tuple) and len(fields) == len(Head._fields)):
        raise Garbled("its header has other fields than ours")
    name, key, serial, credit, latest, meta, pieces, acks = fields
    right = isinstance(name, str) and isinstance(meta, tuple) and isinstance(latest, bool)
    if not (right and type(key) is type(serial) is type(credit) is int and credit > 0):
        raise Garbled("the fields of its header are not what they should be")
    head = Head(name, key, serial, credit, latest, meta, _pieces(pieces), checked_acks(acks))
    _check(head, body)
    return head


def unpack_acks(text: bytes | memoryview) -> Acks:
    """What a frame gives back."""
    return checked_acks(_unpacked(text))


def checked_acks(acks: Any) -> Acks:
    """Pairs of name and number, or refused."""
    right = isinstance(acks, tuple) and all(
        isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) and type(one[1]) is int for one in acks
    )
    if not right:
        raise Garbled("what it gives back is not a list of messages")
    found: Acks = acks
    return found


def _unpacked(text: bytes | memoryview) -> Any:
    try:
        return msgpack.unpackb(
            text, use_list=False, strict_map_key=False, max_array_len=MOST_ITEMS, max_map_len=MOST_ITEMS
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise Garbled(f"its header cannot be read: {type(error).__name__}") from None


def _pieces(found: Any) -> tuple[Piece, ...]:
    if not isinstance(found, tuple):
        raise Garbled("its list of tensors is none")
    return tuple([_piece(*one) if isinstance(one, tuple) and len(one) == 5 else _no_piece() for one in found])


def _piece(code: Any, shape: Any, region: Any, size: Any, offset: Any) -> Piece:
    """What is refused is not repeated: it may be anything, of any size."""
    if not (type(code) is int and 0 <= code < len(DTYPES)):
        raise Garbled("there is no such dtype")
    sizes = isinstance(shape, tuple) and len(shape) <= MOST_DIMENSIONS and all([type(n) is int for n in shape])
    if not sizes or min(shape, default=0) < 0 or math.prod([n or 1 for n in shape]) > LARGEST_BODY:
        raise Garbled("there is no such shape")
    piece = Piece(DTYPES[code], shape, region, size, offset)
    places = isinstance(region, str) and type(size) is type(offset) is int
    if not places or (region and not 0 <= offset <= offset + piece.nbytes <= size):
        raise Garbled("a tensor lies outside its memory")
    if offset % piece.dtype.itemsize:
        raise Garbled("a tensor lies across the grain of its memory")
    return piece


def _no_piece() -> Piece:
    raise Garbled("a tensor is described by other fields than ours")


def _check(head: Head, body: int) -> None:
    carries = carried_by(head.name)
    if carries is None:
        raise Garbled(f"there is no tag {head.name!r:.80}")
    for piece in head.pieces:
        if not _may_carry(carries, piece):
            kind = f"{piece.dtype} of shape {list(piece.shape)}"
            raise Garbled(f"a {head.name:.80} message may carry {carries}, but this one brings {kind}")
    if body != sum(padded(p.nbytes) for p in head.pieces if not p.region):
        raise Garbled(f"the body has {body} bytes, which is not what its tensors need")


def _may_carry(carries: str, piece: Piece) -> bool:
    if carries == "tensors":
        return True
    vector = len(piece.shape) == 1 and carries != "nothing"
    return vector and (carries == "vectors" or piece.dtype.is_floating_point)


def as_bytes(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(x.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def cut(body: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """The tensors that lie one after the other in the bytes of a body."""
    tensors, start = [], 0
    for piece in pieces:
        if not piece.region:
            tensors.append(placed(body, piece, start))
            start += padded(piece.nbytes)
    return tensors


def placed(memory: Tensor, piece: Piece, offset: int) -> Tensor:
    """A tensor in a stretch of bytes."""
    return memory[offset : offset + piece.nbytes].view(piece.dtype).view(piece.shape)

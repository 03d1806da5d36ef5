"""The wire format: what goes out comes in, and whatever else comes in is refused before anything is allocated."""

import math
import random
import struct

import msgpack
import pytest
import torch

from manyhands.core.errors import ManyhandsError
from manyhands.core.port import Tag
from manyhands.runtime.transport import wire
from manyhands.runtime.transport.wire import Garbled, Head, TensorHeader

NOTHING, FLOATS = Tag("bare", carries="nothing"), Tag("floats", carries="floats")
VECTORS, TENSORS = Tag("any-vectors", carries="vectors"), Tag("tensors", carries="tensors")
SHAPES = [(), (0,), (1,), (5,), (2, 3), (0, 4), (2, 1, 3), (1,) * 64]
F32, I64 = wire.DTYPES.index(torch.float32), wire.DTYPES.index(torch.int64)


def head(*tensors, tag=TENSORS, key=0, serial=1, meta=(), acks=()):
    return Head(tag.name, key, serial, tag.credit, False, meta, tensors, acks)


def split(frame):
    """Kind, header and length of the body of a frame."""
    kind, header, body = wire.unpack_prefix(frame)
    assert len(frame) == wire.PREFIX.size + header
    return kind, frame[wire.PREFIX.size :], body


def unpack(frame):
    kind, text, body = split(frame)
    assert kind == wire.MESSAGE
    return wire.unpack(text, body)


def fields(**changes):
    """A good header of one float32 vector in the body, as a list, with some fields changed."""
    good = {"name": "tensors", "key": 0, "serial": 1, "credit": 2, "latest": False, "meta": ()}
    good |= {"tensors": ((F32, (4,), "", 0, 0),), "acks": ()}
    return list({**good, **changes}.values())


def read(listed, body=16):
    return wire.unpack(msgpack.packb(listed), body)


def refused(listed, body=16):
    """The reason for which a header is refused."""
    with pytest.raises(Garbled) as caught:
        read(listed, body)
    return str(caught.value)


# What goes out comes in


@pytest.mark.parametrize("dtype", wire.DTYPES, ids=str)
def test_every_dtype_and_shape_comes_in_as_it_went_out(dtype):
    tensors = [torch.arange(math.prod(shape)).remainder(2).to(dtype).view(shape) for shape in SHAPES]
    sent = head(*[TensorHeader(x.dtype, tuple(x.shape)) for x in tensors])
    got = unpack(wire.pack(sent))
    assert got == sent
    body = b"".join(bytes(wire.as_bytes(x)) + bytes(wire.padded(x.nbytes) - x.nbytes) for x in tensors)
    assert split(wire.pack(sent))[2] == len(body)
    memory = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    for x, y in zip(tensors, wire.tensors_of(memory, got.tensors), strict=True):
        assert (x.dtype, x.shape, x.tolist()) == (y.dtype, y.shape, y.tolist())


def test_a_tensor_in_shared_memory_is_only_a_place():
    sent = head(TensorHeader(torch.float64, (2, 2), "own/0/1", 4096, 64), TensorHeader(torch.int8, (3,)))
    frame = wire.pack(sent)
    assert unpack(frame) == sent
    assert split(frame)[2] == 16
    memory = torch.arange(512, dtype=torch.float64).view(torch.uint8)
    assert wire.tensor_at(memory, sent.tensors[0], 64).tolist() == [[8.0, 9.0], [10.0, 11.0]]


def test_a_tensor_may_fill_its_memory_to_the_last_byte_and_be_empty_at_its_end():
    sent = head(TensorHeader(torch.float32, (16,), "r", 64, 0), TensorHeader(torch.float32, (0,), "r", 64, 64))
    assert unpack(wire.pack(sent)) == sent


def test_key_meta_and_acks_come_in_as_they_went_out():
    meta = (1, -(2**40), 0.1, "ü", "", True, None, (1, (2, "x")), b"\0")
    sent = head(key=-7, serial=2**40, meta=meta, acks=(("a", 1), ("b:c", 2)))
    assert unpack(wire.pack(sent)) == sent
    assert unpack(wire.pack(sent._replace(latest=True))).latest is True


def test_frames_without_a_message():
    kind, text, body = split(wire.pack_acks((("a", 1), ("b", 2))))
    assert (kind, body, wire.unpack_acks(text)) == (wire.RELEASE, 0, (("a", 1), ("b", 2)))
    assert split(wire.pack_leave()) == (wire.LEAVE, b"", 0)


def test_what_follows_a_colon_in_a_name_is_made_up():
    sent = head(TensorHeader(torch.float32, (2,)), tag=FLOATS)._replace(name="floats:later:on")
    assert unpack(wire.pack(sent)).name == "floats:later:on"
    assert "floats:whatever message may carry floats" in refused(
        fields(name="floats:whatever", tensors=((I64, (2,), "", 0, 0),))
    )


# What the receiver would reject is an error in the sender


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (head(TensorHeader(torch.complex64, (1,))), "torch.complex64"),
        (head(meta=("x" * 2**24,)), "must have at most 16 MiB"),
        (head(meta=(tuple(range(2**16 + 1)),)), "more than 65536 items"),
        (head(*[TensorHeader(torch.int8, (0,))] * (2**16 + 1)), "more than 65536 items"),
        (head(TensorHeader(torch.int8, (2**35 + 1,))), "must have at most 34359738368"),
    ],
    ids=["dtype", "meta", "list", "tensors", "body"],
)
def test_what_cannot_travel_is_refused_where_it_is_sent(sent, says):
    with pytest.raises(ManyhandsError, match=says) as caught:
        wire.pack(sent)
    assert not isinstance(caught.value, Garbled)


def test_the_most_that_may_travel_does():
    sent = head(*[TensorHeader(torch.int8, (0,))] * 2**16, meta=(tuple(range(2**16)), "x" * 2**20))
    assert unpack(wire.pack(sent)) == sent
    assert unpack(wire.pack(head(TensorHeader(torch.int8, (2**35,))))).tensors[0].nbytes == 2**35


# Prefixes


@pytest.mark.parametrize(
    ("prefix", "says"),
    [
        ((b"mh02", wire.MESSAGE, 10, 0), "does not begin"),
        ((b"GET ", wire.MESSAGE, 10, 0), "does not begin"),
        ((wire.MAGIC, 0, 10, 0), "0 is not a kind"),
        ((wire.MAGIC, 4, 10, 0), "4 is not a kind"),
        ((wire.MAGIC, 2**32 - 1, 10, 0), "4294967295 is not a kind"),
        ((wire.MAGIC, wire.MESSAGE, 2**24 + 1, 0), "header claims 16777217"),
        ((wire.MAGIC, wire.RELEASE, 2**32 - 1, 0), "header claims 4294967295"),
        ((wire.MAGIC, wire.LEAVE, 1, 0), "header claims 1 bytes, more than 0"),
        ((wire.MAGIC, wire.MESSAGE, 10, 2**35 + 1), "body claims 34359738369"),
        ((wire.MAGIC, wire.MESSAGE, 10, 2**60), "body claims 1152921504606846976"),
        ((wire.MAGIC, wire.RELEASE, 10, 1), "body claims 1 bytes, more than 0"),
        ((wire.MAGIC, wire.LEAVE, 0, 1), "body claims 1 bytes, more than 0"),
    ],
)
def test_a_prefix_that_is_not_ours_is_refused(prefix, says):
    with pytest.raises(Garbled, match=says):
        wire.unpack_prefix(wire.PREFIX.pack(*prefix))


def test_the_longest_prefix_is_taken():
    assert wire.unpack_prefix(wire.PREFIX.pack(wire.MAGIC, 1, 2**24, 2**35)) == (1, 2**24, 2**35)


# Headers


def test_the_header_that_the_others_are_changes_of_is_good():
    assert read(fields()).tensors == (TensorHeader(torch.float32, (4,)),)


@pytest.mark.parametrize("listed", [{}, 7, None, "x", [], fields()[:-1], [*fields(), 0]], ids=lambda x: str(x)[:20])
def test_a_header_of_other_fields_is_refused(listed):
    assert "the fields of a message" in refused(listed)


@pytest.mark.parametrize(
    "change",
    [
        {"name": b"tensors"},
        {"name": 1},
        {"name": None},
        {"key": "0"},
        {"key": 0.0},
        {"key": False},
        {"serial": True},
        {"serial": None},
        {"credit": True},
        {"credit": 0},
        {"credit": -1},
        {"credit": 2.0},
        {"latest": 0},
        {"latest": None},
        {"meta": {}},
        {"meta": "x"},
        {"meta": None},
    ],
    ids=str,
)
def test_a_field_of_another_type_is_refused(change):
    assert "have wrong types" in refused(fields(**change))


@pytest.mark.parametrize(
    "acks", [None, 1, "ab", {}, [1], [["a"]], [["a", 1, 2]], [[1, 1]], [["a", "1"]], [["a", True]]]
)
def test_what_gives_nothing_back_is_refused(acks):
    assert "its acknowledgements are not" in refused(fields(acks=acks))
    with pytest.raises(Garbled, match="its acknowledgements are not"):
        wire.unpack_acks(msgpack.packb(acks))


@pytest.mark.parametrize("name", ["", "unknown", "unknown:tensors", ":tensors", "tensors ", "x" * 10**6])
def test_an_unknown_tag_is_refused_and_not_repeated_at_length(name):
    reason = refused(fields(name=name))
    assert reason.startswith("the tag ") and "is not known" in reason and len(reason) < 120


NO_DTYPES = [-1, len(wire.DTYPES), 2**63, True, None, "0", 0.0, ()]
NO_SHAPES = [None, 4, "4", {}, (-1,), (4, -1), (-2, -2), (True,), (4.0,), ("4",), (None,), (1,) * 65]
TOO_LARGE = [(2**36,), (2**18, 2**18), (2**63, 2**63), (0, 2**36), (0, 2**63), (0, 2**20, 2**20)]


@pytest.mark.parametrize("code", NO_DTYPES, ids=str)
def test_a_dtype_that_does_not_exist_is_refused(code):
    assert refused(fields(tensors=((code, (4,), "", 0, 0),))) == "the dtype of a tensor does not exist"


@pytest.mark.parametrize("shape", [*NO_SHAPES, *TOO_LARGE], ids=lambda x: str(x)[:20])
def test_a_shape_that_does_not_exist_is_refused(shape):
    assert refused(fields(tensors=((F32, shape, "", 0, 0),))) == "the shape of a tensor is not possible"


@pytest.mark.parametrize(
    ("region", "size", "offset"),
    [
        ("r", 64, 52),
        ("r", 15, 0),
        ("r", 64, -4),
        ("r", -1, 0),
        ("r", 64, 2**63),
        ("r", True, 0),
        ("r", 64, False),
        ("r", "64", 0),
        ("r", 64, 0.0),
        ("", None, 0),
        ("", 0, None),
        (b"r", 64, 0),
        (None, 64, 0),
        (1, 64, 0),
    ],
)
def test_a_tensor_outside_its_memory_is_refused(region, size, offset):
    assert refused(fields(tensors=((F32, (4,), region, size, offset),)), 0) == "a tensor lies outside its memory"


def test_a_tensor_that_no_view_could_reach_is_refused():
    assert "not a multiple of its item size" in refused(fields(tensors=((F32, (4,), "r", 64, 2),)), 0)
    assert read(fields(tensors=((F32, (4,), "r", 64, 4),)), 0).tensors[0].offset == 4


@pytest.mark.parametrize("tensors", [None, 3, {}, "x", [1], [[]], [[F32, [4], "", 0]], [[F32, [4], "", 0, 0, 0]]])
def test_tensors_described_by_something_else_are_refused(tensors):
    assert "tensor" in refused(fields(tensors=tensors))


@pytest.mark.parametrize("body", [0, 15, 17, 32, 2**35])
def test_a_body_that_does_not_fit_its_tensors_is_refused(body):
    assert "not the size of its tensors" in refused(fields(), body)


@pytest.mark.parametrize("body", [16, 48])
def test_only_tensors_in_the_body_count(body):
    tensors = ((F32, (5,), "", 0, 0), (F32, (4,), "r", 64, 0))
    assert len(read(fields(tensors=tensors), 32).tensors) == 2
    assert "not the size of its tensors" in refused(fields(tensors=tensors), body)


CARRIED = {"floats": (torch.float64, (3,)), "whole numbers": (torch.int64, (3,)), "a matrix": (torch.float32, (1, 3))}
CARRIED |= {"a number": (torch.float32, ()), "a matrix of whole numbers": (torch.uint8, (3, 1))}
MAY = {
    NOTHING: [],
    FLOATS: ["floats"],
    VECTORS: ["floats", "whole numbers"],
    TENSORS: list(CARRIED),
}


@pytest.mark.parametrize("what", CARRIED)
@pytest.mark.parametrize("tag", MAY, ids=lambda tag: tag.carries)
@pytest.mark.parametrize("region", ["", "r"], ids=["body", "shared"])
def test_a_message_carries_what_its_tag_may_and_nothing_else(tag, what, region):
    sent = head(TensorHeader(*CARRIED[what], region, 64 if region else 0), tag=tag)
    if what in MAY[tag]:
        assert unpack(wire.pack(sent)) == sent
    else:
        with pytest.raises(Garbled, match=f"may carry {tag.carries}, but this one has torch"):
            unpack(wire.pack(sent))


@pytest.mark.parametrize("tag", MAY, ids=lambda tag: tag.carries)
def test_every_message_may_come_without_tensors(tag):
    assert unpack(wire.pack(head(tag=tag, meta=(1,)))).meta == (1,)


def test_the_second_tensor_is_looked_at_too():
    sent = head(TensorHeader(torch.float32, (3,)), TensorHeader(torch.int64, (3,)), tag=FLOATS)
    with pytest.raises(Garbled, match="may carry floats"):
        unpack(wire.pack(sent))


# Text that is no header


def nested(depth):
    return b"\x91" * depth + b"\xc0"


ARRAY = struct.Struct(">BI")
TEXTS = {
    "nothing": b"",
    "not ours": b"\xc1",
    "text that is none": b"\x98\xa2\xff\xfe" + b"\0" * 7,
    "a map with a map as a key": b"\x81\x80\x00",
    "a map with a list of maps as a key": b"\x81\x91\x80\x00",
    "two things": b"\x90\x90",
    "deeper than can be read": nested(100_000),
    "a list that claims more than there may be": ARRAY.pack(0xDD, 2**16 + 1) + b"\0" * (2**16 + 1),
    "lists of lists that claim all memory": ARRAY.pack(0xDD, 2**23) * 1000 + b"\0" * 2**23,
    "a map that claims more than there may be": ARRAY.pack(0xDF, 2**16 + 1) + b"\0" * 2**18,
    "a time that is none": b"\xc7\x03\xff\0\0\0",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_text_that_is_no_header_is_refused(text):
    with pytest.raises(Garbled, match="cannot be read"):
        wire.unpack(text, 0)
    with pytest.raises(Garbled, match="cannot be read"):
        wire.unpack_acks(text)


@pytest.mark.parametrize("field", range(8))
@pytest.mark.parametrize("depth", [10, 500, 1000])
def test_a_deep_nest_in_any_field_is_refused_without_being_repeated(field, depth):
    if field == 5:
        return  # that is the receiver's affair: it takes apart what it knows
    packed = [msgpack.packb(one) for one in fields()]
    packed[field] = nested(depth)
    with pytest.raises(Garbled) as caught:
        wire.unpack(b"\x98" + b"".join(packed), 16)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("place", range(5))
def test_a_deep_nest_in_any_part_of_a_tensor_is_refused(place):
    piece = [msgpack.packb(one) for one in (F32, (4,), "r", 64, 0)]
    piece[place] = nested(1000)
    packed = [msgpack.packb(one) for one in fields()]
    packed[6] = b"\x91\x95" + b"".join(piece)
    with pytest.raises(Garbled):
        wire.unpack(b"\x98" + b"".join(packed), 0)


def frames():
    """One of every kind."""
    return [
        wire.pack(head(meta=(1, 0.5, "text", None, (1, 2)), acks=(("tensors", 3),))),
        wire.pack(head(TensorHeader(torch.float32, (3, 4)), TensorHeader(torch.bool, (7,)), key=3)),
        wire.pack(head(TensorHeader(torch.int64, (8,), "own/1/1", 4096, 64), tag=VECTORS)),
        wire.pack(head(TensorHeader(torch.bfloat16, (300,)), tag=FLOATS, serial=70_000)),
        wire.pack_acks((("tensors", 1), ("any-vectors:x", 2**33))),
        wire.pack_leave(),
    ]


def take(frame):
    """What a link does with a frame; says whether it was taken."""
    try:
        kind, header, body = wire.unpack_prefix(frame)
        text = frame[wire.PREFIX.size : wire.PREFIX.size + header]
        if kind == wire.RELEASE:
            wire.unpack_acks(text)
        elif kind == wire.MESSAGE:
            got = wire.unpack(text, body)
            assert body <= wire.LARGEST_BODY
            assert sum(wire.padded(p.nbytes) for p in got.tensors if not p.region) == body
        return True
    except Garbled:
        return False


def test_every_frame_cut_anywhere_is_refused():
    for frame in frames():
        assert take(frame)
        for end in range(wire.PREFIX.size, len(frame)):
            assert not take(frame[:end])


@pytest.mark.parametrize("seed", range(4))
def test_whatever_bytes_are_changed_a_frame_is_taken_or_refused_and_nothing_else(seed):
    dice, taken, refusals = random.Random(seed), 0, 0
    for _ in range(5000):
        frame = bytearray(dice.choice(frames()))
        for _ in range(dice.choice([1, 1, 1, 2, 4, 16])):
            place = dice.randrange(len(frame))
            frame[place] = dice.choice([frame[place] ^ 1 << dice.randrange(8), dice.randrange(256)])
        good = take(frame)
        taken, refusals = taken + good, refusals + (not good)
    assert taken > 100 and refusals > 1000


def test_noise_is_refused():
    dice = random.Random(5)
    for _ in range(5000):
        text = dice.randbytes(dice.randrange(60))
        for refuse in (lambda text=text: wire.unpack(text, 0), lambda text=text: wire.unpack_acks(b"\x91" + text)):
            with pytest.raises(Garbled):
                refuse()

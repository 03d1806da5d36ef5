"""Links over real sockets: order, cuts at every byte, peers that stop reading, garbage, and how waiting ends."""

import random
import socket
import threading

import pytest
import torch

from manyhands.core.port import Tag
from manyhands.runtime.membership.event_loop import EventLoop
from manyhands.runtime.transport import links, wire
from manyhands.runtime.transport.links import DIRECT, STAGING, Link
from manyhands.runtime.transport.wire import Head, TensorHeader

TAG = Tag("linked")
PATIENCE = 20
"""Seconds after which something will never happen."""


class Sink:
    """Writes down what comes in."""

    def __init__(self):
        self.log = []
        self.landed = []
        self._news = threading.Condition()

    def receive_buffer(self, peer, head, nbytes):
        self.landed.append(nbytes)
        return torch.full((nbytes + 5,), 255, dtype=torch.uint8)

    def received(self, peer, head, body):
        tensors = [] if body is None else [x.clone() for x in wire.tensors_of(body, head.tensors)]
        self._note("message", peer, head.meta, tensors)

    def acknowledged(self, peer, acks):
        self._note("back", peer, acks)

    def left(self, peer):
        self._note("left", peer)

    def link_closed(self, peer, why):
        self._note("ended", peer, why)

    def _note(self, *what):
        with self._news:
            self.log.append(what)
            self._news.notify_all()

    def wait_for(self, number):
        """The first so many entries."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.log) >= number, PATIENCE), self.log
        return self.log


class Loops:
    """A reader and a writer, and the sockets of a test."""

    def __init__(self):
        self.reader, self.writer = EventLoop(), EventLoop()
        self._threads = [self.reader.start("reader"), self.writer.start("writer")]
        self.sockets = []

    def link(self, peer, sock, sink):
        link = Link(peer, sock, sink, self.writer)

        def read():
            if not link.read():
                self.reader.remove(link)

        self.reader.post(lambda: self.reader.on_readable(link, read))
        return link

    def pair(self, kind):
        pair = KINDS[kind]()
        self.sockets += pair
        return pair

    def close(self):
        for loop, thread in zip((self.reader, self.writer), self._threads, strict=True):
            loop.stop()
            thread.join(PATIENCE)
            assert not thread.is_alive()
            loop.close()
        for sock in self.sockets:
            sock.close()


def unix():
    return socket.socketpair()


def tcp():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


KINDS = {"unix": unix, "tcp": tcp}


@pytest.fixture
def loops():
    made = Loops()
    yield made
    made.close()


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def message(number, *tensors, acks=()):
    """A frame as a transport makes it: header, then each tensor and its padding."""
    pieces = tuple(TensorHeader(x.dtype, tuple(x.shape)) for x in tensors)
    frame = [wire.pack(Head(TAG.name, 0, number, TAG.credit, False, (number,), pieces, acks))]
    for x in tensors:
        frame += [wire.as_bytes(x), bytes(wire.padded(x.nbytes) - x.nbytes)]
    return frame


def flat(*frames):
    return b"".join(bytes(piece) for frame in frames for piece in frame)


def filled(numel, value):
    return torch.full((numel,), value % 251, dtype=torch.uint8)


def seen(log):
    """Number, sizes and values of the messages in a log."""
    messages = [entry[2:] for entry in log if entry[0] == "message"]
    return [(meta[0], [(x.numel(), x.unique().tolist()) for x in tensors]) for meta, tensors in messages]


def expected(numbers, sizes):
    return [(n, [(sizes[n], [n % 251])] if sizes[n] else []) for n in numbers]


# Order


SIZES = [0, 1, 15, 16, 17, 1000, STAGING - 100, STAGING, DIRECT + 1, 300_000, 0, 2_000_000, 3, 70_000]


def test_frames_arrive_in_order_whatever_their_size(loops, kind):
    ours, theirs = loops.pair(kind)
    sink = Sink()
    link = loops.link(1, ours, Sink())
    loops.link(0, theirs, sink)
    sizes = [SIZES[number % len(SIZES)] for number in range(70)]
    for number, size in enumerate(sizes):
        link.send(message(number, *[filled(size, number)] * bool(size)))
    assert seen(sink.wait_for(70)) == expected(range(70), sizes)


def test_frames_of_several_threads_are_whole_and_each_in_its_order(loops, kind):
    ours, theirs = loops.pair(kind)
    sink = Sink()
    link = loops.link(1, ours, Sink())
    loops.link(0, theirs, sink)
    sizes = {number: SIZES[number * 5 % len(SIZES)] for number in range(200)}

    def send(first):
        for number in range(first, 200, 4):
            link.send(message(number, *[filled(sizes[number], number)] * bool(sizes[number])))

    threads = [threading.Thread(target=send, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    got = seen(sink.wait_for(200))
    for first in range(4):
        own = [entry for entry in got if entry[0] % 4 == first]
        assert own == expected(range(first, 200, 4), sizes)


def test_both_directions_at_once(loops, kind):
    """Neither side reads with the thread that writes, so two full sockets do not hold each other up."""
    pair = loops.pair(kind)
    sinks = [Sink(), Sink()]
    both = [loops.link(1 - side, pair[side], sinks[side]) for side in (0, 1)]
    for number in range(8):
        for link in both:
            link.send(message(number, filled(1_000_000, number)))
    for sink in sinks:
        assert seen(sink.wait_for(8)) == expected(range(8), [1_000_000] * 8)


# Cuts


def everything():
    """A stream of every kind of frame."""
    tensors = [torch.arange(5, dtype=torch.int16), torch.zeros(0), torch.ones(3, 2, dtype=torch.float64)]
    return [
        message(1),
        message(2, *tensors, acks=(("linked", 7),)),
        [wire.pack_acks((("linked", 8), ("linked", 9)))],
        message(3, torch.zeros(0)),
        message(4, filled(33, 4)),
        [wire.pack_leave()],
    ]


def told(sink):
    """A log as plain values."""
    return [
        (*entry[:3], [(x.dtype, tuple(x.shape), x.tolist()) for x in entry[3]]) if entry[0] == "message" else entry
        for entry in sink.log
    ]


def heard(cuts):
    """What a link makes of these pieces of a stream, each read by itself."""
    ours, theirs = socket.socketpair()
    sink = Sink()
    with ours, theirs:
        link = Link(0, theirs, sink, None)
        for piece in cuts:
            ours.sendall(piece)
            assert link.read()
    return told(sink)


def test_a_stream_may_be_cut_anywhere():
    stream = flat(*everything())
    whole = heard([stream])
    assert [entry[0] for entry in whole] == ["message", "back", "message", "back", "message", "message", "left"]
    assert whole[1] == ("back", 0, (("linked", 7),))
    assert whole[2][3][0] == (torch.int16, (5,), [0, 1, 2, 3, 4])
    assert whole[2][3][2] == (torch.float64, (3, 2), [[1.0, 1.0]] * 3)
    assert whole[5][3] == [(torch.uint8, (33,), [4] * 33)]
    assert heard([stream[place : place + 1] for place in range(len(stream))]) == whole
    for place in range(1, len(stream)):
        assert heard([stream[:place], stream[place:]]) == whole


def test_cuts_at_random_places_of_large_frames():
    dice = random.Random(1)
    frames = [message(n, *[filled(dice.randrange(200_000), n)] * (n % 3), acks=(("linked", n),)) for n in range(12)]
    stream = flat(*frames)
    whole = heard([stream[start : start + 60_000] for start in range(0, len(stream), 60_000)])
    assert len(whole) == 24
    cuts, start = [], 0
    while start < len(stream):
        end = start + dice.choice([1, 19, 20, 21, 500, STAGING - 1, STAGING, 100_000])
        cuts.append(stream[start:end])
        start = end
    assert heard(cuts) == whole


@pytest.mark.parametrize("length", [STAGING - 200, STAGING, STAGING + 1, 10 * STAGING])
def test_headers_larger_than_the_staging_memory(loops, kind, length):
    ours, theirs = loops.pair(kind)
    sink = Sink()
    loops.link(0, theirs, sink)
    link = loops.link(1, ours, Sink())
    for number in range(3):
        head = Head(TAG.name, 0, number, 2, False, (number, "x" * length), (TensorHeader(torch.uint8, (7,)),), ())
        link.send([wire.pack(head), wire.as_bytes(filled(7, number)), bytes(9)])
        link.send(message(10 + number))
    metas = [entry[2] for entry in sink.wait_for(6)]
    assert metas == [m for n in range(3) for m in ((n, "x" * length), (10 + n,))]
    assert [entry[3][0].tolist() for entry in sink.log[::2]] == [[n] * 7 for n in range(3)]


def test_headers_that_just_fit_or_just_do_not():
    for length in range(STAGING - 60, STAGING + 20):
        head = Head(TAG.name, 0, 1, 2, False, ("x" * length,), (), ())
        stream = wire.pack(head) + flat(message(2))
        assert [entry[2] for entry in heard([stream[:40_000], stream[40_000:]])] == [("x" * length,), (2,)]


def test_a_body_lands_where_the_receiver_says_and_nowhere_else():
    ours, theirs = socket.socketpair()
    place = torch.full((64,), 9, dtype=torch.uint8)

    class Landing(Sink):
        def receive_buffer(self, peer, head, nbytes):
            assert (peer, head.name, nbytes) == (0, "linked", 48)
            return place

    sink = Landing()
    with ours, theirs:
        link = Link(0, theirs, sink, None)
        ours.sendall(flat(message(1, filled(40, 3)), message(2)))
        assert link.read()
    assert place.tolist() == [3] * 40 + [0] * 8 + [9] * 16
    assert [entry[2] for entry in sink.log] == [(1,), (2,)]


# A peer that does not read


def fill(link):
    """Send until the socket is full and more is queued."""
    for number in range(8):
        link.send(message(number, filled(4_000_000, number)))


def waits(flushing):
    flushing.join(0.05)
    return flushing.is_alive()


def begin_flush(link):
    thread = threading.Thread(target=link.flush)
    thread.start()
    return thread


def test_a_peer_that_does_not_read_holds_no_other_rank_up(loops, kind):
    silent, _ = loops.pair(kind)
    stuck = loops.link(1, silent, Sink())
    fill(stuck)
    ours, theirs = loops.pair(kind)
    sink = Sink()
    loops.link(0, theirs, sink)
    link = loops.link(2, ours, Sink())
    for number in range(10):
        link.send(message(number, filled(500_000, number)))
    assert seen(sink.wait_for(10)) == expected(range(10), [500_000] * 10)
    link.flush()


def test_a_flush_waits_for_a_late_reader_and_everything_is_there(loops, kind):
    ours, theirs = loops.pair(kind)
    link = loops.link(1, ours, Sink())
    fill(link)
    flushing = begin_flush(link)
    assert waits(flushing)
    sink = Sink()
    loops.link(0, theirs, sink)
    flushing.join(PATIENCE)
    assert not flushing.is_alive()
    assert seen(sink.wait_for(8)) == expected(range(8), [4_000_000] * 8)


def test_after_a_flush_the_other_sides_kernel_has_everything(loops, kind):
    ours, theirs = loops.pair(kind)
    link = loops.link(1, ours, Sink())
    frame = message(1, filled(20_000, 1))
    link.send(frame)
    link.flush()
    theirs.setblocking(False)
    got = b""
    while len(got) < len(flat(frame)):
        got += theirs.recv(2**20)  # would raise if it had to wait
    assert got == flat(frame)


def test_nothing_to_flush_is_flushed_at_once(loops, kind):
    loops.link(1, loops.pair(kind)[0], Sink()).flush()


def test_stopping_frees_a_blocked_flush_and_drops_the_rest(loops, kind):
    ours, theirs = loops.pair(kind)
    link = loops.link(1, ours, Sink())
    fill(link)
    flushing = begin_flush(link)
    assert waits(flushing)
    link.stop_sending()
    flushing.join(PATIENCE)
    assert not flushing.is_alive()
    link.send(message(9))
    link.flush()
    got = 0
    while piece := theirs.recv(2**20):
        got += len(piece)
    assert 0 < got < 8 * 4_000_000


def test_stopping_twice_or_without_a_peer_is_fine(loops, kind):
    ours, theirs = loops.pair(kind)
    link = loops.link(1, ours, Sink())
    theirs.close()
    for _ in range(2):
        link.stop_sending()


def test_after_stopping_what_comes_in_is_still_read(loops, kind):
    ours, theirs = loops.pair(kind)
    sink = Sink()
    link = loops.link(1, ours, sink)
    link.stop_sending()
    theirs.sendall(flat(message(1, filled(100_000, 1)), message(2)))
    assert seen(sink.wait_for(2)) == [(1, [(100_000, [1])]), (2, [])]


# The end


def test_a_peer_that_goes_has_the_last_word(loops, kind):
    ours, theirs = loops.pair(kind)
    sink = Sink()
    theirs.sendall(flat(message(1, filled(30_000, 1)), message(2)))
    theirs.close()
    loops.link(1, ours, sink)
    log = sink.wait_for(3)
    assert seen(log) == [(1, [(30_000, [1])]), (2, [])]
    assert log[2] == ("ended", 1, "its connection was closed")


def test_a_peer_that_goes_in_the_middle_of_a_body_ends_the_link(loops, kind):
    ours, theirs = loops.pair(kind)
    sink = Sink()
    loops.link(1, ours, sink)
    theirs.sendall(flat(message(1, filled(30_000, 1)))[:-1])
    theirs.close()
    assert sink.wait_for(1) == [("ended", 1, "its connection was closed")]


def test_a_peer_that_goes_while_we_send_frees_the_flush(loops, kind):
    ours, theirs = loops.pair(kind)
    sink = Sink()
    link = loops.link(1, ours, sink)
    fill(link)
    theirs.close()
    ((what, peer, why),) = sink.wait_for(1)
    assert (what, peer) == ("ended", 1)
    assert why in ("its connection was closed", "its connection broke: Connection reset by peer")
    link.stop_sending()
    link.flush()
    link.send(message(1))


def test_a_frame_that_the_kernel_refuses_ends_the_link_and_is_not_lost_in_silence(loops):
    class Refusing(socket.socket):
        def sendmsg(self, *_):
            raise OSError(105, "No buffer space available")

    ours, theirs = loops.pair("unix")
    sink = Sink()
    refusing = Refusing(fileno=ours.detach())
    loops.sockets.append(refusing)
    link = loops.link(1, refusing, sink)
    link.send(message(1))
    assert sink.wait_for(1) == [("ended", 1, "its connection was closed")]
    assert theirs.recv(1) == b""


def oversized():
    return wire.PREFIX.pack(wire.MAGIC, wire.MESSAGE, 20, 2**60)


def unknown_tag():
    return flat(message(1)).replace(b"linked", b"linkes")


def placed_elsewhere():
    return wire.pack(Head(TAG.name, 0, 1, 2, False, (), (TensorHeader(torch.uint8, (8,), "own/0/1", 64),), ()))


GARBAGE = {
    "noise": (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 50, "does not begin with the magic bytes of a frame"),
    "oversized": (oversized(), "body claims 1152921504606846976 bytes"),
    "unknown tag": (unknown_tag(), "the tag 'linkes' is not known"),
    "acks": (wire.PREFIX.pack(wire.MAGIC, wire.RELEASE, 1, 0) + b"\x01", "its acknowledgements are not"),
}


@pytest.mark.parametrize(("garbage", "says"), GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_ends_its_link_with_the_reason_and_no_other(loops, kind, garbage, says, caplog):
    ours, theirs = loops.pair(kind)
    sink = Sink()
    loops.link(7, ours, sink)
    theirs.sendall(flat(message(1, filled(9, 1))) + garbage + flat(message(2)))
    log = sink.wait_for(2)
    assert seen(log) == [(1, [(9, [1])])]
    assert log[1][:2] == ("ended", 7) and log[1][2].startswith("it sent garbage: ") and says in log[1][2]
    assert sink.landed == [16]
    with pytest.raises(ConnectionError):  # both directions are shut, sooner or later
        while True:
            theirs.sendall(bytes(2**16))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("manyhands", "WARNING")
    assert says in record.getMessage() and "rank 7" in record.getMessage()
    other, others = loops.pair(kind)
    loops.link(8, other, sink)
    others.sendall(flat(message(3)))
    assert sink.wait_for(3)[2][:3] == ("message", 8, (3,))


def test_only_a_peer_of_this_host_may_speak_of_its_memory(loops, kind):
    ours, theirs = loops.pair(kind)
    sink = Sink()
    loops.link(1, ours, sink)
    theirs.sendall(placed_elsewhere())
    (entry,) = sink.wait_for(1)
    assert entry[0] == {"unix": "message", "tcp": "ended"}[kind]
    assert kind == "unix" or entry[2] == "it sent garbage: it refers to shared memory of another host"


@pytest.mark.parametrize("error", [RuntimeError("can't allocate"), MemoryError()], ids=["torch", "python"])
def test_a_body_for_which_there_is_no_memory_ends_its_link_not_the_reader(loops, error):
    class Full(Sink):
        def receive_buffer(self, peer, head, nbytes):
            raise error

    ours, theirs = loops.pair("unix")
    sink = Full()
    loops.link(1, ours, sink)
    theirs.sendall(flat(message(1, filled(100, 1))))
    assert sink.wait_for(1)[0][2] == "it sent garbage: it announces a body of 112 bytes, for which there is no memory"
    other, others = loops.pair("unix")
    loops.link(2, other, sink)
    others.sendall(flat(message(2)))
    assert sink.wait_for(2)[1][:3] == ("message", 2, (2,))


def test_what_is_refused_is_refused_before_anything_lands(monkeypatch):
    """The whole header is looked at first: with a bad second tensor not even the first has a place."""
    ours, theirs = socket.socketpair()
    sink = Sink()
    stream = flat(message(1, filled(64, 1), filled(64, 2)))
    monkeypatch.setattr(links.wire, "_may_carry", lambda carries, piece: False)
    with ours, theirs:
        link = Link(0, theirs, sink, None)
        ours.sendall(stream)
        assert not link.read()
    assert sink.landed == [] and sink.log[0][0] == "ended"

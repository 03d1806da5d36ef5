"""The event loop: what it runs, in which thread, and that a removed source is not served."""

import socket
import threading

import pytest

from manyhands.runtime.membership.event_loop import EventLoop

PATIENCE = 20


@pytest.fixture
def loop():
    made = EventLoop()
    yield made
    made.close()


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_posted_calls_run_in_order_in_the_thread_of_the_loop(loop):
    calls, done = [], threading.Event()
    for number in range(3):
        loop.post(lambda number=number: calls.append((number, threading.current_thread().name)))
    loop.post(done.set)
    thread = loop.start("test loop")
    assert done.wait(PATIENCE)
    loop.stop()
    thread.join(PATIENCE)
    assert calls == [(number, "test loop") for number in range(3)] and not thread.is_alive()


def test_timers_run_when_they_are_due_in_the_order_of_their_times(loop):
    calls = []
    for seconds in (0.02, 0.0, 0.01, 0.0):
        loop.later(seconds, lambda seconds=seconds: calls.append(seconds))
    while len(calls) < 4:
        loop.run_once()
    assert calls == [0.0, 0.0, 0.01, 0.02]


def test_a_readable_source_is_served_until_it_is_removed(loop, pair):
    ours, theirs = pair
    calls = []
    loop.on_readable(ours, lambda: calls.append(ours.recv(1)))
    theirs.sendall(b"ab")
    loop.run_once()
    loop.run_once()
    theirs.sendall(b"c")
    loop.remove(ours)
    loop.later(0.0, lambda: calls.append("timer"))
    loop.run_once()
    loop.remove(ours)
    assert calls == [b"a", b"b", "timer"]


def test_a_writable_source_is_served_and_its_callback_can_be_replaced(loop, pair):
    calls = []
    loop.on_writable(pair[0], lambda: calls.append("first"))
    loop.run_once()
    loop.on_writable(pair[0], lambda: calls.append("second"))
    loop.run_once()
    assert calls == ["first", "second"]


def test_what_an_earlier_callback_removes_is_not_served_in_the_same_turn(loop, pair):
    calls = []

    def serve(me, other):
        calls.append(me)
        loop.remove(other)

    ours, theirs = pair
    loop.on_writable(ours, lambda: serve("ours", theirs))
    loop.on_writable(theirs, lambda: serve("theirs", ours))
    loop.run_once()
    assert len(calls) == 1

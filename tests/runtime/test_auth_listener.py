"""The listening socket of a job: who is admitted, who is rejected, and that a rejection harms no other connection."""

import socket
import threading

import pytest

from manyhands.runtime.membership import auth_listener
from manyhands.runtime.membership.auth_listener import AuthListener
from manyhands.runtime.membership.event_loop import EventLoop
from manyhands.runtime.membership.secret import Stranger, introduce, new_key

PATIENCE = 20
KEY = new_key()


class Listening:
    """A listener on loopback whose loop runs in a thread; `admitted` may raise to reject."""

    def __init__(self, admitted):
        self.loop = EventLoop()
        sock = socket.create_server(("127.0.0.1", 0))
        self.address = sock.getsockname()
        self.listener = AuthListener(sock, KEY, self.loop, admitted, "rank 7")
        self._thread = self.loop.start("test loop")

    def connect(self, key=KEY, who=b"1"):
        sock = socket.create_connection(self.address, timeout=PATIENCE)
        try:
            introduce(sock, key, who)
        except Stranger:
            sock.close()
            raise
        return sock

    def close(self):
        self.loop.post(self.listener.close)
        self.loop.stop()
        self._thread.join(PATIENCE)
        self.loop.close()


@pytest.fixture
def listening():
    made = []

    def start(admitted):
        made.append(Listening(admitted))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_a_proved_connection_is_handed_over_in_the_thread_of_the_loop(listening):
    found, done = [], threading.Event()

    def admitted(sock, introduction):
        found.append((threading.current_thread().name, introduction, sock.gettimeout()))
        sock.close()
        done.set()

    listening(admitted).connect(who=b"3").close()
    assert done.wait(PATIENCE)
    assert found == [("test loop", b"3", None)]


@pytest.mark.parametrize("error", [Stranger("it is not expected"), OSError("it is closed")], ids=["stranger", "closed"])
def test_a_connection_that_cannot_be_used_is_rejected_and_the_next_is_served(listening, caplog, error):
    def admitted(sock, introduction):
        if introduction == b"1":
            raise error
        sock.sendall(b"welcome")
        sock.close()

    target = listening(admitted)
    with target.connect(who=b"1") as first, target.connect(who=b"2") as second:
        first.settimeout(PATIENCE)
        second.settimeout(PATIENCE)
        assert first.recv(1) == b"" and second.recv(7) == b"welcome"
    assert caplog.messages == [f"rank 7 rejected a connection: {error}"]


def test_only_so_many_connections_may_be_unproved(listening, caplog, monkeypatch):
    monkeypatch.setattr(auth_listener, "MOST_PENDING", 2)
    target = listening(lambda sock, _: sock.close())
    silent = [socket.create_connection(target.address, timeout=PATIENCE) for _ in range(2)]
    assert [sock.recv(12) for sock in silent] == [b"manyhands/1\n"] * 2
    with pytest.raises(Stranger):
        target.connect()
    assert caplog.messages == ["rank 7 rejected a connection: 2 other connections have not proved the job's secret yet"]
    for sock in silent:
        sock.close()

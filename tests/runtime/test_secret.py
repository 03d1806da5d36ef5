"""How two processes of one job know each other, and how strangers fail."""

import socket
import struct
import threading
import time

import pytest

from manyhands.runtime.membership import secret
from manyhands.runtime.membership.secret import HELLO, LONGEST, NONCE, PROOF, Stranger, admit, introduce, new_key
from pace import assert_within

KEY = b"k" * 32


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        yield ours, theirs


class Beside:
    """A call in another thread: its answer, or its error."""

    def __init__(self, call, *arguments):
        self.said = None
        self._thread = threading.Thread(target=self._run, args=(call, *arguments))
        self._thread.start()

    def _run(self, call, *arguments):
        try:
            self.said = call(*arguments)
        except Stranger as error:
            self.said = error

    def answer(self):
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self.said

    def reason(self):
        answer = self.answer()
        assert isinstance(answer, Stranger)
        return str(answer)


def take(sock, size):
    got = b""
    while len(got) < size:
        piece = sock.recv(size - len(got))
        assert piece, "the other side has hung up"
        got += piece
    return got


def connects(nonce, challenge, introduction=b"1", key=KEY, role=b"connect"):
    """What a connecting side says to the acceptor's nonce."""
    proof = secret._proof(key, role, challenge + nonce + introduction)
    return nonce + struct.pack("<H", len(introduction)) + introduction + proof


def challenge_of(sock):
    assert take(sock, len(HELLO)) == HELLO
    return take(sock, NONCE)


@pytest.mark.parametrize("introduction", [b"", b"3", bytes(LONGEST)], ids=len)
def test_two_that_hold_the_same_key_know_each_other(pair, introduction):
    ours, theirs = pair
    accepting = Beside(admit, theirs, KEY)
    introduce(ours, KEY, introduction)
    assert accepting.answer() == introduction
    assert ours.gettimeout() is theirs.gettimeout() is None
    ours.sendall(b"and now")
    assert take(theirs, 7) == b"and now"


def test_another_key_is_noticed_by_the_acceptor_who_proves_nothing(pair):
    ours, theirs = pair
    accepting = Beside(admit, theirs, KEY)
    ours.sendall(connects(bytes(NONCE), challenge_of(ours), key=b"x" * 32))
    assert accepting.reason() == "it does not know the secret of this job"
    theirs.close()
    assert ours.recv(1) == b""


def test_another_key_is_noticed_by_the_connector_too(pair):
    ours, theirs = pair
    connecting = Beside(introduce, theirs, KEY, b"1")
    ours.sendall(HELLO + bytes(NONCE))
    said = take(ours, NONCE + 2 + 1 + PROOF)
    ours.sendall(secret._proof(b"x" * 32, b"accept", bytes(NONCE) + said[:NONCE] + b"1"))
    assert connecting.reason() == "the other side does not know the secret of this job"


def test_every_change_of_what_was_said_breaks_its_proof():
    """A flipped bit anywhere in nonce, introduction or proof."""
    for place in [0, NONCE - 1, NONCE + 2, NONCE + 3, NONCE + 2 + PROOF]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            accepting = Beside(admit, theirs, KEY)
            said = bytearray(connects(bytes(NONCE), challenge_of(ours)))
            said[place] ^= 1
            ours.sendall(said)
            assert accepting.reason() == "it does not know the secret of this job"


def test_a_handshake_that_was_overheard_cannot_be_played_again(pair):
    ours, theirs = pair
    accepting = Beside(admit, theirs, KEY)
    overheard = connects(bytes(NONCE), challenge_of(ours))
    ours.sendall(overheard)
    assert accepting.answer() == b"1"
    again, listener = socket.socketpair()
    with again, listener:
        accepting = Beside(admit, listener, KEY)
        again.sendall(overheard)
        assert accepting.reason() == "it does not know the secret of this job"


def test_an_acceptors_answer_that_was_overheard_cannot_be_played_again(pair):
    """The connector's nonce is new each time as well."""
    ours, theirs = pair
    accepting = Beside(admit, theirs, KEY)
    ours.sendall(connects(bytes(NONCE), challenge := challenge_of(ours)))
    answer = take(ours, PROOF)
    assert accepting.answer() == b"1"
    other, impostor = socket.socketpair()
    with other, impostor:
        connecting = Beside(introduce, other, KEY, b"1")
        impostor.sendall(HELLO + challenge + answer)
        assert connecting.reason() == "the other side does not know the secret of this job"


def test_nonces_are_never_the_same():
    seen = set()
    for _ in range(20):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            accepting = Beside(admit, theirs, KEY)
            seen.add(challenge_of(ours))
            ours.close()
            accepting.reason()
    assert len(seen) == 20


def test_the_acceptors_own_proof_sent_back_to_it_is_none(pair):
    ours, theirs = pair
    accepting = Beside(admit, theirs, KEY)
    ours.sendall(connects(bytes(NONCE), challenge_of(ours), role=b"accept"))
    assert accepting.reason() == "it does not know the secret of this job"


def test_the_connectors_own_proof_sent_back_to_it_is_none(pair):
    ours, theirs = pair
    connecting = Beside(introduce, theirs, KEY, b"1")
    ours.sendall(HELLO + bytes(NONCE))
    ours.sendall(take(ours, NONCE + 2 + 1 + PROOF)[-PROOF:])
    assert connecting.reason() == "the other side does not know the secret of this job"


def test_two_connectors_do_not_take_each_other_for_acceptors(pair, monkeypatch):
    monkeypatch.setattr(secret, "PATIENCE", 0.1)
    first, second = (Beside(introduce, sock, KEY, b"1") for sock in pair)
    assert "timed out" in first.reason() and "did not prove the secret" in second.reason()


def test_two_acceptors_do_not_take_each_other_for_connectors(pair, monkeypatch):
    monkeypatch.setattr(secret, "PATIENCE", 0.1)
    for one in [Beside(admit, sock, KEY) for sock in pair]:
        assert "at most 1024" in (reason := one.reason()) or "did not prove the secret" in reason


@pytest.mark.parametrize("length", [LONGEST + 1, 2**16 - 1])
def test_a_long_introduction_is_refused_before_it_is_read(pair, length):
    ours, theirs = pair
    accepting = Beside(admit, theirs, KEY)
    challenge_of(ours)
    ours.sendall(bytes(NONCE) + struct.pack("<H", length))
    assert accepting.reason() == f"its introduction has {length} bytes, but must have at most 1024"


def test_a_connection_that_ends_half_way_is_a_stranger():
    whole = NONCE + 2 + 1 + PROOF
    for end in [0, 1, NONCE - 1, NONCE, NONCE + 1, NONCE + 2, NONCE + 3, whole - 1]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            accepting = Beside(admit, theirs, KEY)
            ours.sendall(connects(bytes(NONCE), challenge_of(ours))[:end])
            ours.close()
            assert "did not prove the secret" in accepting.reason()


@pytest.mark.parametrize("said", [b"", HELLO[:5], HELLO + bytes(NONCE - 1), HELLO + bytes(NONCE)], ids=len)
def test_an_acceptor_that_hangs_up_half_way_is_a_stranger(pair, said):
    ours, theirs = pair
    connecting = Beside(introduce, theirs, KEY, b"1")
    ours.sendall(said)
    ours.shutdown(socket.SHUT_WR)
    assert "did not prove the secret" in connecting.reason()


def test_another_language_is_noticed_before_anything_is_proved(pair):
    ours, theirs = pair
    connecting = Beside(introduce, theirs, KEY, b"1")
    ours.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert connecting.reason() == "the other side does not speak the protocol of manyhands"
    theirs.shutdown(socket.SHUT_WR)
    assert ours.recv(1) == b""


@pytest.mark.parametrize("call", [lambda sock: admit(sock, KEY), lambda sock: introduce(sock, KEY, b"1")])
def test_silence_is_not_waited_for(pair, monkeypatch, call):
    monkeypatch.setattr(secret, "PATIENCE", 0.05)
    assert "timed out" in Beside(call, pair[1]).reason()


@pytest.mark.parametrize("call", [lambda sock: admit(sock, KEY), lambda sock: introduce(sock, KEY, b"1")])
def test_a_peer_that_sends_byte_by_byte_gets_no_more_time_than_others(pair, monkeypatch, call):
    """Each byte comes in good time, but the last one would come after more than ten times the patience."""
    monkeypatch.setattr(secret, "PATIENCE", 0.2)
    ours, theirs = pair
    waiting, began = Beside(call, theirs), time.monotonic()
    for byte in (HELLO + bytes(NONCE + PROOF))[:NONCE]:
        if waiting.said is not None:
            break
        ours.sendall(bytes([byte]))
        time.sleep(0.1)
    assert "timed out" in waiting.reason()
    assert_within(2.5, time.monotonic() - began)


def test_keys_are_long_and_never_the_same():
    assert len({new_key() for _ in range(10)}) == 10
    assert {len(new_key()) for _ in range(10)} == {32}

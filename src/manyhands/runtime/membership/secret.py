"""Mutual authentication of two processes of one job: both prove that they know its secret, and neither reveals it.

    acceptor    HELLO, nonce a (32 bytes)                      ->
    connector   <-  nonce c, its introduction, HMAC(secret, "connect" a c introduction)
    acceptor    HMAC(secret, "accept" a c introduction)        ->

Nothing that a stranger sends is parsed before that: the introduction is returned only if its proof holds. Each nonce is
used once, so a recorded handshake cannot be replayed.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time

from manyhands.core.errors import ManyhandsError

HELLO = b"manyhands/1\n"
NONCE = PROOF = 32
LONGEST = 1024
"""Bytes of an introduction."""
PATIENCE = 5.0
"""Seconds in which the other side must have completed its proof."""
_LENGTH = struct.Struct("<H")


class Stranger(ManyhandsError):
    """The other side did not prove that it belongs to this job."""


def new_key() -> bytes:
    """A fresh secret."""
    return secrets.token_bytes(32)


def introduce(sock: socket.socket, key: bytes, introduction: bytes) -> None:
    """The connecting side: prove the secret, introduce ourselves, check the other's proof. The socket is blocking."""
    ends = _start_timeout(sock)
    try:
        if _read(sock, len(HELLO), ends) != HELLO:
            raise Stranger("the other side does not speak the protocol of manyhands")
        theirs, ours = _read(sock, NONCE, ends), secrets.token_bytes(NONCE)
        transcript = theirs + ours + introduction
        sock.sendall(ours + _LENGTH.pack(len(introduction)) + introduction + _proof(key, b"connect", transcript))
        if not hmac.compare_digest(_read(sock, PROOF, ends), _proof(key, b"accept", transcript)):
            raise Stranger("the other side does not know the secret of this job")
    except OSError as error:
        raise Stranger(f"it did not prove the secret: {error}") from None
    sock.settimeout(None)


def admit(sock: socket.socket, key: bytes) -> bytes:
    """The accepting side: demand the proof, return the introduction. The socket is blocking."""
    ends = _start_timeout(sock)
    try:
        ours = secrets.token_bytes(NONCE)
        sock.sendall(HELLO + ours)
        theirs = _read(sock, NONCE, ends)
        (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size, ends))
        if length > LONGEST:
            raise Stranger(f"its introduction has {length} bytes, but must have at most {LONGEST}")
        introduction = _read(sock, length, ends)
        transcript = ours + theirs + introduction
        if not hmac.compare_digest(_read(sock, PROOF, ends), _proof(key, b"connect", transcript)):
            raise Stranger("it does not know the secret of this job")
        sock.sendall(_proof(key, b"accept", transcript))
    except OSError as error:
        raise Stranger(f"it did not prove the secret: {error}") from None
    sock.settimeout(None)
    return introduction


def _proof(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, role + transcript, "sha256")


def _start_timeout(sock: socket.socket) -> float:
    """The time limit of the whole handshake: one per read could be evaded by sending single bytes."""
    sock.settimeout(PATIENCE)
    return time.monotonic() + PATIENCE


def _read(sock: socket.socket, size: int, ends: float) -> bytes:
    data = b""
    while len(data) < size:
        left = ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left)
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise Stranger("it did not prove the secret: the connection was closed")
        data += chunk
    return data

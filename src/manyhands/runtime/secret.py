"""How two processes of one job know each other: both prove that they hold the job's secret, and neither shows it.

    acceptor    HELLO, nonce a (32 bytes)                      ->
    connector   <-  nonce c, its introduction, HMAC(secret, "connect" a c introduction)
    acceptor    HMAC(secret, "accept" a c introduction)        ->

Nothing a stranger says is parsed before that: the introduction is looked at once its proof holds. Each nonce is used
once, so what was overheard cannot be played again.
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
"""Seconds in which the other side must have proved itself."""
_LENGTH = struct.Struct("<H")


class Stranger(ManyhandsError):
    """The other side did not prove that it belongs to this job."""


def new_key() -> bytes:
    """A fresh secret."""
    return secrets.token_bytes(32)


def introduce(sock: socket.socket, key: bytes, introduction: bytes) -> None:
    """The connecting side: prove the secret, say who we are, and see the other's proof. The socket is blocking."""
    ends = _patience(sock)
    try:
        if _read(sock, len(HELLO), ends) != HELLO:
            raise Stranger("the other side does not speak our language")
        theirs, ours = _read(sock, NONCE, ends), secrets.token_bytes(NONCE)
        said = theirs + ours + introduction
        sock.sendall(ours + _LENGTH.pack(len(introduction)) + introduction + _proof(key, b"connect", said))
        if not hmac.compare_digest(_read(sock, PROOF, ends), _proof(key, b"accept", said)):
            raise Stranger("the other side does not know the secret of this job")
    except OSError as error:
        raise Stranger(f"it hung up before it had proved itself ({error})") from None
    sock.settimeout(None)


def admit(sock: socket.socket, key: bytes) -> bytes:
    """The accepting side: ask for the proof, return the introduction. The socket is blocking."""
    ends = _patience(sock)
    try:
        ours = secrets.token_bytes(NONCE)
        sock.sendall(HELLO + ours)
        theirs = _read(sock, NONCE, ends)
        (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size, ends))
        if length > LONGEST:
            raise Stranger(f"it introduces itself with {length} bytes, more than {LONGEST}")
        introduction = _read(sock, length, ends)
        said = ours + theirs + introduction
        if not hmac.compare_digest(_read(sock, PROOF, ends), _proof(key, b"connect", said)):
            raise Stranger("it does not know the secret of this job")
        sock.sendall(_proof(key, b"accept", said))
    except OSError as error:
        raise Stranger(f"it hung up before it had proved itself ({error})") from None
    sock.settimeout(None)
    return introduction


def _proof(key: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(key, role + said, "sha256")


def _patience(sock: socket.socket) -> float:
    """When the time of the other side is over: for all it has to say, or it could say it byte by byte."""
    sock.settimeout(PATIENCE)
    return time.monotonic() + PATIENCE


def _read(sock: socket.socket, size: int, ends: float) -> bytes:
    got = b""
    while len(got) < size:
        left = ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left)
        piece = sock.recv(size - len(got))
        if not piece:
            raise Stranger("it hung up before it had proved itself")
        got += piece
    return got

"""Joining a job that something else has started (torchrun, Slurm, ...) and described by RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT. Ranks find each other through a store there; on each host one of them starts the side process.

Variables of our own: MANYHANDS_SERVERS and MANYHANDS_LINK for the job, MANYHANDS_BIND for the address of this host, and
MANYHANDS_SECRET, which every rank must have then. Without it the job's secret travels through the store: it is as safe
as that is, and whoever can connect to the store can read it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from manyhands.core.errors import ManyhandsError, Refused, refuse_unless
from manyhands.runtime.board import Board, open_board
from manyhands.runtime.seat import LINKS, Seat
from manyhands.runtime.secret import new_key
from manyhands.runtime.side import start_side

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DEADLINE = 60.0


def seat_from_torchrun(servers: int = 0, link: str | None = None) -> Seat:
    """This rank's seat in the job that the environment describes, with somebody watching over this host."""
    rank, size = _place()
    servers = _number("MANYHANDS_SERVERS", servers)
    refuse_unless(0 <= servers < size, "servers", servers, f">= 0 and < {size}, the number of ranks")
    link = os.environ.get("MANYHANDS_LINK") or link or "shm"
    refuse_unless(link in LINKS, "link", link, " or ".join(LINKS))
    board = open_board(rank, size, os.environ["MASTER_ADDR"], _number("MASTER_PORT"), DEADLINE)
    places = board.gather("place", {"host": host_identity(), "pid": os.getpid(), "address": _address()})
    hosts = _numbered([place["host"] for place in places])
    job, key = _secret(board, rank)
    seat = Seat(
        rank,
        ("worker",) * (size - servers) + ("server",) * servers,
        tuple(range(size)) if link == "tcp" else hosts,
        job,
        key,
        f"mh-{job}-watcher-{hosts[rank]}",
        link,
        _bind(rank, hosts, [place["address"] for place in places]),
        DEADLINE,
    )
    _have_watched(seat, hosts, [place["pid"] for place in places], board)
    return seat


def _place() -> tuple[int, int]:
    missing = [name for name in NAMES if not os.environ.get(name)]
    if missing:
        hint = "start the script with manyhands run, or with torchrun"
        raise Refused(f"the environment does not describe a job ({hint}): {', '.join(missing)} not set")
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    refuse_unless(0 <= rank < size, "RANK", rank, f">= 0 and < {size}")
    return rank, size


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name) or str(default)
    refuse_unless(text.isdecimal(), name, text, "a number")
    return int(text)


def host_identity() -> str:
    """What ranks have in common that see the same sockets and the same processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join([boot, *(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid"))])


def _numbered(identities: Sequence[str]) -> tuple[int, ...]:
    """Hosts by number, in the order of their first ranks."""
    order = list(dict.fromkeys(identities))
    return tuple(order.index(identity) for identity in identities)


def _address() -> str:
    """The address of this host that is on the way to MASTER_ADDR; a host's name often leads to loopback."""
    if chosen := os.environ.get("MANYHANDS_BIND"):
        return chosen
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((os.environ["MASTER_ADDR"], _number("MASTER_PORT")))  # nothing is sent
        except OSError as error:
            raise Refused(f"there is no way to MASTER_ADDR {os.environ['MASTER_ADDR']}: {error.strerror}") from None
        address: str = sock.getsockname()[0]
        return address


def _bind(rank: int, hosts: Sequence[int], addresses: Sequence[str]) -> str:
    if len(set(hosts)) == 1:
        return os.environ.get("MANYHANDS_BIND", "127.0.0.1")
    inward = [address.startswith("127.") for address in addresses]
    if any(inward) and not all(inward):
        odd = inward.index(True)
        raise Refused(
            f"rank {odd} finds MASTER_ADDR at {addresses[odd]}, where other hosts cannot reach it: "
            "set MANYHANDS_BIND on its host to an address that they can reach"
        )
    return addresses[rank]


def _secret(board: Board, rank: int) -> tuple[str, str]:
    """The job's name and key. A common MANYHANDS_SECRET still gives every job a key of its own."""
    common = os.environ.get("MANYHANDS_SECRET", "")
    if rank == 0:
        board.put("job", {"job": secrets.token_hex(6), "key": "" if common else new_key().hex()})
    note = board.get("job", 0)
    job, key = note["job"], note["key"]
    if bool(common) == bool(key):
        with_it, without = (rank, 0) if common else (0, rank)
        raise Refused(f"MANYHANDS_SECRET is set on rank {with_it}, but not on rank {without}")
    return job, key or hmac.digest(common.encode(), job.encode(), "sha256").hex()


def _have_watched(seat: Seat, hosts: Sequence[int], pids: Sequence[int], board: Board) -> None:
    """The first rank of each host starts the side process, and tells the others of its host when it is there."""
    host = hosts[seat.rank]
    here = {rank: pids[rank] for rank in range(seat.size) if hosts[rank] == host}
    first = min(here)
    if seat.rank == first:
        board.put(f"watcher/{host}", _start(seat, here, board, alone=len(set(hosts)) == 1))
    note = board.get(f"watcher/{host}", first)
    if note["error"]:
        raise ManyhandsError(note["error"])


def _start(seat: Seat, pids: Mapping[int, int], board: Board, alone: bool) -> dict[str, str]:
    try:
        hub = None if alone else "" if seat.rank == 0 else board.get("watcher/0", 0)["hub"]
        return {"hub": start_side(seat, pids, hub), "error": ""}
    except ManyhandsError as error:
        return {"hub": "", "error": str(error)}

"""Rendezvous of a job that another launcher has started (torchrun, Slurm, ...) and described by RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. Ranks exchange addresses through a store there; one rank of each host starts the sidecar.
Where none of these variables is set, there is no launcher: the process is a job of one worker.

Variables of our own: MANYHANDS_SERVERS and MANYHANDS_LINK for the job, MANYHANDS_BIND for the address of this host, and
MANYHANDS_SECRET, which every rank must have if one has it. Without it the job's secret is exchanged through the store:
any process that can connect to the store can read it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from manyhands.core.errors import ManyhandsError, Refused, refuse_unless
from manyhands.runtime.launch.rendezvous_store import RendezvousStore, open_store
from manyhands.runtime.membership.secret import new_key
from manyhands.runtime.membership.session import REJOIN
from manyhands.runtime.membership.sidecar import start_sidecar
from manyhands.runtime.rank_spec import LINKS, RankSpec, rank_specs, role_of_each

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DEADLINE = 60.0


def rank_spec_from_torchrun(servers: int = 0, link: str | None = None, session: int = 0) -> RankSpec:
    """This rank's spec in the job that the environment describes; the watcher of this host is running then."""
    rank, size = _rank_and_size()
    servers = _number("MANYHANDS_SERVERS", servers)
    refuse_unless(0 <= servers < size, "servers", servers, f">= 0 and < {size}, the number of ranks")
    link = os.environ.get("MANYHANDS_LINK") or link or "shm"
    refuse_unless(link in LINKS, "link", link, " or ".join(LINKS))
    deadline = REJOIN if session else DEADLINE
    store = open_store(rank, size, os.environ["MASTER_ADDR"], _number("MASTER_PORT"), deadline, session)
    ranks = store.gather("rank", {"host": host_identity(), "pid": os.getpid(), "address": _address()})
    hosts = _numbered([one["host"] for one in ranks])
    job, key = _secret(store, rank)
    spec = RankSpec(
        rank=rank,
        roles=role_of_each({"worker": size - servers, "server": servers}),
        hosts=tuple(range(size)) if link == "tcp" else hosts,
        job=job,
        key=key,
        watcher=f"mh-{job}-watcher-{hosts[rank]}",
        link=link,
        bind=_bind(rank, hosts, [one["address"] for one in ranks]),
        deadline=DEADLINE,
        session=session,
    )
    _start_watcher(spec, hosts, [one["pid"] for one in ranks], store)
    return spec


def rank_spec_without_launcher(servers: int = 0, session: int = 0) -> RankSpec | None:
    """The spec of a job of this one process, with one line that says so; None if the environment describes a job."""
    if any(os.environ.get(name) for name in NAMES):
        return None
    servers = _number("MANYHANDS_SERVERS", servers)
    refuse_unless(servers == 0, "servers", servers, "0 in a job of one process: start more with manyhands run")
    if session == 0:
        path = getattr(sys.modules["__main__"], "__file__", None) or "script.py"  # a notebook has no file
        script = Path(path).name if path.endswith(".py") else "script.py"
        more = f"`manyhands run -n 4 {script}` starts four"
        print(f"manyhands: no launcher, so this is a job of one worker; {more}", file=sys.stderr, flush=True)
    spec = replace(rank_specs({"worker": 1})[0], session=session)
    start_sidecar(spec, {0: os.getpid()}, None)
    return spec


def _rank_and_size() -> tuple[int, int]:
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
    """Equal for ranks that see the same sockets and the same processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join([boot, *(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid"))])


def _numbered(identities: Sequence[str]) -> tuple[int, ...]:
    """Hosts by number, in the order of their first ranks."""
    order = list(dict.fromkeys(identities))
    return tuple(order.index(identity) for identity in identities)


def _address() -> str:
    """The address of this host on its route to MASTER_ADDR; the host's name often resolves to loopback."""
    if chosen := os.environ.get("MANYHANDS_BIND"):
        return chosen
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((os.environ["MASTER_ADDR"], _number("MASTER_PORT")))  # nothing is sent
        except OSError as error:
            raise Refused(f"there is no route to MASTER_ADDR {os.environ['MASTER_ADDR']}: {error.strerror}") from None
        address: str = sock.getsockname()[0]
        return address


def _bind(rank: int, hosts: Sequence[int], addresses: Sequence[str]) -> str:
    if len(set(hosts)) == 1:
        return os.environ.get("MANYHANDS_BIND", "127.0.0.1")
    loopback = [address.startswith("127.") for address in addresses]
    if any(loopback) and not all(loopback):
        odd = loopback.index(True)
        raise Refused(
            f"rank {odd} has the address {addresses[odd]} on its route to MASTER_ADDR, which other hosts cannot reach: "
            "set MANYHANDS_BIND on its host to an address that they can reach"
        )
    return addresses[rank]


def _secret(store: RendezvousStore, rank: int) -> tuple[str, str]:
    """The job's name and key. With MANYHANDS_SECRET the key is derived from both, so that each job has its own."""
    common = os.environ.get("MANYHANDS_SECRET", "")
    if rank == 0:
        store.put("job", {"job": secrets.token_hex(6), "key": "" if common else new_key().hex()})
    entry = store.get("job", 0)
    job, key = entry["job"], entry["key"]
    if bool(common) == bool(key):
        with_it, without = (rank, 0) if common else (0, rank)
        raise Refused(f"MANYHANDS_SECRET is set on rank {with_it}, but not on rank {without}")
    return job, key or hmac.digest(common.encode(), job.encode(), "sha256").hex()


def _start_watcher(spec: RankSpec, hosts: Sequence[int], pids: Sequence[int], store: RendezvousStore) -> None:
    """The first rank of each host starts the sidecar; the others of its host wait until it is ready."""
    host = hosts[spec.rank]
    local = {rank: pids[rank] for rank in range(spec.size) if hosts[rank] == host}
    first = min(local)
    if spec.rank == first:
        store.put(f"watcher/{host}", _start(spec, local, store, alone=len(set(hosts)) == 1))
    entry = store.get(f"watcher/{host}", first)
    if entry["error"]:
        raise ManyhandsError(entry["error"])


def _start(spec: RankSpec, pids: Mapping[int, int], store: RendezvousStore, alone: bool) -> dict[str, str]:
    try:
        hub = None if alone else "" if spec.rank == 0 else store.get("watcher/0", 0)["hub"]
        return {"hub": start_sidecar(spec, pids, hub), "error": ""}
    except ManyhandsError as error:
        return {"hub": "", "error": str(error)}

"""Seat: what a rank knows before it has met anybody. Launchers hand it over in the environment."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from manyhands.core.errors import Refused, refuse_unless
from manyhands.runtime.secret import new_key

VARIABLE = "MANYHANDS_SEAT"
LINKS = ("shm", "tcp")


@dataclass(frozen=True)
class Seat:
    """One rank's place in a job.

    Args:
        rank: whose seat.
        roles: the role of every rank: workers first, then servers.
        hosts: the host of every rank.
        job: names this run among all others on the machine.
        key: the secret of this run, as hexadecimal digits.
        watcher: the socket (an abstract name) of whoever watches over this host's ranks.
        link: how ranks of one host exchange tensors: "shm" or "tcp".
        bind: the address to listen on for ranks of other hosts.
        deadline: seconds until everyone must have come.
        checks_lending: look whether lent tensors are written into; slow, for tests.
        spares: how many of the workers, the last ones, are not there when the job begins.
    """

    rank: int
    roles: tuple[str, ...]
    hosts: tuple[int, ...]
    job: str
    key: str
    watcher: str
    link: str = "shm"
    bind: str = "127.0.0.1"
    deadline: float = 60.0
    checks_lending: bool = False
    spares: int = 0

    def __post_init__(self) -> None:
        refuse_unless(self.link in LINKS, "link", self.link, " or ".join(LINKS))
        refuse_unless(0 <= self.rank < len(self.roles), "rank", self.rank, f">= 0 and < {len(self.roles)}")

    @property
    def size(self) -> int:
        return len(self.roles)

    @property
    def late(self) -> range:
        """The ranks that come later, or never."""
        workers = self.roles.count("worker")
        return range(workers - self.spares, workers)

    @property
    def host(self) -> int:
        return self.hosts[self.rank]

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self.key)

    def door(self, rank: int) -> str:
        """The socket (an abstract name) on which a rank of this host listens."""
        return f"mh-{self.job}-rank-{rank}"

    def of(self, rank: int) -> Seat:
        """The seat of another rank of the same host."""
        return replace(self, rank=rank)

    def environment(self) -> dict[str, str]:
        """What a process needs to find its seat; beside it the names that torchrun uses, for the script's own use."""
        local = [rank for rank, host in enumerate(self.hosts) if host == self.host]
        return {
            VARIABLE: json.dumps(asdict(self)),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(local.index(self.rank)),
            "LOCAL_WORLD_SIZE": str(len(local)),
        }


def from_environment(environment: Mapping[str, str] | None = None) -> Seat | None:
    """The seat that our launcher left in the environment, if it did."""
    text = (os.environ if environment is None else environment).get(VARIABLE)
    if text is None:
        return None
    try:
        fields = json.loads(text)
        return Seat(**{**fields, "roles": tuple(fields["roles"]), "hosts": tuple(fields["hosts"])})
    except (ValueError, TypeError, KeyError) as error:
        raise Refused(f"{VARIABLE} does not describe a seat: {error}") from None


def seats(
    workers: int,
    servers: int = 0,
    *,
    hosts: tuple[int, ...] | None = None,
    link: str = "shm",
    bind: str = "127.0.0.1",
    deadline: float = 60.0,
    checks_lending: bool = False,
    spares: int = 0,
) -> list[Seat]:
    """The seats of a new job on this machine; with "tcp" every rank counts as its own host, unless `hosts` says."""
    refuse_unless(workers >= 1, "workers", workers, ">= 1")
    refuse_unless(servers >= 0, "servers", servers, ">= 0")
    refuse_unless(spares >= 0, "spares", spares, ">= 0")
    size, job = workers + spares + servers, secrets.token_hex(6)
    placed = hosts or (tuple(range(size)) if link == "tcp" else (0,) * size)
    first = Seat(
        0,
        ("worker",) * (workers + spares) + ("server",) * servers,
        placed,
        job,
        new_key().hex(),
        f"mh-{job}-watcher",
        link,
        bind,
        deadline,
        checks_lending,
        spares,
    )
    return [first.of(rank) for rank in range(size)]

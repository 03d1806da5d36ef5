"""RankSpec: what a rank knows before it connects to any other. Launchers pass it in the environment."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from manyhands.core.errors import Refused, refuse_unless

VARIABLE = "MANYHANDS_RANK_SPEC"
JOIN_TIMEOUT = "MANYHANDS_JOIN_TIMEOUT"
"""Seconds until all ranks must be connected, for jobs whose launcher does not say it."""
LINKS = ("shm", "tcp")


@dataclass(frozen=True)
class RankSpec:
    """One rank of a job, and what it must know of the others.

    Args:
        rank: this one.
        roles: the role of every rank; ranks of one role are neighbours.
        hosts: the host of every rank.
        job: names this run among all others on the machine.
        key: the secret of this run, as hexadecimal digits.
        watcher: the socket (an abstract name) of the watcher of this rank's host.
        link: how ranks of one host exchange tensors: "shm" or "tcp".
        bind: the address to listen on for ranks of other hosts.
        deadline: seconds until all ranks must be connected.
        checks_lending: check that tensors are not written while they are in flight; slow, for tests.
        spares: how many of the workers, the last ones, are not started with the job.
        session: how often this process has joined before.
        records: whether the launcher takes lines for the record of a script.
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
    session: int = 0
    records: bool = False

    def __post_init__(self) -> None:
        refuse_unless(self.link in LINKS, "link", self.link, " or ".join(LINKS))
        refuse_unless(0 <= self.rank < len(self.roles), "rank", self.rank, f">= 0 and < {len(self.roles)}")

    @property
    def size(self) -> int:
        return len(self.roles)

    @property
    def pending_ranks(self) -> range:
        """The spare workers: they join later, or never."""
        if not self.spares:
            return range(0)
        end = self.roles.index("worker") + self.roles.count("worker")
        return range(end - self.spares, end)

    @property
    def host(self) -> int:
        return self.hosts[self.rank]

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self.key)

    def listener(self, rank: int) -> str:
        """The socket (an abstract name) on which a rank of this host listens for its peers."""
        return f"mh-{self.job}-{self.session}-rank-{rank}"

    def of(self, rank: int) -> RankSpec:
        """The spec of another rank of the same host."""
        return replace(self, rank=rank)

    def environment(self) -> dict[str, str]:
        """Environment variables that carry this spec, and those of torchrun, which the script may use."""
        local = [rank for rank, host in enumerate(self.hosts) if host == self.host]
        return {
            VARIABLE: json.dumps(asdict(self)),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(local.index(self.rank)),
            "LOCAL_WORLD_SIZE": str(len(local)),
        }


def from_environment(environment: Mapping[str, str] | None = None) -> RankSpec | None:
    """The spec that our launcher left in the environment; None if it did not start this process."""
    text = (os.environ if environment is None else environment).get(VARIABLE)
    if text is None:
        return None
    try:
        fields = json.loads(text)
        return RankSpec(**{**fields, "roles": tuple(fields["roles"]), "hosts": tuple(fields["hosts"])})
    except (ValueError, TypeError, KeyError) as error:
        raise Refused(f"{VARIABLE} does not describe a rank: {error}") from None


def join_timeout(chosen: float | None = None) -> float:
    """Seconds until all ranks must be connected: the chosen number, else the variable's, else 60."""
    name, text = (
        ("the join timeout", str(chosen)) if chosen is not None else (JOIN_TIMEOUT, os.environ.get(JOIN_TIMEOUT))
    )
    try:
        seconds = float(text or 60.0)
    except ValueError:
        seconds = math.nan
    refuse_unless(0 < seconds < math.inf, name, text, "a number of seconds > 0")
    return seconds


def role_of_each(roles: Mapping[str, int], spares: int = 0) -> tuple[str, ...]:
    """The role of every rank, for a map of roles with counts in rank order; spares are more workers, behind the others.

    >>> role_of_each({"worker": 2, "server": 1}, spares=1)
    ('worker', 'worker', 'worker', 'server')
    """
    for role, count in roles.items():
        refuse_unless(count >= 0, f"{role}s", count, ">= 0")
    refuse_unless(sum(roles.values()) >= 1, "the number of ranks", sum(roles.values()), ">= 1")
    refuse_unless(spares >= 0, "spares", spares, ">= 0")
    refuse_unless(not spares or roles.get("worker", 0) > 0, "spares", spares, "0 in a run without workers")
    return tuple(role for role, count in roles.items() for _ in range(count + (spares if role == "worker" else 0)))


def worker_server_roles(workers: int, servers: int = 0) -> dict[str, int]:
    """The roles of a run that has only workers and servers."""
    refuse_unless(workers >= 1, "workers", workers, ">= 1")
    refuse_unless(servers >= 0, "servers", servers, ">= 0")
    return {"worker": workers, "server": servers}


def rank_specs(
    roles: Mapping[str, int],
    *,
    hosts: tuple[int, ...] | None = None,
    link: str = "shm",
    bind: str = "127.0.0.1",
    deadline: float | None = None,
    checks_lending: bool = False,
    spares: int = 0,
    records: bool = False,
) -> list[RankSpec]:
    """The ranks of a new job on this machine; with "tcp" every rank is its own host, unless `hosts` is given."""
    each, job = role_of_each(roles, spares), secrets.token_hex(6)
    first = RankSpec(
        rank=0,
        roles=each,
        hosts=hosts or (tuple(range(len(each))) if link == "tcp" else (0,) * len(each)),
        job=job,
        key=secrets.token_hex(32),
        watcher=f"mh-{job}-watcher",
        link=link,
        bind=bind,
        deadline=join_timeout(deadline),
        checks_lending=checks_lending,
        spares=spares,
        records=records,
    )
    return [first.of(rank) for rank in range(first.size)]

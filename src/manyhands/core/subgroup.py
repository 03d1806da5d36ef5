"""Subgroup: some ranks of a job, seen as a job of their own.

    job          rank 0    rank 1    rank 2    rank 3    rank 4 (server)
    "part1"                rank 0              rank 1    rank 2

It has the whole interface of a `Transport`: ranks are counted within the group; tags, shared memories and locks carry
the name of the group, so that groups on the same ranks do not interfere. Losses of other ranks are not reported.

A `PeerLost` raised here has the rank within the group, for the method that runs in it, and names the rank of the job.
Where the group's program ends, `as_job_ranks` turns it back into an error of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError, PeerLost
from manyhands.core.port import ANY, Activity, Collective, Message, Meta, ReduceOp, Tag, Transport


@contextmanager
def as_job_ranks() -> Iterator[None]:
    """Errors that leave this block name the ranks of the job, also as attributes."""
    try:
        yield
    except PeerLost as loss:
        raise loss.of_job() from None


class SubgroupMessage:
    """A message whose sender and tag are those of the group."""

    __slots__ = ("_message", "frm", "meta", "tag", "tensors")

    def __init__(self, message: Message, frm: int, tag: Tag) -> None:
        self._message = message
        self.frm = frm
        self.tag = tag
        self.meta: Meta = message.meta
        self.tensors: tuple[Tensor, ...] = message.tensors

    def release(self) -> None:
        self._message.release()

    def keep(self) -> tuple[Tensor, ...]:
        return self._message.keep()


class Subgroup:
    """A transport over some ranks of another one.

    Args:
        transport: that of the job, on one of the ranks.
        ranks: the ranks of the group, workers first.
        name: distinguishes this group from others; the same on all its ranks.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int], name: str) -> None:
        self._t = transport
        self.ranks = list(ranks)
        """The ranks of the job, by their index in the group."""
        self._name = name
        self._index = {rank: index for index, rank in enumerate(self.ranks)}
        self._tags: dict[Tag, Tag] = {}
        self.rank, self.size = self._index[transport.rank], len(self.ranks)
        self.role, self.host, self.is_simulated = transport.role, transport.host, transport.is_simulated
        self.hosts: Sequence[int] = [transport.hosts[rank] for rank in self.ranks]
        self.roles: Sequence[str] = [transport.roles[rank] for rank in self.ranks]
        self.pending_ranks: Collection[int] = [
            self._index[rank] for rank in transport.pending_ranks if rank in self._index
        ]

    @property
    def bytes_sent(self) -> int:
        """Those of the rank in all groups together."""
        return self._t.bytes_sent

    # -- messages ---------------------------------------------------------------------------------

    def send(self, to: int, tag: Tag, meta: Meta = (), tensors: Sequence[Tensor] = (), *, latest: bool = False) -> None:
        self._t.send(self.ranks[to], self._own(tag), meta, tensors, latest=latest)

    def recv(self, *tags: Tag, frm: int = ANY, timeout: float | None = None) -> Message | None:
        sender = ANY if frm == ANY else self.ranks[frm]
        own = [self._own(tag) for tag in tags]
        ends = None if timeout is None else self._t.now() + timeout
        while True:
            left = None if ends is None else max(0.0, ends - self._t.now())
            try:
                message = self._t.recv(*own, frm=sender, timeout=left)
            except PeerLost as loss:
                if loss.rank in self._index:
                    raise self._translated(loss) from None
                continue  # a rank of another group
            return None if message is None else self._message(message)

    def _message(self, message: Message) -> SubgroupMessage:
        name = message.tag.name.removesuffix(f":{self._name}")
        return SubgroupMessage(message, self._index[message.frm], message.tag._replace(name=name))

    def _own(self, tag: Tag) -> Tag:
        """The group's own tag: what follows a colon in a name may be chosen freely."""
        found = self._tags.get(tag)
        if found is None:
            found = tag._replace(name=f"{tag.name}:{self._name}")
            if len(self._tags) < TAGS:
                self._tags[tag] = found
        return found

    def _translated(self, loss: PeerLost) -> PeerLost:
        return PeerLost(self._index[loss.rank], loss.why, job_rank=loss.job_rank)

    # -- memory, activities, time -----------------------------------------------------------------

    def slot(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._t.slot(numel, dtype)

    def shared(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        return self._t.shared(f"{self._name}/{name}", numel, dtype)

    def lock(self, name: str) -> AbstractContextManager[None]:
        return self._t.lock(f"{self._name}/{name}")

    def spawn(self, activity: Callable[[], None], *, daemon: bool = False) -> Activity:
        def run() -> None:
            with as_job_ranks():
                activity()

        run.__name__ = getattr(activity, "__name__", "activity")
        return self._t.spawn(run, daemon=daemon)

    def charge_compute(self, seconds: float) -> None:
        self._t.charge_compute(seconds)

    def charge_copy(self, nbytes: int) -> None:
        self._t.charge_copy(nbytes)

    def flush(self) -> None:
        self._t.flush()

    def leave(self) -> None:
        self._t.leave()

    def fail_as_lost(self, why: str) -> NoReturn:
        self._t.fail_as_lost(why)

    def now(self) -> float:
        return self._t.now()

    def waited(self) -> float:
        return self._t.waited()

    def sending(self) -> float:
        return self._t.sending()

    def peers(self, role: str | None = None) -> Sequence[int]:
        present = set(self._t.peers(role))
        return [index for index, rank in enumerate(self.ranks) if rank in present]

    def collective(self, group: Sequence[int]) -> Collective:
        if self.rank not in group:
            raise ManyhandsError(f"rank {self.rank} is not in the group {list(group)}")
        return SubgroupCollective(self, self._t.collective([self.ranks[index] for index in group]))

    @contextmanager
    def own_ranks(self) -> Iterator[None]:
        """Losses that are raised in here have the ranks of the group."""
        try:
            yield
        except PeerLost as loss:
            raise self._translated(loss) from None


TAGS = 10_000
"""So many tags are kept; the keys of a long run are more."""


class SubgroupCollective:
    """The job's collective over some ranks of a group."""

    def __init__(self, group: Subgroup, inner: Collective) -> None:
        self._group, self._inner = group, inner

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        with self._group.own_ranks():
            self._inner.all_reduce(x, op)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        with self._group.own_ranks():
            return self._inner.reduce_scatter(x)

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        with self._group.own_ranks():
            self._inner.all_gather(mine, out)

    def broadcast(self, x: Tensor, root: int) -> None:
        with self._group.own_ranks():
            self._inner.broadcast(x, self._group.ranks[root])

    def all_to_all(self, xs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        with self._group.own_ranks():
            self._inner.all_to_all(xs, outs)

    def barrier(self) -> None:
        with self._group.own_ranks():
            self._inner.barrier()

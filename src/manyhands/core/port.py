"""The port: the protocols by which ranks communicate. A method is written against these and nothing else.

`Transport` has two implementations: real processes and a virtual cluster. What a method may rely on in both:

order      messages from one rank to another arrive in the order sent, whatever their tag or size
matching   a message answers a receive whose tag has the same name and key; credit and carries do not matter
ownership  `send` lends its tensors until the receiver calls `release()` or `keep()`; a channel (receiver
           and tag name) has a credit, and `send` waits only when that is used up
loss       a lost peer is an event: `recv(frm=k)` raises `PeerLost` once k's queued messages are read,
           `recv()` from ANY once per activity and lost rank; what is sent to a lost rank is dropped
hooks      inside a backward pass a rank may send, but never wait
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

REFERENCE_FLOPS = 50e9
"""Floating-point operations per second of a reference core: one of speed 1."""

REFERENCE_BYTES = 8e9
"""Bytes per second that a reference core copies, adds or encodes."""

ANY = -1
"""Receive the first message of any rank."""

Meta = tuple[Any, ...]
"""The metadata of a message: numbers and strings."""

ReduceOp = Literal["sum", "max"]
"""How a collective combines the elements of all ranks."""


class _Tag(NamedTuple):
    name: str
    key: int
    credit: int
    carries: str


class Tag(_Tag):
    """The kind of a message. `key` distinguishes messages of one kind (by mini-batch, by round).

    `carries` limits its tensors: "nothing", "floats" (vectors of floating-point numbers), "vectors" (of any numbers) or
    "tensors" (of any shape). A real link accepts only tags that this process has created before, and only what they may
    carry, so create tags at the top of a file. What follows a colon in a name may be chosen later.
    """

    __slots__ = ()

    def __new__(cls, name: str, key: int = 0, credit: int = 2, carries: str = "tensors") -> Tag:
        KNOWN_TAGS[name] = carries
        return super().__new__(cls, name, key, credit, carries)

    def of(self, key: int) -> Tag:
        """The same tag with another key."""
        name, _, credit, carries = self
        return tuple.__new__(Tag, (name, key, credit, carries))

    def __str__(self) -> str:
        return f"{self.name}[{self.key}]" if self.key else self.name


KNOWN_TAGS: dict[str, str] = {}
"""The names of all tags that this process has created, and what they may carry."""


def tag_from_wire(name: str, key: int, credit: int) -> Tag:
    """The tag of a message from another process; unlike `Tag`, it does not make the name known here."""
    return tuple.__new__(Tag, (name, key, credit, carried_by(name) or "nothing"))


def carried_by(name: str) -> str | None:
    """What a tag of this name may carry; None if this process has created no such tag."""
    return KNOWN_TAGS.get(name) or KNOWN_TAGS.get(name.partition(":")[0])


def matches(tag: Tag, wanted: Sequence[Tag]) -> bool:
    """Whether a message with this tag answers a receive of `wanted`: name and key decide, credit and carries do not.

    Both worlds use this one rule. An equal tag is the usual case and is found without a loop in Python.
    """
    if tag in wanted:
        return True
    key, name = tag.key, tag.name
    for one in wanted:  # noqa: SIM110 - `any` would make a generator for every message that does not match
        if one.key == key and one.name == name:
            return True
    return False


def overlap(some: Sequence[Tag], others: Sequence[Tag]) -> bool:
    """Whether one message could answer a receive of `some` and a receive of `others`."""
    return any(matches(tag, others) for tag in some)


class Message(Protocol):
    """A received message; its tensors belong to the sender, who waits for `release` or `keep` to reuse them."""

    frm: int
    tag: Tag
    meta: Meta
    tensors: tuple[Tensor, ...]

    def release(self) -> None:
        """Give the tensors and the credit back to the sender; a second call does nothing."""

    def keep(self) -> tuple[Tensor, ...]:
        """Copy the tensors, release the message, return the copies."""


class Activity(Protocol):
    """A program that a rank runs beside its main program."""

    def join(self) -> None:
        """Wait until the activity has ended."""


class Collective(Protocol):
    """Operations in which every rank of a group takes part, for one activity at a time.

    All ranks of the group make the same calls in the same order. A vector is a contiguous row of floats or integers,
    also an empty one, with the same length and dtype on every rank; `even_spans` says which span of it belongs to which
    rank. On return every argument may be written, and a lost rank raises `PeerLost`. A result has the same bits on all
    ranks that get it, except for the `native` one among real processes.
    """

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        """Replace `x` by the sum, or the element-wise maximum, of all ranks' `x`; the maximum of a NaN is undefined."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's span of the sum of all ranks' `x`, in new memory; `x` is not changed."""

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        """Fill `out` with every rank's `mine`: its span of `out`, which `mine` may be itself."""

    def broadcast(self, x: Tensor, root: int) -> None:
        """Replace `x` by that of rank `root`."""

    def all_to_all(self, xs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Send `xs[j]` to the j-th rank of the group and receive `outs[i]` from the i-th.

        Lengths may differ, also be 0, as long as `xs[j]` on rank i is as long as `outs[i]` on rank j; `outs` share no
        memory with `xs`.
        """

    def barrier(self) -> None:
        """Wait until every rank of the group has called this."""


def even_spans(numel: int, parts: int) -> list[slice]:
    """A vector cut into spans whose lengths differ by at most 1; some are empty if `numel < parts`."""
    return [slice(numel * index // parts, numel * (index + 1) // parts) for index in range(parts)]


class Transport(Protocol):
    """How one rank communicates with all others. A contract suite tests every promise in both worlds."""

    rank: int
    size: int
    role: str
    host: int
    hosts: Sequence[int]
    """The host of every rank."""
    roles: Sequence[str]
    """The role of every rank: workers first, then servers."""
    pending_ranks: Collection[int]
    """Workers that are absent when the job begins: they join later, or never. Until then they count as gone."""
    is_simulated: bool
    """Whether time is virtual: computing takes none by itself, and `charge_compute` makes it pass."""

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensors this rank has sent to others."""

    def send(self, to: int, tag: Tag, meta: Meta = (), tensors: Sequence[Tensor] = (), *, latest: bool = False) -> None:
        """Lend `tensors` to rank `to`. With `latest` an unread message of this channel is replaced."""

    def recv(self, *tags: Tag, frm: int = ANY, timeout: float | None = None) -> Message | None:
        """The first message that matches one of `tags`, from rank `frm`; None when `timeout` seconds have passed."""

    def slot(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory that a peer of this host can read in place."""

    def shared(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory that all ranks of this host share under this name."""

    def lock(self, name: str) -> AbstractContextManager[None]:
        """A mutex of this host, freed when its holder dies."""

    def spawn(self, activity: Callable[[], None], *, daemon: bool = False) -> Activity:
        """Run `activity` beside the main program. The job does not wait for a daemon to end."""

    def charge_compute(self, seconds: float) -> None:
        """Occupy a core of this host for `seconds` of a reference core; in real processes this does nothing."""

    def charge_copy(self, nbytes: int) -> None:
        """Occupy a core for as long as a reference core copies, adds or encodes that many bytes."""

    def flush(self) -> None:
        """Wait until everything sent has left this rank."""

    def leave(self) -> None:
        """A clean exit, once this rank's own activities have ended: from now on it is neither alive nor lost."""

    def fail_as_lost(self, why: str) -> NoReturn:
        """End this rank here as if it had died: the others see its loss, with this reason."""

    def now(self) -> float:
        """Seconds since the job began."""

    def waited(self) -> float:
        """Seconds the main program of this rank has waited for others."""

    def sending(self) -> float:
        """Seconds the main program of this rank has spent in `send`; waiting for credit is part of them."""

    def peers(self, role: str | None = None) -> Sequence[int]:
        """The other ranks that are neither lost nor gone, in order."""

    def collective(self, group: Sequence[int]) -> Collective:
        """The world's native collectives over `group`."""


class Endpoint(Protocol):
    """Sends and receives: a `Transport`, or a wrapper of one."""

    def send(self, to: int, tag: Tag, meta: Meta = (), tensors: Sequence[Tensor] = ()) -> None:
        """As `Transport.send`, without `latest`."""

    def recv(self, *tags: Tag, frm: int = ANY) -> Message | None:
        """As `Transport.recv`, without a timeout."""


def recv(endpoint: Endpoint, *tags: Tag, frm: int = ANY) -> Message:
    """Receive without a timeout: the result is always a message."""
    message = endpoint.recv(*tags, frm=frm)
    assert message is not None
    return message


_graph_task = torch._C._current_graph_task_id


def inside_backward() -> bool:
    """Whether autograd is running on this thread: then a rank may send, but not wait."""
    return _graph_task() != -1


def on_one_host(transport: Transport, ranks: Sequence[int]) -> bool:
    """Whether these ranks are on the same host, where they can share memory."""
    first = transport.hosts[ranks[0]]
    return all(transport.hosts[rank] == first for rank in ranks)

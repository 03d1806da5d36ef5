"""The nouns of the house and their contracts. A method is written against these and nothing else.

The port is `Transport`. Two worlds stand behind it: real processes and a virtual cluster. What a
method may rely on in both:

order      messages from one rank to another arrive in the order sent, whatever their tag or size
ownership  `send` lends its tensors until the receiver calls `release()` or `keep()`; a lane (receiver
           and tag name) has a credit, and `send` waits only when that is used up
loss       a dead peer is an event: `recv(frm=k)` raises `PeerLost` once k's queued messages are read,
           `recv()` from ANY once per activity and lost rank; what is sent to a lost rank is dropped
hooks      inside a backward pass one may send, never wait
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from manyhands.core.worker import Worker

ANY = -1
"""Receive from whoever sends first."""

Meta = tuple[Any, ...]
"""The small part of a message: numbers and strings."""


class _Tag(NamedTuple):
    name: str
    key: int
    credit: int
    carries: str


class Tag(_Tag):
    """What a message is about. `key` tells messages of one kind apart (a mini-batch, a round).

    `carries` says what may come with it: "nothing", "floats" (vectors of floating-point numbers), "vectors" (of any
    numbers) or "tensors" (of any shape). A real link takes in only tags that exist here already and what they may
    carry, so make tags at the top of a file. What follows a colon in a name may be made up later.
    """

    __slots__ = ()

    def __new__(cls, name: str, key: int = 0, credit: int = 2, carries: str = "tensors") -> Tag:
        KNOWN_TAGS[name] = carries
        return super().__new__(cls, name, key, credit, carries)

    def of(self, key: int) -> Tag:
        """The same kind of message, for another key."""
        name, _, credit, carries = self
        return tuple.__new__(Tag, (name, key, credit, carries))

    def __str__(self) -> str:
        return f"{self.name}[{self.key}]" if self.key else self.name


KNOWN_TAGS: dict[str, str] = {}
"""The names of all tags of this process, and what they may carry."""


def made(name: str, key: int, credit: int) -> Tag:
    """A tag as it came in from another rank, which does not make it known here."""
    return tuple.__new__(Tag, (name, key, credit, carried_by(name) or "nothing"))


def carried_by(name: str) -> str | None:
    """What a tag of this name may carry; None if there is no such tag."""
    return KNOWN_TAGS.get(name) or KNOWN_TAGS.get(name.partition(":")[0])


class Message(Protocol):
    """What `recv` gives: the tensors belong to the sender until `release` or `keep`."""

    frm: int
    tag: Tag
    meta: Meta
    tensors: tuple[Tensor, ...]

    def release(self) -> None:
        """Give the tensors and the credit back to the sender; a second call does nothing."""

    def keep(self) -> tuple[Tensor, ...]:
        """Copy the tensors, release the message, return the copies."""


class Activity(Protocol):
    """Something a rank does beside its main program."""

    def join(self) -> None:
        """Wait until it has ended."""


class Collective(Protocol):
    """An operation in which every rank of a group takes part."""

    def all_reduce(self, x: Tensor) -> None:
        """Replace `x` by the sum of all ranks' `x`, in place."""


class Transport(Protocol):
    """One rank's way to all others. Every word of it is a contract tested in both worlds."""

    rank: int
    size: int
    role: str
    host: int
    hosts: Sequence[int]
    """The host of every rank."""
    roles: Sequence[str]
    """The role of every rank: workers first, then servers."""
    late: Collection[int]
    """Workers that are not there when the job begins: they come later, or never. Until then they are gone."""
    bytes_sent: int
    """Bytes of tensors this rank has sent to others."""
    plays: bool
    """Whether computing takes no time here by itself and has to be played with `spend`."""

    def send(self, to: int, tag: Tag, meta: Meta = (), tensors: Sequence[Tensor] = (), *, latest: bool = False) -> None:
        """Lend `tensors` to rank `to`. With `latest` an unread message of this lane is replaced."""

    def recv(self, *tags: Tag, frm: int = ANY, timeout: float | None = None) -> Message | None:
        """The first message with one of `tags` from `frm`; None when `timeout` seconds have passed."""

    def slot(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory that a peer of this host can read in place."""

    def shared(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """One zeroed memory for all ranks of this host that ask for the same name."""

    def lock(self, name: str) -> AbstractContextManager[None]:
        """A mutex of this host, freed when its holder dies."""

    def spawn(self, activity: Callable[[], None], *, daemon: bool = False) -> Activity:
        """Run `activity` beside the main program. A daemon does not keep the job alive."""

    def spend(self, seconds: float, *, moving: bool = False) -> None:
        """Occupy a core for `seconds` of a reference core; `moving` says it moves bytes, not numbers."""

    def flush(self) -> None:
        """Wait until everything sent has left this rank."""

    def leave(self) -> None:
        """A clean exit, once this rank's own activities have ended: from now on it is neither alive nor lost."""

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


class Post(Protocol):
    """Where one sends and receives: a `Transport`, or something that stands in front of one."""

    def send(self, to: int, tag: Tag, meta: Meta = (), tensors: Sequence[Tensor] = ()) -> None:
        """As a transport does."""

    def recv(self, *tags: Tag, frm: int = ANY) -> Message | None:
        """As a transport does, without a timeout."""


def recv(post: Post, *tags: Tag, frm: int = ANY) -> Message:
    """What is received without a timeout is always a message."""
    message = post.recv(*tags, frm=frm)
    assert message is not None
    return message


def on_one_host(transport: Transport, ranks: Sequence[int]) -> bool:
    """Whether these ranks share memory."""
    first = transport.hosts[ranks[0]]
    return all(transport.hosts[rank] == first for rank in ranks)


class Standing(NamedTuple):
    """Where one worker stands at a shard when it wants to read."""

    clock: int
    slowest: int
    version: int
    waiting: bool
    """Whether a gradient of this worker is still pending."""


WAITING = Standing(clock=0, slowest=0, version=0, waiting=True)
"""That of a worker whose gradient has not been applied yet."""


class Consistency(Protocol):
    """When do workers agree? A few yes/no questions that a shard asks."""

    merges: ClassVar[bool]
    """Whether pending gradients make one update (their mean) or one update each."""
    bounds_clocks: ClassVar[bool]
    """Whether the lag it speaks of is the gap between clocks (else the age of a gradient in versions)."""
    tolerates_loss: ClassVar[bool]

    @property
    def scope(self) -> Literal["shard", "job"]:
        """Whether every shard decides for itself, or the first one for all: whose gradients are the next update."""

    def ready(self, pending: int, alive: int) -> bool:
        """May the pending gradients be applied? `alive` counts whoever may have one pending."""

    def admit(self, me: Standing) -> bool:
        """May this worker read now?"""


@runtime_checkable
class Picks(Protocol):
    """A consistency that depends on how many workers there are, and may not take every gradient."""

    def among(self, workers: int) -> Consistency:
        """The same for that many workers; refused if it makes no sense with them."""

    def accept(self, lag: int, again: bool) -> bool:
        """May a gradient take part that is this stale, and whose worker may have one pending already?"""

    def most(self, workers: int) -> int:
        """How many gradients may be pending together."""


State = dict[str, Tensor]
"""What a rule remembers: tensors shaped like the weights, so that they can be cut like them."""


@dataclass(slots=True)
class At:
    """Where and when a rule is applied."""

    weights: Tensor
    state: State = field(default_factory=dict)
    updates: int = 1
    """Which update of these weights this is, from 1."""
    samples: int = 0
    """Samples the job has consumed so far: schedules are functions of this."""
    lag: int = 0
    """Staleness: updates of these weights since its worker read them, not counting this one."""
    rank: int = 0
    """Whose gradient it is, counted among the workers; of several merged ones the lowest."""
    count: int = 1
    """Of how many gradients this one is the mean, or the sum where nothing is merged."""
    workers: int = 1
    """How many workers bring gradients to these weights, each when it suits it or all together."""
    seen: Tensor | None = None
    """The weights the gradient was computed at, if the rule needs them."""
    rate: float = 1.0
    """What a method multiplies the learning rate with."""


class Rule(Protocol):
    """How is an update applied? A function from gradient to step, living where the weights live."""

    elementwise: bool
    """Whether the weights may be cut anywhere without changing the result."""
    needs: frozenset[str]
    """What it cannot do without: "seen" (the weights a gradient was computed at), "owner" (it remembers things
    itself, so one process must apply all updates)."""

    def init(self, weights: Tensor) -> State:
        """The fresh state for these weights."""

    def __call__(self, g: Tensor, at: At) -> Tensor | None:
        """The step to add to `at.weights`; None if the rule has moved them itself. May overwrite `g`."""


@runtime_checkable
class Chooses(Protocol):
    """A rule that is another one for some of the parameters (see core/choosing.py)."""

    def kind(self, parameter: str) -> Hashable:
        """Which kind of parameter this is; those of one kind have the same rule."""

    def chosen(self, kind: Any) -> Rule:
        """The rule for all parameters of a kind."""

    def check(self, parameters: Iterable[str]) -> None:
        """Refuse to make a difference that no parameter of this model would feel."""


Payload = Sequence[Tensor]
"""What travels instead of a vector."""


class Codec(Protocol):
    """What do workers send? Knobs only; whatever it remembers lies in parameter coordinates, cut by span.

    What is random in it follows from torch's default generator, which whoever encodes has seeded (core/sending.py).
    """

    @property
    def by_parameter(self) -> bool:
        """Whether it wants every parameter by itself, in its own shape; else it takes any stretch, as a plain row."""

    def memory(self, like: Tensor) -> Tensor | None:
        """The zeroed memory for a row like this one, if it remembers anything: a row, or several.

        The first is what has not been sent yet: whatever is added to it is sent later.
        """

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """What travels instead of `x`, which must be finite and stays as it is; updates `memory` in place."""

    def decode(self, payload: Payload, out: Tensor) -> None:
        """Write what the receiver makes of it into `out`; refused if it cannot have been made for something like it."""

    def nbytes(self, like: Tensor) -> int:
        """How many bytes travel for something like this; about, if that depends on the numbers (see `Varies`)."""


@runtime_checkable
class Varies(Protocol):
    """A codec whose payload is larger for some numbers than for others."""

    def most(self, like: Tensor) -> int:
        """How many bytes it has at most."""


@runtime_checkable
class Sparse(Protocol):
    """A codec that keeps only some numbers."""

    def pairs(self, payload: Payload) -> tuple[Tensor, Tensor]:
        """Where they stand (int32, ascending), and what they are."""


@runtime_checkable
class Warms(Protocol):
    """A codec that is another one at the beginning of a run; it decodes what any of them has made."""

    def at(self, step: int) -> Codec:
        """What encodes in this step of a worker."""


@runtime_checkable
class Shares(Protocol):
    """A codec with a scale that may be the same on all workers: the largest of theirs, if they tell each other first.

    By parameter it has one for each of them.
    """

    @property
    def shared(self) -> bool:
        """Whether it asks for that."""

    def scale(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """The scale that `encode` would take, one number; without its value if `x` has no values. Changes nothing."""

    def encode_at(self, x: Tensor, memory: Tensor | None, scale: Tensor) -> tuple[Tensor, ...]:
        """As `encode`, with a scale that is not less than the own one."""


def shares(codec: object) -> TypeGuard[Shares]:
    """Whether a codec asks that all workers have one scale."""
    return isinstance(codec, Shares) and codec.shared


@runtime_checkable
class Rounds(Protocol):
    """A codec that sends every number, if not all of its digits, and remembers nothing: it will do for weights too.

    Of others only gradients, and sums of them, are what they were: what is left out of a vector is 0 to the receiver.
    What it makes of a vector is one tensor.
    """

    def rounding(self, dtype: torch.dtype) -> float:
        """By which part of itself a number of this kind may change at most, if it is neither huge nor tiny."""


Batch = tuple[Tensor, ...]
Weights = Mapping[str, Tensor]


class Descent(NamedTuple):
    """A step of plain SGD that a model has computed and not made yet."""

    loss: Tensor
    touches: int
    """How many numbers `write` writes."""
    write: Callable[[float], None]
    """w_v <- w_v + scale g_v for those v that the mini-batch touches, in place; nothing else is read or written."""


@runtime_checkable
class Descends(Protocol):
    """A model that can go down some losses by itself, for it knows better than autograd what a mini-batch touches."""

    def can_descend(self, loss: Callable[..., Tensor] | None) -> bool:
        """Whether it knows the gradient of this loss (None: its own), and of all its weights as they are now."""

    def descend(self, *fields: Tensor) -> Descent:
        """Read the weights and compute what `loss(self(*fields), target)` and its gradient are; write nothing yet."""


class Strategy(Protocol):
    """One way of training: a dataclass of knobs with the loop of a worker.

    What only some need (`Checks`, `Notes`, `Divides`, `Finishes`, `Welcomes`, `Serves`, below) a strategy simply has or
    has not.
    """

    lockstep: ClassVar[bool]
    """Whether every worker takes the same number of steps (else they draw from one common budget)."""
    one_host: ClassVar[bool]
    """Whether it works only among ranks that share memory."""

    def setup(self, w: Worker) -> None:
        """Make this rank's state; all of it is listed here."""

    def step(self, w: Worker, batch: Batch) -> float | None:
        """Consume one mini-batch; return the newest known loss."""

    def answer(self, w: Worker) -> Weights | None:
        """The weights to evaluate and save, on the leading rank; every worker takes part."""


@runtime_checkable
class Looks(Protocol):
    """A strategy whose weights can be read between two steps of all workers without anybody resting."""

    @property
    def looks(self) -> bool:
        """Whether they can with these knobs."""

    def look(self, w: Worker) -> Weights:
        """The weights to evaluate; only one worker calls it, while no other is in a step."""


@runtime_checkable
class Applies(Protocol):
    """A strategy that moves the weights by a rule."""

    rule: Rule


@runtime_checkable
class Checks(Protocol):
    """A strategy that cannot work with everything."""

    def check(self, workers: int, servers: int, batch_size: int, model: torch.nn.Module) -> None:
        """Refuse what cannot work, before anything is started."""


@runtime_checkable
class Remarks(Protocol):
    """A strategy that does not do quite what its knobs say."""

    def remarks(self, steps: int) -> Sequence[str]:
        """What one should know about a run of that many steps."""


@runtime_checkable
class Notes(Protocol):
    """A strategy that decides something on the way."""

    def notes(self) -> Mapping[str, Any]:
        """What it has decided in the last step, for the record; mostly nothing."""


@runtime_checkable
class Divides(Protocol):
    """A strategy whose workers do not hold a whole model each."""

    def replicas(self, workers: int) -> int:
        """How many copies of the whole model these workers hold together."""


@runtime_checkable
class Draws(Protocol):
    """A strategy that may want its workers to see any sample, instead of a share of their own each."""

    draws_from_all: bool


@runtime_checkable
class Finishes(Protocol):
    """A strategy that has something in flight between steps."""

    def finish(self, w: Worker) -> None:
        """Hand it over, at the end of the run."""


@runtime_checkable
class Welcomes(Protocol):
    """A strategy to which a worker may come when the others are under way."""

    @property
    def welcomes(self) -> bool:
        """Whether it may with these knobs."""

    def arrive(self, w: Worker) -> None:
        """Go on from where the others are: the newcomer only, right after `setup`."""


@runtime_checkable
class Serves(Protocol):
    """A strategy that has work for server ranks."""

    def serve(self, w: Worker) -> None:
        """The main program of a server rank."""


# -- what a checkpoint needs ---------------------------------------------------------------------------

Saved = dict[str, Tensor]
"""State by name, in the coordinates of the parameters, so that another number of ranks can go on from it."""


@runtime_checkable
class Remembers(Protocol):
    """A rule that keeps its memory itself ("owner" in `needs`), beside its state, and can hand it over."""

    def memory_of(self, weights: Tensor) -> State:
        """What it remembers of these weights; what is not shaped like them cannot be cut."""

    def remember(self, weights: Tensor, state: State) -> None:
        """Remember this of these weights; refused if it never remembers such things."""


@runtime_checkable
class Saves(Protocol):
    """A strategy whose runs can be saved and resumed."""

    def state(self, w: Worker) -> Saved | None:
        """All that `answer` does not tell, on the leading rank; every worker takes part, and everyone rests."""

    def restore(self, w: Worker, saved: Saved) -> None:
        """Go on from it: every worker, right after `setup` with the saved answer as the model's weights."""


@runtime_checkable
class Rests(Protocol):
    """A strategy that cannot be saved between any two steps."""

    def rest(self, w: Worker) -> None:
        """Finish what is in flight, so that nothing moves any more once every worker has said so."""

    def go_on(self, w: Worker) -> None:
        """Begin again, as a resumed run would."""

"""Holding: a stretch of weights together with the rule that moves it. Updates happen here and nowhere else.

A replica, a shard or a centre holds its weights in such stretches. An update is

    w <- w + rule(g)          g: one gradient, or the mean of several

on the whole stretch at once, or parameter by parameter when some were untouched in this step or the
rule needs whole tensors. How often each parameter was updated is counted here, since after a skipped
update the counts differ (Adam's bias correction, as in torch, goes by the parameter).

A rule reads and writes its tensors several times. Since memory is slower than arithmetic, an update walks
through the stretch in blocks that stay in the cache meanwhile, so that memory is passed over once:

    w      [ ....... | ....... | ....... | ... ]
    g      [ ....... | ....... | ....... | ... ]        block by block: mean, rule, add
    state  [ ....... | ....... | ....... | ... ]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, MutableSequence, Sequence
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from manyhands.core.choosing import rule_for
from manyhands.core.errors import Refused
from manyhands.core.flat import Flat, Place, Span
from manyhands.core.native import stream
from manyhands.core.protocols import At, Rule, State

Allocate = Callable[[str, Tensor], Tensor]
"""Where state lives: given a name and a fresh tensor, gives the tensor to use."""

BLOCK_BYTES = 2**20
"""Of one tensor: a few such blocks fit the cache of a core. Always a multiple of 64 numbers, so that torch's
vectorised loops round a block as they round the whole."""

ALL = slice(None)
"""The stretch as it is: a small one should not pay for views of itself."""

Block = tuple[slice, torch.Size | None, State, int]
"""Where it lies, its shape if not flat, its state, and which update of it this is."""


@runtime_checkable
class Moves(Protocol):
    """A rule that can also move weights by itself in one pass over memory, to the same last bit."""

    def can_move(self, weights: Tensor) -> bool:
        """Whether it can with its knobs and these weights."""

    def move(self, g: Tensor, at: At, into: Tensor | None) -> None:
        """w <- w + rule(g), and a copy of it `into` other memory; `g` is only read."""


@runtime_checkable
class Skips(Protocol):
    """A rule for which no gradient may mean no step, so that a sparse gradient need touch nothing but its rows.

    That asks for a rule whose memory stays as it is without a gradient: what fades, decays or is averaged moves with
    every update, gradient or not.
    """

    def can_skip(self) -> bool:
        """Whether it may with its knobs."""


def skips(rule: Rule) -> bool:
    """Whether no gradient is no step."""
    return isinstance(rule, Skips) and rule.can_skip()


@runtime_checkable
class Scales(Protocol):
    """A rule whose step, if it may skip, is the gradient times a number and nothing more."""

    def scale(self, at: At) -> float:
        """That number: -eta."""


def scales(rule: Rule) -> bool:
    """Whether a step is the gradient times a number, so that somebody else can make it."""
    return skips(rule) and isinstance(rule, Scales)


@runtime_checkable
class Corrects(Protocol):
    """A rule that begins with something that must look at each gradient by itself, before any mean."""

    corrects: bool
    """Whether it does with its knobs."""

    def correct(self, g: Tensor, at: At) -> Tensor:
        """What one gradient brings to the mean; may overwrite `g`."""

    def step(self, g: Tensor, at: At) -> Tensor | None:
        """The rest of the rule, applied to the mean."""


def corrects(rule: Rule) -> bool:
    """Whether a rule looks at each gradient by itself."""
    return isinstance(rule, Corrects) and rule.corrects


def _part(x: Tensor, cut: slice) -> Tensor:
    return x if cut is ALL else x[cut]


def _in_place(_: str, fresh: Tensor) -> Tensor:
    return fresh


class Holding:
    """Weights of one span, their rule's state, and their update counts.

    Args:
        span: where in the model this stretch lies.
        weights: the stretch itself; updated in place.
        places: the parameters of the model, to find those that reach into the span.
        rule: moves these weights; of one that chooses what it has chosen for them.
        allocate: memory for the state, if it is to be shared.
        counts: memory for the update counts, one per parameter in the span.
        knows_seen: whether updates say at which weights their gradients were computed.
    """

    def __init__(
        self,
        span: Span,
        weights: Tensor,
        places: Sequence[Place],
        rule: Rule,
        allocate: Allocate = _in_place,
        counts: MutableSequence[int] | None = None,
        knows_seen: bool = False,
    ) -> None:
        rule = rule_for(rule, [p.name for p in places if p.span.part == span.part])
        if "seen" in rule.needs and not knows_seen:
            raise Refused(
                f"{rule} needs the weights that each gradient was computed at, "
                "but only parameter servers that apply gradients one by one keep them"
            )
        self.span = span
        self.weights = weights
        self.rule = rule
        inside = [
            p for p in places if p.span.part == span.part and p.span.start < span.stop and p.span.stop > span.start
        ]
        self._segments = [
            (p.mark, max(p.span.start, span.start) - span.start, min(p.span.stop, span.stop) - span.start)
            for p in inside
        ]
        self._shapes = [torch.Size([-1]) if rule.elementwise else p.shape for p in inside]
        self.counts: MutableSequence[int] = [0] * len(inside) if counts is None else counts
        self._whole = rule.elementwise and "owner" not in rule.needs
        self._mover = rule if self._whole and isinstance(rule, Moves) and rule.can_move(weights) else None
        self._into: Sequence[Tensor] = ()
        self._each: list[tuple[At, Tensor | None]] = []
        self._block = BLOCK_BYTES // weights.element_size()
        if self._whole:
            self._states = [{} if weights.is_meta else self._fresh("", weights, allocate)]
        else:
            self._states = [
                self._fresh(f"{mark}.", weights[start:stop].view(shape), allocate)
                for (mark, start, stop), shape in zip(self._segments, self._shapes, strict=True)
            ]

    def _fresh(self, prefix: str, weights: Tensor, allocate: Allocate) -> State:
        return {name: allocate(prefix + name, value) for name, value in self.rule.init(weights).items()}

    @property
    def marks(self) -> list[int]:
        """The parameters (by mark) that reach into this span."""
        return [mark for mark, *_ in self._segments]

    @property
    def states(self) -> list[State]:
        """What the rule remembers here: of the whole stretch, or of one parameter after the other."""
        return self._states

    def forget(self) -> None:
        """Let the rule begin anew."""
        for number, state in enumerate(self._states):
            _, start, stop = (0, 0, self.weights.numel()) if self._whole else self._segments[number]
            weights = self.weights[start:stop] if self._whole else self.weights[start:stop].view(self._shapes[number])
            for name, value in self.rule.init(weights).items():
                state[name].copy_(value)
        for place in range(len(self.counts)):
            self.counts[place] = 0

    def segments(self) -> Iterator[tuple[int, int, Tensor, State]]:
        """Every parameter in this span: its mark, its start within the span, its weights and state."""
        for place, (mark, start, stop) in enumerate(self._segments):
            state = self._states[0 if self._whole else place]
            if self._whole:
                state = {name: value[start:stop] for name, value in state.items()}
            yield mark, start, self.weights[start:stop].view(self._shapes[place]), state

    def update(self, g: Tensor, at: At, untouched: Collection[int] = (), *, over: int = 1) -> None:
        """Apply the rule to `g`, a gradient or the sum of `over` of them, which may be overwritten."""
        self._apply([g], at, untouched, copies=False, over=over)

    def merge(
        self,
        gs: Sequence[Tensor],
        at: At,
        untouched: Collection[int] = (),
        into: Sequence[Tensor] = (),
        each: Sequence[At] = (),
        over: int | None = None,
    ) -> None:
        """Apply the rule to the mean of the gradients `gs`, summed in this order; they are only read.

        Where some are sums already, `over` says how many gradients that are. The weights are copied `into` other
        memories too, each block while it is still in the cache. One of them may be `at.seen`: a block of it has been
        read by then. A rule that corrects each gradient is told about `each`.
        """
        self._into = into if not untouched and self._whole else ()
        self._each = [(one, one.seen) for one in each]
        over = len(gs) if over is None else over
        self._apply(gs, at, untouched, copies=max(len(gs), over) > 1 or self._mover is None, over=over)
        if not self._into:
            for memory in into:
                memory.copy_(self.weights)
        self._into, self._each = (), []

    @torch.no_grad()
    def update_rows(self, mark: int, grad: Tensor, at: At) -> None:
        """Apply the rule to a sparse gradient of one parameter, coalesced: no other row is read or written."""
        place = self.marks.index(mark)
        _, start, stop = self._segments[place]
        rows, g = grad.indices()[0], grad.values()
        weights, *memory = (x[start:stop].view(-1, *g.shape[1:]) for x in (self.weights, *self._states[0].values()))
        self.counts[place] += 1
        at.weights, at.updates = weights[rows], self.counts[place]
        at.state = {name: x[rows] for name, x in zip(self._states[0], memory, strict=True)}
        step = self.rule(g, at)
        assert step is not None
        weights.index_add_(0, rows, step)
        for name, x in zip(self._states[0], memory, strict=True):
            x[rows] = at.state[name]

    def let(self, write: Callable[[float], None], at: At) -> None:
        """Let somebody who knows g write w <- w + scale g; only with a rule that scales."""
        assert isinstance(self.rule, Scales)
        for place in range(len(self.counts)):
            self.counts[place] += 1
        at.updates = self.counts[0]
        write(self.rule.scale(at))

    def _apply(self, gs: Sequence[Tensor], at: At, untouched: Collection[int], copies: bool, over: int = 1) -> None:
        if self.weights.is_meta:
            return
        if torch.is_grad_enabled():  # rarely: runs are without, and switching costs more than asking
            with torch.no_grad():
                return self._apply(gs, at, untouched, copies, over)
        seen = at.seen
        walks = copies or over > 1 or self._mover is None or bool(self._into)
        size = self._block if walks else self.weights.numel()
        for block in self._blocks(untouched, size):
            cut, shape, *_ = block
            self._place(at, seen, block)
            g = self._sum(gs, block) if copies else _part(gs[0], cut)
            if over > 1:
                g.div_(over)
            self._step(g if shape is None else g.view(shape), at, [_part(memory, cut) for memory in self._into])

    def _place(self, at: At, seen: Tensor | None, block: Block) -> None:
        """Let `at` speak of one block."""
        cut, shape, at.state, at.updates = block
        at.weights = _part(self.weights, cut)
        at.seen = None if seen is None else _part(seen, cut)
        if shape is not None:
            at.weights = at.weights.view(shape)
            at.seen = None if at.seen is None else at.seen.view(shape)

    def _step(self, g: Tensor, at: At, into: list[Tensor]) -> None:
        if self._mover is not None:
            self._mover.move(g, at, into[0] if into else None)
            into = into[1:]
        else:
            step = self.rule.step(g, at) if self._each and isinstance(self.rule, Corrects) else self.rule(g, at)
            if step is not None:
                at.weights.add_(step)
        for memory in into:
            stream(at.weights, memory)

    def _blocks(self, untouched: Collection[int], size: int) -> Iterator[Block]:
        """What is to be updated: blocks of at most `size` numbers, or whole tensors if the rule needs them."""
        for place, start, stop, updates in self._counted(untouched):
            if not self._whole:
                yield slice(start, stop), self._shapes[place], self._states[place], updates
            elif stop - start == self.weights.numel() <= size:
                yield ALL, None, self._states[0], updates
            else:
                for begin in range(start, stop, size):
                    cut = slice(begin, min(begin + size, stop))
                    yield cut, None, {name: value[cut] for name, value in self._states[0].items()}, updates

    def _counted(self, untouched: Collection[int]) -> Iterator[tuple[int, int, int, int]]:
        """Place, start, stop and number of this update: of everything if it has one number, else of each parameter."""
        counts = self.counts
        if not untouched and self._whole and counts[1:] == counts[:-1]:
            updates = counts[0] + 1 if counts else 1
            for place in range(len(counts)):
                counts[place] = updates
            yield 0, 0, self.weights.numel(), updates
            return
        for place, (mark, start, stop) in enumerate(self._segments):
            if mark not in untouched:
                counts[place] += 1
                yield place, start, stop, counts[place]

    def _sum(self, gs: Sequence[Tensor], block: Block) -> Tensor:
        """A block of the sum of gradients, in memory of our own."""
        if self._each:
            return self._sum_of_corrected(gs, block)
        cut = block[0]
        total = self._scratch if cut is ALL else self._scratch[: cut.stop - cut.start]
        if len(gs) == 1:
            return total.copy_(_part(gs[0], cut))
        torch.add(_part(gs[0], cut), _part(gs[1], cut), out=total)
        for g in gs[2:]:
            total.add_(_part(g, cut))
        return total

    def _sum_of_corrected(self, gs: Sequence[Tensor], block: Block) -> Tensor:
        """The same of gradients that are corrected one by one."""
        assert isinstance(self.rule, Corrects)
        cut, shape, *_ = block
        total: Tensor | None = None
        for g, (at, seen) in zip(gs, self._each, strict=True):
            self._place(at, seen, block)
            one = _part(g, cut).clone()
            one = self.rule.correct(one if shape is None else one.view(shape), at)
            total = one if total is None else total.add_(one)
        assert total is not None
        return total

    @cached_property
    def _scratch(self) -> Tensor:
        return torch.empty_like(self.weights[: self._block] if self._whole else self.weights)


def replica(flat: Flat, rule: Rule, weights: Sequence[Tensor] | None = None) -> list[Holding]:
    """A holding for every part of a model: its own weights, or other tensors of the same sizes."""
    held = weights or [part.weights for part in flat.parts]
    return [Holding(Span(number, 0, w.numel()), w, flat.parts[number].places, rule) for number, w in enumerate(held)]

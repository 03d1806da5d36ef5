"""WeightSlice: a slice of the flat weights together with the rule that updates it. All updates are made here.

A replica, a shard or a centre consists of such slices. An update is

    w <- w + rule(g)          g: one gradient, or the mean of several

of the whole slice at once, or parameter by parameter if some were not touched in this step or if the rule needs whole
tensors. Updates are counted per parameter, because the counts differ after a skipped update (Adam's bias correction, as
in torch, uses the count of the parameter).

A rule reads and writes its tensors several times. Because memory is slower than arithmetic, an update processes the
slice in blocks that fit the cache, so that each tensor is read from memory once:

    w      [ ....... | ....... | ....... | ... ]
    g      [ ....... | ....... | ....... | ... ]        block by block: mean, rule, add
    state  [ ....... | ....... | ....... | ... ]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, MutableSequence, Sequence
from functools import cached_property

import torch
from torch import Tensor

from manyhands.core.errors import Refused
from manyhands.core.flat import DtypeGroup, Flat, ParamSlot, Span
from manyhands.core.param_groups import rule_for
from manyhands.core.rule import Corrects, Moves, Rule, State, UpdateContext
from manyhands.core.vector_ops import VectorOps, stream

Allocate = Callable[[str, Tensor], Tensor]
"""Allocates the state: given a name and a new tensor, returns the tensor to use."""

BLOCK_BYTES = 2**20
"""The size of a block of one tensor: a few of them fit the cache of a core. Always a multiple of 64 elements, so that
torch's vectorised loops round a block as they round the whole tensor."""

ALL = slice(None)
"""The whole slice: a small one is used without making views."""

Block = tuple[slice, torch.Size | None, State, int]
"""The elements, their shape if the rule needs whole tensors, their state, and the number of this update."""


def _part(x: Tensor, cut: slice) -> Tensor:
    return x if cut is ALL else x[cut]


def _in_place(_: str, fresh: Tensor) -> Tensor:
    return fresh


class WeightSlice:
    """Weights of one span, their rule's state, and their update counts.

    Args:
        ops: the vector operations of the rank that updates; an update is one pass for each gradient.
        span: the position of the slice in the model.
        weights: the weights themselves; updated in place.
        slots: the parameters of the model, to find those that overlap the span.
        rule: updates these weights; of a rule that chooses by name, the one chosen for them.
        allocate: allocates the state, e.g. in shared memory.
        counts: memory for the update counts, one per parameter in the span.
        knows_seen: whether updates come with the weights at which their gradients were computed.
    """

    def __init__(
        self,
        ops: VectorOps,
        span: Span,
        weights: Tensor,
        slots: Sequence[ParamSlot],
        rule: Rule,
        allocate: Allocate = _in_place,
        counts: MutableSequence[int] | None = None,
        knows_seen: bool = False,
    ) -> None:
        rule = rule_for(rule, [p.name for p in slots if p.span.group == span.group])
        if "seen" in rule.needs and not knows_seen:
            raise Refused(
                f"{rule} needs the weights that each gradient was computed at, "
                "but only parameter servers that apply gradients one by one keep them"
            )
        self._ops = ops
        self.span = span
        self.weights = weights
        self.rule = rule
        inside = [
            p for p in slots if p.span.group == span.group and p.span.start < span.stop and p.span.stop > span.start
        ]
        self._segments = [
            (p.param_id, max(p.span.start, span.start) - span.start, min(p.span.stop, span.stop) - span.start)
            for p in inside
        ]
        self._shapes = [torch.Size([-1]) if rule.elementwise else p.shape for p in inside]
        self.counts: MutableSequence[int] = [0] * len(inside) if counts is None else counts
        self._whole = rule.elementwise and "owner" not in rule.needs
        self._mover = rule if self._whole and isinstance(rule, Moves) and rule.can_move(weights) else None
        self._into: Sequence[Tensor] = ()
        self._each: list[tuple[UpdateContext, Tensor | None]] = []
        self._block = BLOCK_BYTES // weights.element_size()
        if self._whole:
            self._states = [self._fresh("", weights, allocate)]
        else:
            self._states = [
                self._fresh(f"{param_id}.", weights[start:stop].view(shape), allocate)
                for (param_id, start, stop), shape in zip(self._segments, self._shapes, strict=True)
            ]

    def _fresh(self, prefix: str, weights: Tensor, allocate: Allocate) -> State:
        return {name: allocate(prefix + name, value) for name, value in self.rule.init(weights).items()}

    @property
    def param_ids(self) -> list[int]:
        """The ids of the parameters that overlap this span."""
        return [param_id for param_id, *_ in self._segments]

    @property
    def states(self) -> list[State]:
        """The rule's state: one of the whole slice, or one per parameter."""
        return self._states

    def forget(self) -> None:
        """Reset the rule's state and the update counts."""
        for number, state in enumerate(self._states):
            _, start, stop = (0, 0, self.weights.numel()) if self._whole else self._segments[number]
            weights = self.weights[start:stop] if self._whole else self.weights[start:stop].view(self._shapes[number])
            for name, value in self.rule.init(weights).items():
                state[name].copy_(value)
        for index in range(len(self.counts)):
            self.counts[index] = 0

    def segments(self) -> Iterator[tuple[int, int, Tensor, State]]:
        """Every parameter in this span: its id, its start within the span, its weights and state."""
        for index, (param_id, start, stop) in enumerate(self._segments):
            state = self._states[0 if self._whole else index]
            if self._whole:
                state = {name: value[start:stop] for name, value in state.items()}
            yield param_id, start, self.weights[start:stop].view(self._shapes[index]), state

    def update(self, g: Tensor, at: UpdateContext, untouched: Collection[int] = (), *, over: int = 1) -> None:
        """Apply the rule to `g`, a gradient or the sum of `over` of them, which may be overwritten."""
        self._apply([g], at, untouched, copies=False, over=over)

    def apply_sum(self, group: DtypeGroup, workers: int, samples: int) -> None:
        """Apply the rule to the mean of the gradient of a dtype group, which was summed over all workers."""
        at = UpdateContext(self.weights, samples=samples, count=workers)
        self.update(group.grad, at, group.untouched(), over=workers)

    def apply_mean(
        self,
        gs: Sequence[Tensor],
        at: UpdateContext,
        untouched: Collection[int] = (),
        into: Sequence[Tensor] = (),
        each: Sequence[UpdateContext] = (),
        over: int | None = None,
    ) -> None:
        """Apply the rule to the mean of the gradients `gs`, summed in this order; they are only read.

        If some of them are sums already, `over` is the total number of gradients. The weights are also copied `into`
        other tensors, each block while it is still in the cache. One of them may be `at.seen`, because the rule has
        read a block of it before the block is overwritten. `each` has the context of every gradient, for a rule that
        corrects them separately.
        """
        self._into = into if not untouched and self._whole else ()
        self._each = [(one, one.seen) for one in each]
        over = len(gs) if over is None else over
        self._apply(gs, at, untouched, copies=max(len(gs), over) > 1 or self._mover is None, over=over)
        if not self._into:
            for memory in into:
                self._ops.copy(self.weights, memory)
        self._into, self._each = (), []

    @torch.no_grad()
    def update_rows(self, param_id: int, grad: Tensor, at: UpdateContext) -> None:
        """Apply the rule to a coalesced sparse gradient of one parameter: no other row is read or written."""
        index = self.param_ids.index(param_id)
        _, start, stop = self._segments[index]
        rows, g = grad.indices()[0], grad.values()
        self._ops.computes(g, passes=2)
        weights, *memory = (x[start:stop].view(-1, *g.shape[1:]) for x in (self.weights, *self._states[0].values()))
        self.counts[index] += 1
        at.weights, at.updates = weights[rows], self.counts[index]
        at.state = {name: x[rows] for name, x in zip(self._states[0], memory, strict=True)}
        step = self.rule(g, at)
        assert step is not None
        weights.index_add_(0, rows, step)
        for name, x in zip(self._states[0], memory, strict=True):
            x[rows] = at.state[name]

    def _apply(
        self, gs: Sequence[Tensor], at: UpdateContext, untouched: Collection[int], copies: bool, over: int = 1
    ) -> None:
        moved = self._moved(untouched)
        if not moved or not self._ops.computes(*moved, passes=len(gs) + len(self._into)):
            return
        if torch.is_grad_enabled():  # rare: runs are under no_grad, and this test costs less than entering it
            with torch.no_grad():
                self._update_blocks(gs, at, untouched, copies, over)
        else:
            self._update_blocks(gs, at, untouched, copies, over)

    def _moved(self, untouched: Collection[int]) -> list[Tensor]:
        """The weights that an update reads and writes."""
        if not untouched:
            return [self.weights]
        return [self.weights[start:stop] for param_id, start, stop in self._segments if param_id not in untouched]

    def _update_blocks(
        self, gs: Sequence[Tensor], at: UpdateContext, untouched: Collection[int], copies: bool, over: int
    ) -> None:
        seen = at.seen
        walks = copies or over > 1 or self._mover is None or bool(self._into)
        size = self._block if walks else self.weights.numel()
        for block in self._blocks(untouched, size):
            cut, shape, *_ = block
            self._set_context(at, seen, block)
            g = self._sum(gs, block) if copies else _part(gs[0], cut)
            if over > 1:
                g.div_(over)
            self._step(g if shape is None else g.view(shape), at, [_part(memory, cut) for memory in self._into])

    def _set_context(self, at: UpdateContext, seen: Tensor | None, block: Block) -> None:
        """Set the fields of `at` to one block."""
        cut, shape, at.state, at.updates = block
        at.weights = _part(self.weights, cut)
        at.seen = None if seen is None else _part(seen, cut)
        if shape is not None:
            at.weights = at.weights.view(shape)
            at.seen = None if at.seen is None else at.seen.view(shape)

    def _step(self, g: Tensor, at: UpdateContext, into: list[Tensor]) -> None:
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
        """The elements to update: blocks of at most `size`, or whole tensors if the rule needs them."""
        for index, start, stop, updates in self._counted(untouched):
            if not self._whole:
                yield slice(start, stop), self._shapes[index], self._states[index], updates
            elif stop - start == self.weights.numel() <= size:
                yield ALL, None, self._states[0], updates
            else:
                for begin in range(start, stop, size):
                    cut = slice(begin, min(begin + size, stop))
                    yield cut, None, {name: value[cut] for name, value in self._states[0].items()}, updates

    def _counted(self, untouched: Collection[int]) -> Iterator[tuple[int, int, int, int]]:
        """Index, start, stop and number of this update: of the whole slice if counts are equal, else by parameter."""
        counts = self.counts
        if not untouched and self._whole and counts[1:] == counts[:-1]:
            updates = counts[0] + 1 if counts else 1
            for index in range(len(counts)):
                counts[index] = updates
            yield 0, 0, self.weights.numel(), updates
            return
        for index, (param_id, start, stop) in enumerate(self._segments):
            if param_id not in untouched:
                counts[index] += 1
                yield index, start, stop, counts[index]

    def _sum(self, gs: Sequence[Tensor], block: Block) -> Tensor:
        """A block of the sum of gradients, in scratch memory."""
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
        """The same for gradients that are corrected one by one."""
        assert isinstance(self.rule, Corrects)
        cut, shape, *_ = block
        total: Tensor | None = None
        for g, (at, seen) in zip(gs, self._each, strict=True):
            self._set_context(at, seen, block)
            one = _part(g, cut).clone()
            one = self.rule.correct(one if shape is None else one.view(shape), at)
            total = one if total is None else total.add_(one)
        assert total is not None
        return total

    @cached_property
    def _scratch(self) -> Tensor:
        return torch.empty_like(self.weights[: self._block] if self._whole else self.weights)


def replica_slices(
    ops: VectorOps, flat: Flat, rule: Rule, weights: Sequence[Tensor] | None = None
) -> list[WeightSlice]:
    """A weight slice for every dtype group of a model: of its own weights, or of other tensors of the same sizes."""
    weights = weights or [group.weights for group in flat.groups]
    return [
        WeightSlice(ops, Span(number, 0, x.numel()), x, flat.groups[number].slots, rule)
        for number, x in enumerate(weights)
    ]

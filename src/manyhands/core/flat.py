"""Flat: all parameters of a model as views into one contiguous tensor per dtype group.

        model      fc1.weight      fc1.bias  fc2.weight ...
        weights  [ ............... | ....... | .......... ]              one tensor
        outgoing [ ....... gradient, same slots ......... | counts ]     touch counts: one per parameter, 1 = touched

A dtype group holds the parameters of one dtype; parameters that have different rules are in different groups (see
param_groups.py).

A hook moves each gradient into the flat gradient as soon as autograd has accumulated it, and drops the parameter's own.
A second backward pass in one step adds. `close` ends the step: gradients that did not arrive are zero and their touch
count is 0, so that rules can skip them as torch does. The touch counts are sent behind the gradient, so that a sum over
workers also has the number of workers that touched each parameter.

A sparse gradient (of an embedding, say) is made dense here, unless the strategy has called `keep_rows`: then its rows
are in `rows`, the flat gradient does not contain that parameter, and the strategy applies the rows.

Tied, frozen and unused parameters, several dtypes and sparse gradients are handled only here. Refused: re-entrant
checkpointing (a parameter would get two gradients), weights that are not contiguous (channels-last) or overlap in
memory, a model that is flat already, frozen parameters that become trainable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyhands.core.errors import ManyhandsError, Refused
from manyhands.core.model_check import refuse_overlaps, refuse_strides

BUCKET_BYTES = 4 * 2**20


class Span(NamedTuple):
    """A slice of one dtype group of a flat model."""

    group: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def holds(self, other: Span) -> bool:
        """Whether the first element of another span is in this one."""
        return self.group == other.group and self.start <= other.start < self.stop


class ParamSlot(NamedTuple):
    """The slice of the flat model that a parameter has; `param_id` is its number within the model."""

    name: str
    span: Span
    shape: torch.Size
    param_id: int


@dataclass
class DtypeGroup:
    """The parameters of one dtype that have the same rule, in one flat tensor."""

    weights: Tensor
    outgoing: Tensor
    slots: list[ParamSlot]

    @property
    def grad(self) -> Tensor:
        """The gradient, without the touch counts."""
        return self.outgoing[: self.weights.numel()]

    @property
    def touch_counts(self) -> Tensor:
        """One number per parameter: how many workers touched it."""
        return self.outgoing[self.weights.numel() :]

    def untouched(self) -> frozenset[int]:
        """The ids of the parameters that no worker touched in this step."""
        if self.outgoing.is_meta or bool(self.touch_counts.all()):
            return frozenset()
        first = self.slots[0].param_id
        return frozenset(first + n for n in torch.nonzero(self.touch_counts == 0).flatten().tolist())


class Arrival:
    """The hook on a parameter: its gradient has arrived."""

    def __init__(self, flat: Flat, slot: ParamSlot) -> None:
        self._flat, self._slot = flat, slot

    def __call__(self, p: Tensor) -> None:
        if p.grad is None:
            raise Refused(f"a hook has removed the gradient of {self._slot.name}, but must leave it for the method")
        self._flat.receive(self._slot, p)


def is_watched(p: Tensor) -> bool:
    """Whether this parameter is part of a flat model."""
    return any(isinstance(hook, Arrival) for hook in (p._post_accumulate_grad_hooks or {}).values())


def unwatch(p: Tensor) -> None:
    """Remove our hook from a parameter; those of the user remain."""
    hooks = p._post_accumulate_grad_hooks or {}
    for key in [key for key, hook in hooks.items() if isinstance(hook, Arrival)]:
        del hooks[key]


class Flat:
    """A model's trainable parameters, laid out flat.

    Args:
        parameters: named parameters, each once.
        groups: lists of parameter names that have the same rule; all others form one more group.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], groups: Sequence[Iterable[str]] = ()) -> None:
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        _refuse_misfits(self._parameters)
        refuse_overlaps(parameters)
        refuse_strides(self._parameters)
        group = {name: number for number, names in enumerate(groups) for name in names}
        names_of: dict[tuple[int, torch.dtype], list[str]] = {}
        for name, p in self._parameters.items():
            names_of.setdefault((group.get(name, len(groups)), p.dtype), []).append(name)
        self.groups: list[DtypeGroup] = []
        self.slots: list[ParamSlot] = []
        for names in names_of.values():
            self.groups.append(self._lay_out(len(self.groups), names))
            self.slots += self.groups[-1].slots
        self._gradients = self._gradient_views()
        self._views: dict[Span, Tensor] = {}
        self._buckets: dict[int, list[Span]] = {}
        self._arrived: dict[str, ParamSlot] = {}
        self._complete = False
        self._keeps_rows = False
        self.rows: dict[int, Tensor] = {}
        """The sparse gradients of this step, coalesced, by parameter id."""
        self._arrival: Callable[[ParamSlot], None] | None = None
        self.receive: Callable[[ParamSlot, Tensor], None] = self._take
        """Called for each parameter whose gradient autograd has accumulated, inside the backward pass."""
        self.scale = 1.0
        """Every gradient is multiplied by it: other than 1 if the mini-batches of the workers are unequal."""
        self._receives = False
        self.means: list[Tensor] | None = None
        """By parameter id, the mean gradient of all workers, if a method leaves it in other memory; only to be read."""
        self._this_backward: set[str] = set()
        if not self.is_meta:
            for slot in self.slots:
                self._watch(slot)

    @torch.no_grad()
    def _lay_out(self, number: int, names: list[str]) -> DtypeGroup:
        ps = [self._parameters[name] for name in names]
        total = sum(p.numel() for p in ps)
        weights = torch.empty(total, dtype=ps[0].dtype, device=ps[0].device)
        slots, start = [], 0
        for param_id, (name, p) in enumerate(zip(names, ps, strict=True), start=len(self.slots)):
            span = Span(number, start, start + p.numel())
            slots.append(ParamSlot(name, span, p.shape, param_id))
            weights[start : span.stop].copy_(p.reshape(-1))
            start = span.stop
        group = DtypeGroup(weights, weights.new_zeros(total + len(ps)), slots)
        self._point(group)
        return group

    def _point(self, group: DtypeGroup) -> None:
        """Make the model's parameters views of the group's weights."""
        for slot in group.slots:
            self._parameters[slot.name].data = group.weights[slot.span.start : slot.span.stop].view(slot.shape)

    def _gradient_views(self) -> list[Tensor]:
        """Views of every parameter's gradient, made once because hooks must be fast."""
        spans = [(self.groups[slot.span.group].outgoing, slot) for slot in self.slots]
        return [outgoing[p.span.start : p.span.stop].view(p.shape) for outgoing, p in spans]

    def _watch(self, slot: ParamSlot) -> None:
        self._parameters[slot.name].grad = None  # a gradient of an earlier loop would be added in the first step
        self._parameters[slot.name].register_post_accumulate_grad_hook(Arrival(self, slot))  # type: ignore[no-untyped-call]

    def _take(self, slot: ParamSlot, p: Tensor) -> None:
        """Move a parameter's gradient into the flat one."""
        assert p.grad is not None
        grad, p.grad = p.grad, None
        if not self._receives:
            raise Refused(
                "backward() was called between two steps, but hands.step computes the gradients itself: "
                "for a loop with its own backward() use hands.prepare(model, optimizer)"
            )
        if slot.name in self._this_backward:
            raise ManyhandsError(
                f"{slot.name} got two gradients in one backward pass: re-entrant checkpointing "
                "is not supported, pass use_reentrant=False to torch.utils.checkpoint"
            )
        self._this_backward.add(slot.name)
        self.put(slot, grad)

    # -- one step ---------------------------------------------------------------------------------

    def open(self, arrival: Callable[[ParamSlot], None] | None = None, *, by_hooks: bool = True) -> None:
        """Begin a step: no gradient has arrived. `arrival` is called for each gradient, inside the backward pass.

        Without `by_hooks` the method puts all gradients itself. A backward pass outside of a step is refused.
        """
        self._receives = by_hooks
        self._arrived.clear()
        self.rows.clear()
        self._arrival = arrival
        self.begin_backward()

    def begin_backward(self) -> None:
        """Begin a backward pass, of which a step may have several."""
        self._this_backward.clear()

    def put(self, slot: ParamSlot, grad: Tensor) -> None:
        """Store one parameter's gradient; a second one in the same step is added."""
        gradient = self.gradient_of(slot)
        if self.scale != 1.0:
            grad = grad * self.scale
        earlier = self.rows.pop(slot.param_id, None)
        if earlier is not None:
            grad = grad + earlier
        elif slot.name in self._arrived:
            gradient.add_(grad)
            return
        self._arrived[slot.name] = slot
        if grad.is_sparse and self._keeps_rows and grad.sparse_dim() == 1:
            self.rows[slot.param_id] = grad.coalesce()
        elif grad.is_sparse:
            gradient.zero_().add_(grad)
        else:
            gradient.copy_(grad)
        if self._arrival is not None:
            self._arrival(slot)

    def put_product(self, slot: ParamSlot, a: Tensor, b: Tensor) -> None:
        """Store the product of two matrices as a parameter's gradient, or add it, without a tensor between."""
        if slot.param_id in self.rows:
            self.put(slot, a @ b)
            return
        is_first = slot.name not in self._arrived
        self.gradient_of(slot).addmm_(a, b, beta=0.0 if is_first else 1.0, alpha=self.scale)
        if is_first:
            self._arrived[slot.name] = slot
            if self._arrival is not None:
                self._arrival(slot)

    def mark(self, slots: Iterable[ParamSlot]) -> None:
        """Begin a step in which exactly these gradients have arrived, and are in place already."""
        self.open()
        self._arrived.update((slot.name, slot) for slot in slots)

    def take_back(self, slot: ParamSlot) -> Tensor:
        """Within a step: the gradient that has arrived, unscaled, as if it had not; zeros if none has."""
        return self.gradient_of(slot) * (1 / self.scale if self._arrived.pop(slot.name, None) else 0.0)

    def parameter(self, slot: ParamSlot) -> nn.Parameter:
        return self._parameters[slot.name]

    def close(self) -> None:
        """End the step: gradients that did not arrive are zero, with a touch count of 0."""
        self._receives = False
        for name, p in self._frozen.items():
            if p.requires_grad:
                raise Refused(f"{name} was frozen when training began, but is to be trained now: join again")
        for group in self.groups:
            group.touch_counts.fill_(1)
        self._complete = len(self._arrived) == len(self.slots)
        if not self._complete:
            for slot in self.slots:
                if slot.name not in self._arrived:
                    self.gradient_of(slot).zero_()
                    group = self.groups[slot.span.group]
                    group.touch_counts[slot.param_id - group.slots[0].param_id] = 0

    def touch(self, slot: ParamSlot) -> None:
        """After `close`: a gradient was put in place that this rank has not computed."""
        group = self.groups[slot.span.group]
        group.touch_counts[slot.param_id - group.slots[0].param_id] = 1
        self._arrived[slot.name] = slot
        self._complete = len(self._arrived) == len(self.slots)

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of all parameters have arrived in this step."""
        return self._complete

    def untouched(self) -> frozenset[int]:
        """The ids of the parameters that this step did not touch."""
        if self._complete:
            return frozenset()
        return frozenset().union(*(group.untouched() for group in self.groups))

    def gradient_of(self, slot: ParamSlot) -> Tensor:
        """One parameter's slice of the gradient, in its own shape."""
        return self._gradients[slot.param_id]

    # -- slices -----------------------------------------------------------------------------------

    @property
    def numel(self) -> int:
        return sum(group.weights.numel() for group in self.groups)

    @property
    def is_meta(self) -> bool:
        """Whether the tensors have sizes only and no numbers."""
        return any(group.weights.is_meta for group in self.groups)

    def weights(self, span: Span) -> Tensor:
        """A slice of the weights; the view is cached, because methods use the same spans in every step."""
        found = self._views.get(span)
        if found is None:
            found = self._views[span] = self.groups[span.group].weights[span.start : span.stop]
        return found

    def grad(self, span: Span) -> Tensor:
        """A slice of the gradient, as a view."""
        return self.groups[span.group].outgoing[span.start : span.stop]

    def buckets(self, nbytes: int = BUCKET_BYTES) -> list[Span]:
        """Spans of about `nbytes` that hold whole parameters, in the order in which their gradients become ready."""
        if nbytes not in self._buckets:
            self._buckets[nbytes] = self._cut(nbytes)
        return self._buckets[nbytes]

    def _cut(self, nbytes: int) -> list[Span]:
        ready = {name: -number for number, name in enumerate(self._parameters)}
        first = {slot.span[:2]: ready[slot.name] for slot in self.slots}  # the parameter of a bucket that is ready last
        buckets: list[Span] = []
        for slot in reversed(self.slots):
            group, start, stop = slot.span
            size = self.groups[group].weights.element_size()
            last = buckets[-1] if buckets else None
            if last and last.group == group and last.numel * size + (stop - start) * size <= nbytes:
                buckets[-1] = Span(group, start, last.stop)
            else:
                buckets.append(slot.span)
        return sorted(buckets, key=lambda bucket: first[bucket[:2]])

    @torch.no_grad()
    def move_to(self, weights: Sequence[Tensor]) -> None:
        """Use other memory for the weights, one tensor per dtype group; it is not changed."""
        for group, memory in zip(self.groups, weights, strict=True):
            group.weights = memory
            self._point(group)
        self._views.clear()

    def collect_in(self, outgoing: Sequence[Tensor]) -> None:
        """Use other memory for gradients and touch counts, one tensor per dtype group."""
        for group, memory in zip(self.groups, outgoing, strict=True):
            group.outgoing = memory
        self._gradients = self._gradient_views()

    def keep_rows(self, keep: bool = True) -> None:
        """Store sparse gradients in `rows` from now on, and not in the flat gradient."""
        self._keeps_rows = keep

    def named(self) -> dict[str, Tensor]:
        """Copies of all trainable parameters by name."""
        return {slot.name: self.weights(slot.span).view(slot.shape).clone() for slot in self.slots}


def _refuse_misfits(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, p in parameters.items():
        if is_watched(p):
            raise Refused(f"{name} already has gradient hooks, but a model can be joined only once")

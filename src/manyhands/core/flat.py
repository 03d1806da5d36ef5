"""Flat: all parameters of a model as views into one contiguous tensor per group and dtype.

        model      fc1.weight      fc1.bias  fc2.weight ...
        weights  [ ............... | ....... | .......... ]        one tensor
        outgoing [ ....... gradient, same places ........ | marks ]  marks: one per parameter, 1 = touched

Gradients arrive by hooks that run when autograd has accumulated a parameter's gradient: it is moved
into the flat gradient and the parameter's own is dropped. A second backward pass in one step adds.
`close` ends the step: what did not arrive is zero and marked untouched, so that rules can skip it as
torch does. The marks travel behind the gradient, so a sum over workers also says who was touched.

A sparse gradient (of an embedding, say) is made dense here, unless somebody has asked to `keep_rows`: then what rows it
has lie in `rows`, the flat gradient knows nothing of that parameter, and whoever asked applies them.

Parameters that a rule treats differently are groups, each in a part of its own (see choosing.py).

Tied, frozen and unused parameters, several dtypes and sparse gradients are handled here and nowhere
else. Refused: re-entrant checkpointing (a parameter's gradient would come in twice), weights that are
not contiguous (channels-last) or in each other's memory, a model that is flat already, parameters that thaw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyhands.core.errors import ManyhandsError, Refused

BUCKET_BYTES = 4 * 2**20


class Span(NamedTuple):
    """A stretch of one part of a flat model."""

    part: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Place(NamedTuple):
    """Where a parameter lies; `mark` is its number within the model."""

    name: str
    span: Span
    shape: torch.Size
    mark: int


@dataclass
class Part:
    """The parameters of one group and dtype."""

    weights: Tensor
    outgoing: Tensor
    places: list[Place]

    @property
    def grad(self) -> Tensor:
        """The gradient, without the marks."""
        return self.outgoing[: self.weights.numel()]

    @property
    def marks(self) -> Tensor:
        """One number per parameter: on how many workers it was touched."""
        return self.outgoing[self.weights.numel() :]

    def untouched(self) -> frozenset[int]:
        """The parameters (by mark) that nobody touched in this step."""
        if self.outgoing.is_meta or bool(self.marks.all()):
            return frozenset()
        first = self.places[0].mark
        return frozenset(first + n for n in torch.nonzero(self.marks == 0).flatten().tolist())


class Flat:
    """A model's trainable parameters, laid out flat.

    Args:
        parameters: named parameters, each once.
        groups: lists of parameter names that are to lie together; all others form one more group.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], groups: Sequence[Iterable[str]] = ()) -> None:
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        _refuse_misfits(self._parameters)
        _refuse_overlaps(parameters)
        group = {name: number for number, names in enumerate(groups) for name in names}
        cells: dict[tuple[int, torch.dtype], list[str]] = {}
        for name, p in self._parameters.items():
            cells.setdefault((group.get(name, len(groups)), p.dtype), []).append(name)
        self.parts: list[Part] = []
        self.places: list[Place] = []
        for names in cells.values():
            self.parts.append(self._lay_out(len(self.parts), names))
            self.places += self.parts[-1].places
        self._gradients = self._gradient_views()
        self._stretches: dict[Span, Tensor] = {}
        self._buckets: dict[int, list[Span]] = {}
        self._arrived: dict[str, Place] = {}
        self._complete = False
        self._keeps_rows = False
        self.rows: dict[int, Tensor] = {}
        """This step's gradients that stayed sparse, coalesced, by the mark of their parameter."""
        self._arrival: Callable[[Place], None] | None = None
        self._this_backward: set[str] = set()
        if not self.is_meta:
            for place in self.places:
                self._watch(place)

    @torch.no_grad()
    def _lay_out(self, number: int, names: list[str]) -> Part:
        ps = [self._parameters[name] for name in names]
        total = sum(p.numel() for p in ps)
        weights = torch.empty(total, dtype=ps[0].dtype, device=ps[0].device)
        places, start = [], 0
        for mark, (name, p) in enumerate(zip(names, ps, strict=True), start=len(self.places)):
            span = Span(number, start, start + p.numel())
            places.append(Place(name, span, p.shape, mark))
            weights[start : span.stop].copy_(p.reshape(-1))
            start = span.stop
        part = Part(weights, weights.new_zeros(total + len(ps)), places)
        self._point(part)
        return part

    def _point(self, part: Part) -> None:
        """Make the model's parameters views of the part's weights."""
        for place in part.places:
            self._parameters[place.name].data = part.weights[place.span.start : place.span.stop].view(place.shape)

    def _gradient_views(self) -> list[Tensor]:
        """Every parameter's stretch of the gradient, made once: hooks are in a hurry."""
        spans = [(self.parts[place.span.part].outgoing, place) for place in self.places]
        return [outgoing[p.span.start : p.span.stop].view(p.shape) for outgoing, p in spans]

    def _watch(self, place: Place) -> None:
        def arrive(p: Tensor) -> None:
            assert p.grad is not None
            grad, p.grad = p.grad, None
            if place.name in self._this_backward:
                raise ManyhandsError(
                    f"{place.name} got two gradients in one backward pass: re-entrant checkpointing "
                    "is not supported, pass use_reentrant=False to torch.utils.checkpoint"
                )
            self._this_backward.add(place.name)
            self.put(place, grad)

        self._parameters[place.name].grad = None  # of an earlier loop, it would count in the first step
        self._parameters[place.name].register_post_accumulate_grad_hook(arrive)  # type: ignore[no-untyped-call]

    # -- one step ---------------------------------------------------------------------------------

    def open(self, arrival: Callable[[Place], None] | None = None) -> None:
        """Begin a step: nothing has arrived yet. `arrival` is told of each gradient, inside the backward pass."""
        self._arrived.clear()
        self.rows.clear()
        self._arrival = arrival
        self.begin_backward()

    def begin_backward(self) -> None:
        """Begin one of the step's backward passes."""
        self._this_backward.clear()

    def put(self, place: Place, grad: Tensor) -> None:
        """Take in one parameter's gradient; a second one in the same step adds."""
        here = self.gradient_of(place)
        earlier = self.rows.pop(place.mark, None)
        if earlier is not None:
            grad = grad + earlier
        elif place.name in self._arrived:
            here.add_(grad)
            return
        self._arrived[place.name] = place
        if grad.is_sparse and self._keeps_rows and grad.sparse_dim() == 1:
            self.rows[place.mark] = grad.coalesce()
        elif grad.is_sparse:
            here.zero_().add_(grad)
        else:
            here.copy_(grad)
        if self._arrival is not None:
            self._arrival(place)

    def close(self) -> None:
        """End the step: what did not arrive is zero and marked untouched."""
        for name, p in self._frozen.items():
            if p.requires_grad:
                raise Refused(f"{name} was frozen when training began, but is to be trained now: join again")
        for part in self.parts:
            part.marks.fill_(1)
        self._complete = len(self._arrived) == len(self.places)
        if not self._complete:
            for place in self.places:
                if place.name not in self._arrived:
                    self.gradient_of(place).zero_()
                    part = self.parts[place.span.part]
                    part.marks[place.mark - part.places[0].mark] = 0

    def untouched(self) -> frozenset[int]:
        """The parameters (by mark) that this step did not touch."""
        if self._complete:
            return frozenset()
        return frozenset().union(*(part.untouched() for part in self.parts))

    def gradient_of(self, place: Place) -> Tensor:
        """One parameter's stretch of the gradient, in its own shape."""
        return self._gradients[place.mark]

    # -- cutting ----------------------------------------------------------------------------------

    @property
    def numel(self) -> int:
        return sum(part.weights.numel() for part in self.parts)

    @property
    def is_meta(self) -> bool:
        """Whether there are only sizes."""
        return any(part.weights.is_meta for part in self.parts)

    def weights(self, span: Span) -> Tensor:
        """A stretch of the weights; it is cut once, for methods ask for the same ones in every step."""
        found = self._stretches.get(span)
        if found is None:
            found = self._stretches[span] = self.parts[span.part].weights[span.start : span.stop]
        return found

    def grad(self, span: Span) -> Tensor:
        """A stretch of the gradient."""
        return self.parts[span.part].outgoing[span.start : span.stop]

    def buckets(self, nbytes: int = BUCKET_BYTES) -> list[Span]:
        """Stretches of about `nbytes`, whole parameters each, in the order their gradients become ready."""
        if nbytes not in self._buckets:
            self._buckets[nbytes] = self._cut(nbytes)
        return self._buckets[nbytes]

    def _cut(self, nbytes: int) -> list[Span]:
        ready = {name: -number for number, name in enumerate(self._parameters)}
        first = {place.span[:2]: ready[place.name] for place in self.places}  # of a bucket the last to be ready
        buckets: list[Span] = []
        for place in reversed(self.places):
            part, start, stop = place.span
            size = self.parts[part].weights.element_size()
            last = buckets[-1] if buckets else None
            if last and last.part == part and last.numel * size + (stop - start) * size <= nbytes:
                buckets[-1] = Span(part, start, last.stop)
            else:
                buckets.append(place.span)
        return sorted(buckets, key=lambda bucket: first[bucket[:2]])

    @torch.no_grad()
    def move_to(self, weights: Sequence[Tensor]) -> None:
        """Let the weights live in other memory (which is not changed), one tensor per part."""
        for part, memory in zip(self.parts, weights, strict=True):
            part.weights = memory
            self._point(part)
        self._stretches.clear()

    @torch.no_grad()
    def let_go(self) -> None:
        """Give the memory of weights and gradients back, and keep their sizes: one zero stands for all."""
        if self.is_meta:
            return
        for part in self.parts:
            part.outgoing = part.weights.new_zeros(1).expand(part.outgoing.numel())
        self._gradients = self._gradient_views()
        self.move_to([part.weights.new_zeros(1).expand(part.weights.numel()) for part in self.parts])

    def collect_in(self, outgoing: Sequence[Tensor]) -> None:
        """Let gradients and marks arrive in other memory, one tensor per part."""
        for part, memory in zip(self.parts, outgoing, strict=True):
            part.outgoing = memory
        self._gradients = self._gradient_views()

    def keep_rows(self, keep: bool = True) -> None:
        """Leave sparse gradients sparse from now on: they come to lie in `rows` and not in the flat gradient."""
        self._keeps_rows = keep

    def named(self) -> dict[str, Tensor]:
        """Every trainable parameter by name, copied."""
        return {place.name: self.weights(place.span).view(place.shape).clone() for place in self.places}


def _refuse_misfits(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, p in parameters.items():
        if not p.is_contiguous():
            raise Refused(f"{name} is laid out with strides {p.stride()}, but must be contiguous (no channels-last)")
        if p._post_accumulate_grad_hooks:
            raise Refused(f"{name} already has gradient hooks, but a model can be joined only once")


def _refuse_overlaps(parameters: Mapping[str, nn.Parameter]) -> None:
    """Two parameters in one memory would lie apart here. What is tied must be one parameter."""
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in parameters.items() if p.nbytes)
    for (_, stop, name), (start, _, other) in pairwise(spans):
        if start and start < stop:
            raise Refused(f"{other} lies in the memory of {name}, but must have its own, or be the same parameter")

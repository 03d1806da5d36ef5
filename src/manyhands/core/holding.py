"""Holding: a stretch of weights together with the rule that moves it. Updates happen here and nowhere else.

A replica, a shard or a centre holds its weights in such stretches. An update is

    w <- w + rule(g)

on the whole stretch at once, or parameter by parameter when some were untouched in this step or the
rule needs whole tensors. How often each parameter was updated is counted here, since after a skipped
update the counts differ (Adam's bias correction, as in torch, goes by the parameter).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableSequence, Sequence

import torch
from torch import Tensor

from manyhands.core.flat import Flat, Place, Span
from manyhands.core.protocols import At, Rule, State

Allocate = Callable[[str, Tensor], Tensor]
"""Where state lives: given a name and a fresh tensor, gives the tensor to use."""


def _in_place(_: str, fresh: Tensor) -> Tensor:
    return fresh


class Holding:
    """Weights of one span, their rule's state, and their update counts.

    Args:
        span: where in the model this stretch lies.
        weights: the stretch itself; updated in place.
        places: the parameters of the model, to find those that reach into the span.
        allocate: memory for the state, if it is to be shared.
        counts: memory for the update counts, one per parameter in the span.
    """

    def __init__(
        self,
        span: Span,
        weights: Tensor,
        places: Sequence[Place],
        rule: Rule,
        allocate: Allocate = _in_place,
        counts: MutableSequence[int] | None = None,
    ) -> None:
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

    @torch.no_grad()
    def update(self, g: Tensor, at: At, untouched: Collection[int] = ()) -> None:
        """Apply the rule to the gradient `g`, which may be overwritten; `at` says what else is known."""
        if self.weights.is_meta:
            return
        counts = self.counts
        if not untouched and self._whole and all(count == counts[0] for count in counts):
            for place in range(len(counts)):
                counts[place] += 1
            self._step(self.weights, g, self._states[0], counts[0] if counts else 1, at)
            return
        for place, (mark, start, stop) in enumerate(self._segments):
            if mark not in untouched:
                counts[place] += 1
                if self._whole:
                    state = {name: value[start:stop] for name, value in self._states[0].items()}
                    self._step(self.weights[start:stop], g[start:stop], state, counts[place], at)
                else:
                    shape = self._shapes[place]
                    weights = self.weights[start:stop].view(shape)
                    self._step(weights, g[start:stop].view(shape), self._states[place], counts[place], at)

    def _step(self, weights: Tensor, g: Tensor, state: State, updates: int, at: At) -> None:
        at.weights, at.state, at.updates = weights, state, updates
        step = self.rule(g, at)
        if step is not None:
            weights.add_(step)


def replica(flat: Flat, rule: Rule, weights: Sequence[Tensor] | None = None) -> list[Holding]:
    """A holding for every part of a model: its own weights, or other tensors of the same sizes."""
    held = weights or [part.weights for part in flat.parts]
    return [Holding(Span(number, 0, w.numel()), w, flat.parts[number].places, rule) for number, w in enumerate(held)]

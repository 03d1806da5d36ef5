"""Sliced: a team whose ranks have slices of layers. Every rank runs the whole model on the whole mini-batch.

    part       of a divided layer the slice; every other parameter belongs to one rank, so that the sizes are about even
    gradient   the owners send what they have to the others; then both passes, in which slices are joined
    sent       what the layers exchange (splits/slice_plan.py); the parameters of layers that are not divided

What is not divided is computed by every rank from the same numbers, so its gradient is complete on its owner. It is
sent before every forward pass, because in asynchronous training nothing else would keep the copies equal: each column
of teams moves at its own time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from torch import nn

from manyhands.core.errors import refuse_unless
from manyhands.core.param_cut import ParamCuts
from manyhands.core.port import Transport
from manyhands.core.strategy import Batch
from manyhands.core.team import Origin
from manyhands.core.worker import Worker
from manyhands.splits.owned_parameters import SlicePart, owners
from manyhands.splits.slice_passes import SlicePasses, refuse_task
from manyhands.splits.slice_plan import SlicedLayer, SliceKind, refuse_nothing_cut, slice_plan


@dataclass
class Sliced:
    """A replica of the model whose layers are divided into slices.

    Args:
        ranks: of a team; 0: all workers form one team.
        kind: which layers are divided. "pairs": linear layers, convolutions, embeddings and attention heads; two
            successive ones of a chain with one sum. "neurons": linear layers. "filters": convolutions, by output
            channels. "channels": convolutions, by input channels.
        plan: instead of a kind, words by patterns of module names: `{"*.f.0": "column", "*.f.2": "row"}`, or as text
            "*.f.0=column, *.f.2=row". Further words: gather, sum, heads, vocabulary.
    """

    ranks: int = 0
    kind: SliceKind = "pairs"
    plan: Mapping[str, str] | str = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_unless(self.ranks >= 0, "ranks", self.ranks, ">= 1, or 0: as many as there are workers")
        refuse_unless(self.kind in get_args(SliceKind), "kind", self.kind, f"one of {', '.join(get_args(SliceKind))}")
        if isinstance(self.plan, str):
            self.plan = _read(self.plan)

    @property
    def size(self) -> int:
        return self.ranks

    def settle(self, w: Worker, size: int) -> Mapping[str, Any]:
        return {}

    def check(self, size: int, batch_size: int, model: nn.Module) -> None:
        """The model must have a layer that can be cut."""
        if size > 1:
            refuse_nothing_cut(layers_of(self, model, size), self.kind, size)

    def cuts(self, model: nn.Module, size: int) -> ParamCuts:
        return dict(cut for layer in layers_of(self, model, size) for cut in layer.cuts())

    def part(self, model: nn.Module, index: int, size: int) -> nn.Module:
        if size == 1:
            return model
        layers = layers_of(self, model, size)
        cuts = dict(cut for layer in layers for cut in layer.cuts())
        return SlicePart(model, layers, owners(model, cuts, size), index)

    def begin(self, w: Worker, members: Transport) -> None:
        """Join the team: passes run where they may wait for the others."""
        refuse_task(w.task)
        if members.size == 1:
            return
        assert isinstance(w.trained, SlicePart)
        w.team, self._passes = self, SlicePasses(w, members, w.trained)

    def gradient(self, w: Worker, batch: Batch, origin: Origin) -> float:
        """Both passes of the whole model; the loss is the same on every member."""
        self._passes.share()
        with self._passes.layers:
            loss = w.own_gradient(batch, origin=origin)
        self._passes.finish(loss)
        return loss


def layers_of(team: Sliced, model: nn.Module, size: int) -> list[SlicedLayer]:
    """The layers of a whole model that this many ranks divide."""
    assert not isinstance(team.plan, str)
    return slice_plan(model, size, team.kind, team.plan) if size > 1 else []


def _read(text: str) -> Mapping[str, str]:
    """A plan from its text."""
    pairs = [one.partition("=") for one in text.replace(",", " ").split()]
    for name, _, word in pairs:
        refuse_unless(bool(name and word), "an entry of the plan", f"{name}{word}", "NAME=WORD, as in *.f.0=column")
    return {name: word for name, _, word in pairs}


EXAMPLES: Mapping[str, Sliced] = {
    "sliced": Sliced(ranks=2),
    "sliced, neurons": Sliced(ranks=2, kind="neurons"),
    "sliced, plan": Sliced(ranks=2, plan="0.0=column 1.0=row 2.0=gather 3.0=sum 4.0=gather"),
}

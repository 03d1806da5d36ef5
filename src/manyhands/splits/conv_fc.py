"""Conv-FC: convolutions by samples, fully connected layers by slices: every layer by what it has less of to send.

    front   before the first fully connected layer; each rank computes its own b of the B = K b samples
            its gradients are summed at the owners of the parameters, which send them out before the next pass
    back    from that layer on; each rank has some neurons of every layer, and computes them for all samples

How the front's outputs A_k (b x F) of the K ranks reach the back:

    scheme   sub-steps   in sub-step j all ranks have           sent by a rank at one time
    a        1           A_0 .. A_K-1                           b F
    b        K           A_j                                    b F by rank j, nothing by the others
    c        K           the j-th part of every A_k             b F / K

The errors go back the same way: each rank sums those of its samples. With `substep_lr` the weights of the back move
after every sub-step, by its gradient: they see mini-batches of b samples, the front one of K b.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.flat import ParamSlot
from manyhands.core.param_cut import ParamCut, ParamCuts
from manyhands.core.port import Transport, even_spans
from manyhands.core.strategy import Batch
from manyhands.core.team import Origin
from manyhands.core.worker import Worker
from manyhands.splits.owned_parameters import OwnedParameters, SlicePart, owners
from manyhands.splits.slice_exchange import SliceExchange
from manyhands.splits.slice_layers import SliceLayers
from manyhands.splits.slice_plan import SlicedLayer, flattened, slice_plan

Scheme = Literal["a", "b", "c"]
NEEDS = "convolutions by samples and other layers by slices need a task with a loss function and real data"


class Halves(NamedTuple):
    """The two parts of a chain, and the layers of the second that are divided."""

    front: nn.Sequential
    back: nn.Sequential
    layers: Sequence[SlicedLayer]


@dataclass
class ConvFc:
    """A replica of an nn.Sequential, whose first half is divided by samples and its second half by neurons.

    Args:
        ranks: K, of a team; 0: all workers form one team.
        scheme: how the second half gets its inputs: all together (a), those of one rank after another (b), some of each
            rank in turn (c).
        substep_lr: the second half moves by SGD with this rate after every sub-step; None: by the method, once.
    """

    ranks: int = 0
    scheme: Scheme = "a"
    substep_lr: float | None = None

    def __post_init__(self) -> None:
        refuse_unless(self.ranks >= 0, "ranks", self.ranks, ">= 1, or 0: as many as there are workers")
        refuse_unless(self.scheme in get_args(Scheme), "scheme", self.scheme, f"one of {', '.join(get_args(Scheme))}")
        refuse_unless(self.substep_lr is None or self.substep_lr >= 0, "substep_lr", self.substep_lr, ">= 0")

    @property
    def size(self) -> int:
        return self.ranks

    def settle(self, w: Worker, size: int) -> Mapping[str, Any]:
        return {}

    def check(self, size: int, batch_size: int, model: nn.Module) -> None:
        """The model must be a chain with a linear layer, and the mini-batch must have samples for every sub-step."""
        halves(model, size)
        least = size if self.scheme != "c" else size * size
        refuse_unless(batch_size >= least, "batch_size", batch_size, f">= {least}, a sample for each rank and sub-step")

    def cuts(self, model: nn.Module, size: int) -> ParamCuts:
        if size == 1:
            return {}
        _, back, layers = halves(model, size)
        inside = dict(back.named_parameters())
        names, found = {id(p): name for name, p in model.named_parameters()}, dict[str, ParamCut]()
        for layer in layers:
            found |= {names[id(inside[name])]: cut for name, cut in layer.cuts()}
        return found

    def part(self, model: nn.Module, index: int, size: int) -> nn.Module:
        if size == 1:
            return model
        found, cuts = halves(model, size), self.cuts(model, size)
        held = owners(model, cuts, size)
        return SlicePart(model, found.layers, held, index, halves=found[:2], all_buffers=True)

    def begin(self, w: Worker, members: Transport) -> None:
        """Join the team."""
        several = self.substep_lr is not None and len(w.workers) > 1
        refuse_unless(not several, "substep_lr", self.substep_lr, "None with several teams: their weights would differ")
        if w.task.loss is None or w.task.sizes_only:
            raise Refused(NEEDS)
        if members.size == 1:
            return
        part = w.trained
        assert isinstance(part, SlicePart)
        w.team = self
        self._front, self._back = part.halves
        self._exchange = SliceExchange(members, w.wait_in_passes())
        self._layers = SliceLayers(part.layers, self._exchange)
        self._owned_front = OwnedParameters(w, part, self._exchange, self._front)
        self._owned_back = OwnedParameters(w, part, self._exchange, self._back)
        self._back_slots = _slots_of(w, self._back)
        self._shares = w.share_of(self._front), w.share_of(self._back)

    def gradient(self, w: Worker, batch: Batch, origin: Origin) -> float:
        """Both passes; the loss is the mean over all samples, on every member."""
        samples, K = len(batch[0]), self._exchange.size
        refuse_unless(samples >= K, "the number of samples", samples, f">= {K}")
        self._owned_front.share()
        self._owned_back.share()
        with w.timer.computing():
            w.flat.open()
            with self._layers, torch.enable_grad():
                loss = w.run_pass(partial(self._passes, w, batch, origin))
            own = even_spans(samples, K)[self._exchange.index]
            w.charge_passes(own.stop - own.start, self._shares[0].total)
            w.charge_passes(samples, self._shares[1].total)
        self._owned_back.finish(loss)
        self._owned_front.sum_at_owners()
        w.flat.close()
        return loss

    def _passes(self, w: Worker, batch: Batch, origin: Origin) -> float:
        spans = even_spans(len(batch[0]), self._exchange.size)
        rank, step, key = origin
        w.seed_torch(rank, step, (key, "samples", self._exchange.index))
        maps = self._front(batch[0][spans[self._exchange.index]])
        leaf, total = maps.detach().requires_grad_(), 0.0
        w.seed_torch(rank, step, key)
        for rows in sub_steps(self.scheme, spans):
            total += self._sub_step(w, leaf, spans, rows, batch)
        if maps.requires_grad:
            w.flat.begin_backward()
            maps.backward(leaf.grad)
        return total

    def _sub_step(self, w: Worker, leaf: Tensor, spans: Sequence[slice], rows: Sequence[slice], batch: Batch) -> float:
        """Both passes of the back for some rows of each rank; the share of the loss."""
        index, loss, first = self._exchange.index, w.task.loss, spans[self._exchange.index].start
        assert loss is not None
        own = leaf[rows[index].start - first : rows[index].stop - first]
        x = self._exchange.rows(own, "samples", [one.stop - one.start for one in rows])
        value = loss(self._back(x), torch.cat([batch[-1][one] for one in rows]))
        share = len(x) / len(batch[0])
        number = w.checked(value) * share
        w.flat.begin_backward()
        (value * share).backward()  # type: ignore[no-untyped-call]
        if self.substep_lr is not None:
            self._move_back(w, self.substep_lr / share)
        return number

    @torch.no_grad()
    def _move_back(self, w: Worker, rate: float) -> None:
        """Move the back by the gradient of a sub-step, and forget that gradient."""
        self._owned_back.restore()
        for slot in self._back_slots:
            w.flat.parameter(slot).add_(w.flat.take_back(slot), alpha=-rate)
        assert w.pass_thread is not None
        w.pass_thread.ask(self._owned_back.share)


def sub_steps(scheme: Scheme, spans: Sequence[slice]) -> list[list[slice]]:
    """Which rows each rank gives in each sub-step, of the rows that it has."""
    if scheme == "a":
        return [list(spans)]
    if scheme == "b":
        return [[one if one is own else slice(one.start, one.start) for one in spans] for own in spans]
    parts = [[_moved(part, one.start) for part in even_spans(one.stop - one.start, len(spans))] for one in spans]
    return [list(of_all) for of_all in zip(*parts, strict=True)]


def _moved(span: slice, by: int) -> slice:
    return slice(span.start + by, span.stop + by)


def halves(model: nn.Module, size: int) -> Halves:
    """A chain in front of and from its first linear layer on."""
    chain = flattened(model)
    at = next((number for number, (_, module) in enumerate(chain) if isinstance(module, nn.Linear)), None)
    if at is None:
        raise Refused(f"the model is a {type(model).__name__} without a linear layer in a chain, but must have one")
    front, back = (nn.Sequential(*(module for _, module in some)) for some in (chain[:at], chain[at:]))
    layers = slice_plan(back, size, "neurons", {}) if size > 1 else []
    name = f"the outputs of layer {chain[at][0]}"
    refuse_unless(size == 1 or (bool(layers) and layers[0].name == "0"), name, "few", f">= {size}, the ranks of a team")
    return Halves(front, back, [replace(layer, takes="partial") if layer.name == "0" else layer for layer in layers])


def _slots_of(w: Worker, module: nn.Module) -> list[ParamSlot]:
    inside = {id(p) for p in module.parameters()}
    return [slot for slot in w.flat.slots if id(w.flat.parameter(slot)) in inside]


EXAMPLES: Mapping[str, ConvFc] = {
    "conv-fc, a": ConvFc(ranks=2),
    "conv-fc, b": ConvFc(ranks=2, scheme="b"),
    "conv-fc, c": ConvFc(ranks=2, scheme="c"),
}

"""PeerModel: a worker's own weights x, the rule that updates them, and their averages with those of other workers.

With a codec C (and D, which decodes) C(x) is sent, and x moves by what the receivers decode, so that of two workers
that average one gains what the other loses:

    x <- x + (sum of D(C(y)) - n D(C(x))) / (1 + n)        if nothing is rounded: x <- (x + sum of y) / (1 + n)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core.codec import Codec
from manyhands.core.declared_state import RuleState, StateParts, VectorState
from manyhands.core.gather import gather, mean
from manyhands.core.port import Message, Tag
from manyhands.core.rule import Rule, UpdateContext
from manyhands.core.strategy import Weights
from manyhands.core.weight_slice import replica_slices
from manyhands.core.worker import Worker


class PeerModel:
    """One worker's x with the rule that updates it.

    Args:
        w: this worker.
        rule: how a gradient is applied to x.
        x: the memory to use, one vector per dtype group; None: a copy of the model's weights.
        codec: encodes x; None: it is sent uncompressed.
    """

    def __init__(self, w: Worker, rule: Rule, x: Sequence[Tensor] | None = None, codec: Codec | None = None) -> None:
        self.w = w
        self.codec = codec
        self.x = [group.weights.clone() for group in w.flat.groups] if x is None else list(x)
        self.slices = replica_slices(w.ops, w.flat, rule, self.x)
        self.lag = 0
        """That of the gradient that `update` has applied last."""
        self._exchanges = 0
        """How many exchanges that peers began have changed x, or are to change it, since it was shown last."""

    def update(self, gradient: Message) -> None:
        """x <- x + rule(g); the message's meta are the parameters that the mini-batch has not touched."""
        self.lag = self._exchanges
        for weight_slice, g in zip(self.slices, gradient.tensors, strict=True):
            at = UpdateContext(weight_slice.weights, samples=self.w.samples)
            weight_slice.apply_mean([g], at, gradient.meta)  # it is lent, so it must not be overwritten
        gradient.release()

    # -- exchanging x -----------------------------------------------------------------------------

    def send(self, to: int, tag: Tag, *, latest: bool = False) -> None:
        """Send a copy of x, which may change at once."""
        self.w.transport.send(to, tag, (), self.encode_model(), latest=latest)

    def encode_model(self) -> list[Tensor]:
        """The payload of x, in memory that may be sent."""
        if self.codec is None:
            return [self.w.ops.clone(x) for x in self.x]
        return [tensor for x in self.x for tensor in self.w.ops.encoded(self.codec, x)]

    def decode_model(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The x in a payload; read only, because it may lie in the payload's memory."""
        if self.codec is None:
            return list(tensors)
        return [self.w.ops.decoded(self.codec, (tensor,), x) for tensor, x in zip(tensors, self.x, strict=True)]

    def changed_by_peer(self) -> None:
        """A peer has begun an exchange that changes x: gradients at the weights shown before are staler by one."""
        self._exchanges += 1

    @torch.no_grad()
    def average(self, total: Sequence[Tensor], count: int = 1) -> None:
        """x <- (x + total) / (1 + count), where `total` is the sum of `count` decoded models."""
        mine = self.x if self.codec is None else self.decode_model(self.encode_model())
        if self.w.ops.computes(*self.x, passes=2):
            for x, own, y in zip(self.x, mine, total, strict=True):
                if self.codec is None:
                    x.add_(y).div_(1 + count)
                else:  # by what the receivers have decoded
                    x.add_((y - own * count).div_(1 + count))

    # -- answers and checkpoints ------------------------------------------------------------------

    def mean(self) -> Weights | None:
        """The mean of all workers' x, on the lead."""
        gathered = gather(self.w, (), self.x)
        return None if gathered is None else self.w.named(mean(gathered))

    @torch.no_grad()
    def show(self) -> None:
        """Copy x into the model's weights."""
        self._exchanges = 0
        for group, x in zip(self.w.flat.groups, self.x, strict=True):
            self.w.ops.copy(x, group.weights)

    def state_parts(self) -> StateParts:
        """x and the state of its rule, of every worker; a new worker starts at the mean with a fresh rule."""
        slots = self.w.flat.slots
        return {"x": VectorState(slots, self.x), "rule": RuleState(slots, self.slices, "own")}

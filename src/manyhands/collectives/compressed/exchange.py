"""What all compressed sums share: the interface that a method uses, the group, and messages that cannot be confused.

    vector            [ ......... span ......... ]     every rank's x_k in, sum over k of decode(encode(x_k)) out
    ranks             1   4   5   9                    any sorted ranks of the job
    index in group    0   1   2   3                    what a sum counts in

A message carries the sum and the group in its tag's name and the number of the exchange in its key, so a message of a
rank that is ahead is not received by mistake. Decoded payloads are added in the order of indices, on whichever rank
they are added, so that all ranks end with the same bits.

Untouched parameters. A rule skips a parameter that no worker touched in this step. Every message carries, beside the
payload, the parameters that its sender believes untouched; a receiver keeps those that it believes untouched too. The
intersection of sets does not depend on the order, so every pattern of messages that connects all ranks leaves the same
set on all of them, without a collective of its own. The set is empty as long as one rank has touched everything.

A common scale, if a codec asks for one: the maximum of the ranks' own scales, by an all-reduce before the payloads.

Lending: a payload is lent and never written again. A codec makes it in new memory, or it is the vector itself; then a
copy of it is lent. So no rank waits for a release, and the vector may be written when `all_reduce` returns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from manyhands.collectives.choose import collective
from manyhands.collectives.group import Outbox, RankGroup
from manyhands.core.codec import Codec, Payload
from manyhands.core.encoder import Encoder
from manyhands.core.errors import BadPayload
from manyhands.core.flat import Span
from manyhands.core.port import Collective, Message, Tag, recv
from manyhands.core.state import MEMORIES, section
from manyhands.core.strategy import Saved
from manyhands.core.vector_ops import UNCHARGED
from manyhands.core.worker import Worker

KIND = Tag("sum", carries="vectors")

Untouched = frozenset[int]
"""The ids of parameters that had no gradient in this step."""
ALL_TOUCHED: Untouched = frozenset()


class CompressedSum(Protocol):
    """A sum over workers of vectors that are sent encoded; all ranks make the same calls in the same order."""

    def all_reduce(self, vector: Tensor, span: Span, untouched: Untouched | None = None) -> Untouched:
        """Replace a span of a vector like a whole group of the weights by the sum over all ranks.

        Of the parameters that this rank has not touched it returns those that no other rank has touched either; all
        ranks ask for that, or none.
        """

    def state(self) -> Saved:
        """What this worker alone remembers."""

    def restore(self, saved: Sequence[Saved]) -> None:
        """Continue from the states of the workers of another run, in the order of their ranks, however many."""


class PayloadExchange:
    """One rank's view of the ranks that sum."""

    def __init__(self, w: Worker, ranks: Sequence[int] | None, name: str) -> None:
        group = RankGroup(w.transport, w.workers if ranks is None else ranks, name)
        self.ranks, self.index_in_group = group.ranks, group.index_in_group
        self.size, self.others = group.size, group.others
        self.untouched = ALL_TOUCHED
        """Sent with every payload; what a received message does not contain is removed."""
        self._transport = w.transport
        self._tag = Tag(f"{KIND.name}:{name}:{group.label}", carries=KIND.carries)

    @cached_property
    def _collective(self) -> Collective:
        """For scales; most codecs have none in common."""
        return collective("auto", self._transport, self.ranks)

    def begin(self) -> None:
        """Start an exchange: from now on messages carry its number."""
        self._tag = self._tag.of(self._tag.key + 1)

    def send(self, to: int, payload: Payload) -> None:
        """Lend a payload to index `to`, as contiguous rows."""
        rows = [x if x.dim() == 1 else x.reshape(-1) for x in payload]
        self._transport.send(self.ranks[to], self._tag, tuple(self.untouched), rows)

    def receive(self, frm: int) -> Message:
        """The payload that index `frm` has sent."""
        message = recv(self._transport, self._tag, frm=self.ranks[frm])
        if self.untouched:
            self.untouched &= frozenset(message.meta)
        return message

    def in_order(self, mine: Payload, silent: Collection[int] = ()) -> Iterator[tuple[int, Payload]]:
        """Every rank's payload with its index; it is released when the next one is asked for."""
        for index in range(self.size):
            if index in silent:
                continue
            if index == self.index_in_group:
                yield index, mine
            else:
                message = self.receive(index)
                yield index, message.tensors
                message.release()

    def common_scales(self, encoder: Encoder, vector: Tensor, spans: Sequence[Span]) -> list[Tensor | None]:
        """The scales with which all ranks encode these spans; None where each has its own."""
        own = [encoder.scale(vector, span) for span in spans]
        scales = [scale for scale in own if scale is not None]
        if not scales:
            return own
        largest = torch.cat(scales)
        self._collective.all_reduce(largest, op="max")
        if UNCHARGED.computes(largest) and not bool((largest.isfinite() & (largest >= 0)).all()):
            raise BadPayload(f"the largest of all ranks' scales are {largest.tolist()}, but must be >= 0 and finite")
        return list(torch.split(largest, [scale.numel() for scale in scales]))

    def inherited(self, saved: Sequence[Saved]) -> Sequence[Saved]:
        """The states that this rank takes over: those of old worker k with k mod size = its index."""
        return saved[self.index_in_group :: self.size]


def unsent(states: Sequence[Saved]) -> list[Saved]:
    """All that some workers had not sent yet, also as owners: for a sum in which a worker has one memory."""
    return [section(state, kind) for state in states for kind in MEMORIES]


def fresh(payload: Payload, vector: Tensor) -> tuple[Tensor, ...]:
    """A payload that may be lent: what lies in the vector itself is copied, because that is written next."""
    memory = vector.untyped_storage().data_ptr()
    return tuple(x.clone() if x.untyped_storage().data_ptr() == memory else x for x in payload)


def add_decoded(w: Worker, codec: Codec, payloads: Iterable[tuple[int, Payload]], out: Tensor, spare: Outbox) -> None:
    """Write the sum of the decoded payloads, in their order; `spare` is memory for one of them."""
    one = spare.like(out)
    with w.timer.encoding():
        for number, (_, payload) in enumerate(payloads):
            if number == 0:
                w.ops.decode(codec, payload, out)
            else:
                w.ops.add_decoded(codec, payload, out, one)

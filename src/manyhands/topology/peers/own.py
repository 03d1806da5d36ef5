"""Own: a peer's own weights x, and the activity that owns them.

    main program                            communication
    x^, the model's weights                 x, which others may move meanwhile
    g = gradient(x^)
    `take_step`: hand over g ------------>  `update`: x <- x + rule(g), before or after an exchange
    x^ <- x  <----------------------------  `give_back`

Nobody else touches x, so nobody reads it half written and no lock is needed. While everyone rests, the main program
may: that is when x is saved.

With a codec C (and D, which decodes) others are told C(x), and x moves by what they would make of it, so that of two
that average one gains what the other loses:

    x <- x + (sum of D(C(y)) - n D(C(x))) / (1 + n)        if nothing is rounded: x <- (x + sum of y) / (1 + n)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core.gather import gather, mean
from manyhands.core.holding import replica
from manyhands.core.protocols import At, Codec, Message, Rule, Saved, Tag, Weights, recv
from manyhands.core.saving import collect, join, named, own, pieces, place, restore, section, under
from manyhands.core.worker import Worker
from manyhands.topology.servers.inbox import decoded, encoded

GRADIENT, MOVED = Tag("gradient"), Tag("moved-on")


class Own:
    """One worker's x with the rule that moves it.

    Args:
        x: the memory to use, one vector per part of the model; a copy of the model's weights if not given.
        codec: what x looks like on the wire; as it is, if not given.
    """

    def __init__(self, w: Worker, rule: Rule, x: Sequence[Tensor] | None = None, codec: Codec | None = None) -> None:
        self.w = w
        self.codec = codec
        self.x = [part.weights.clone() for part in w.flat.parts] if x is None else list(x)
        self.held = replica(w.flat, rule, self.x)

    # -- the main program -------------------------------------------------------------------------

    @torch.no_grad()
    def take_step(self) -> None:
        """Hand the gradient over to whoever owns x, wait, and read x again."""
        w = self.w
        w.transport.send(w.rank, GRADIENT, tuple(sorted(w.flat.untouched())), [part.grad for part in w.flat.parts])
        message = recv(w.transport, MOVED, frm=w.rank)
        for part, x in zip(w.flat.parts, message.tensors, strict=True):
            part.weights.copy_(x)
        message.release()

    # -- the communication activity ---------------------------------------------------------------

    def update(self, gradient: Message) -> None:
        """x <- x + rule(g)."""
        for held, g in zip(self.held, gradient.tensors, strict=True):
            held.update(g if g.is_meta else g.clone(), At(held.weights, samples=self.w.samples), gradient.meta)
        gradient.release()

    def give_back(self) -> None:
        """Let the main program go on, at x as it is now."""
        self.w.transport.send(self.w.rank, MOVED, (), self._copy())

    def send(self, to: int, tag: Tag, *, latest: bool = False) -> None:
        """Tell a peer x: we go on changing our own."""
        self.w.transport.send(to, tag, (), self.told(), latest=latest)

    def _copy(self) -> list[Tensor]:
        return [x if x.is_meta else x.clone() for x in self.x]

    def told(self) -> list[Tensor]:
        """x as others are told it, in memory that may be lent."""
        if self.codec is None:
            return self._copy()
        self.w.move(sum(x.nbytes for x in self.x))
        return [tensor for x in self.x for tensor in encoded(self.codec, x)]

    def heard(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What a peer has told, to be read only."""
        if self.codec is None:
            return list(tensors)
        return [decoded(self.codec, (tensor,), x) for tensor, x in zip(tensors, self.x, strict=True)]

    @torch.no_grad()
    def average(self, total: Sequence[Tensor], count: int = 1) -> None:
        """x <- (x + total) / (1 + count), where the total is that of `count` others, as they were heard."""
        mine = self.x if self.codec is None else self.heard(self.told())
        if not self.w.flat.is_meta:
            self.place(self._averaged(mine, total, count))
        self.w.move(2 * sum(x.nbytes for x in self.x))

    def _averaged(self, mine: Sequence[Tensor], total: Sequence[Tensor], count: int) -> list[Tensor]:
        """Where that is; `mine` is what others would make of x."""
        if self.codec is None:
            return [(x + y) / (1 + count) for x, y in zip(self.x, total, strict=True)]
        moves = [(y - x * count) / (1 + count) for x, y in zip(mine, total, strict=True)]
        return [x + move for x, move in zip(self.x, moves, strict=True)]

    def place(self, values: Sequence[Tensor]) -> None:
        """Give x these values; it stays in its memory, since a rule may hold on to that."""
        for x, value in zip(self.x, values, strict=True):
            x.copy_(value)

    # -- everyone's, and checkpoints --------------------------------------------------------------

    def mean(self) -> Weights | None:
        """The mean of everyone's x, on the lead."""
        gathered = gather(self.w, (), self.x)
        return None if gathered is None else self.w.named(mean(gathered))

    def show(self) -> None:
        """Let the model compute on x as it is now, not as it was after the last own step."""
        places = self.w.flat.places
        place(places, [part.weights for part in self.w.flat.parts], named(places, self.x))

    def state(self) -> Saved | None:
        """Every worker's x, and what its rule remembers."""
        places = self.w.flat.places
        rule = join(pieces(self.held, places))
        return collect(self.w, under("x", named(places, self.x)) | under("rule", rule))

    def restore(self, saved: Saved) -> None:
        """Each its own; a new worker begins at the mean with a fresh rule."""
        if mine := own(self.w, saved):
            place(self.w.flat.places, self.x, section(mine, "x"))
            restore(self.held, self.w.flat.places, section(mine, "rule"))
            self.show()

"""A keeper of vectors: the loop of a rank that keeps a stretch of them (sharded.py is how others reach it).

    coordinator ---- COMMAND: a row of operations -->  keeper      <-- FETCH, PORTION ---- replica
                <--- RESULT: a number, if asked for                --- FETCHED: the weights of a pass -->

A pass is a point where the gradient is wanted: w + t d. Passes are numbered. Whoever asks for the weights of one that
is over gets those of the newest, and sees by the number that nobody waits for its gradient any more; whoever asks for
one that has not been opened here yet waits. A gradient of an old pass, or one that is here already, is dropped. The
operation that closes a pass waits, and all behind it, until every portion is here: so a result that was asked for after
it says that none is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.flat import Span
from manyhands.core.protocols import Message, Tag, recv
from manyhands.core.worker import Worker
from manyhands.topology.vectors import InOrder, Vectors

COMMAND, RESULT = Tag("command", credit=64, carries="nothing"), Tag("result", credit=64, carries="nothing")
FETCH, FETCHED = Tag("fetch", carries="nothing"), Tag("fetched", carries="floats")
PORTION = Tag("portion", carries="floats")
READ, WHOLE = Tag("read", carries="nothing"), Tag("whole", carries="floats")
SAVE_VECTORS, VECTORS = Tag("save-vectors", carries="nothing"), Tag("vectors", carries="floats")
RESTORE_VECTORS, RESTORED = Tag("restore-vectors", carries="floats"), Tag("restored", carries="nothing")

HEARD = COMMAND, FETCH, PORTION, READ, SAVE_VECTORS, RESTORE_VECTORS


class Keeper:
    """The loop of a rank that keeps a stretch of all vectors for a coordinator."""

    def __init__(self, w: Worker, coordinator: int, spans: dict[int, list[Span]]) -> None:
        self._w = w
        self._t = w.transport
        self._coordinator = coordinator
        self._needed = {coordinator, *spans}
        mine = spans[w.rank]
        self._vectors = Vectors(mine, [w.flat.weights(span) for span in mine])
        self._pass = 0
        self._point: list[Tensor] = []
        self._sum = InOrder(())
        self._early: list[tuple[int, int]] = []
        self._row: deque[tuple[Any, ...]] = deque()
        self._serves = True
        v = self._vectors
        self._doing: dict[str, Callable[..., None]] = {"copy": v.copy, "scale": v.scale, "add": v.add, "drop": v.drop}
        self._doing |= {"open": self._open, "close": self._close}
        self._telling: dict[str, Callable[..., float]] = {"dot": v.dot, "size": v.size, "reach": v.reach}

    @torch.no_grad()
    def serve(self) -> None:
        """Do what one is told until the answer has been read."""
        handle = {
            COMMAND: self._obey,
            FETCH: self._show,
            PORTION: self._take_in,
            READ: self._read,
            SAVE_VECTORS: self._save,
            RESTORE_VECTORS: self._restore,
        }
        while self._serves:
            try:
                message = recv(self._t, *HEARD)
            except PeerLost as loss:
                if loss.rank in self._needed:
                    raise
            else:
                handle[message.tag](message)

    def _obey(self, message: Message) -> None:
        self._row += message.meta
        self._work()

    def _work(self) -> None:
        """Do what there is to do, as far as the portions that have come allow; then say what was asked for."""
        results, done = [], 0
        while self._row and not self._waits(*self._row[0]):
            name, *arguments = self._row.popleft()
            if name in self._telling:
                results.append(self._telling[name](*arguments))
            else:
                self._doing[name](*arguments)
            done += 1
        self._w.move(2 * done * self._vectors.nbytes)
        for result in results:
            self._t.send(self._coordinator, RESULT, (result,))

    def _waits(self, name: str, *arguments: Any) -> bool:
        return name == "close" and not self._sum.is_complete(arguments[1])

    def _open(self, number: int, t: float) -> None:
        """Begin a pass at w + t d. What was lent of the last one stays as it is."""
        self._pass = number
        self._point = [x.clone() for x in self._vectors["w"]]
        if t:
            for x, d in zip(self._point, self._vectors["d"], strict=True):
                x.add_(d, alpha=t)
        self._sum = InOrder(self._point)
        early, self._early = self._early, []
        for rank, wanted in early:
            self._send_point(rank, wanted)

    def _close(self, name: str, portions: int, samples: int) -> None:
        """End a pass: the mean gradient gets a name."""
        self._vectors.put(name, [x.div_(samples) for x in self._sum.total])

    def _show(self, message: Message) -> None:
        self._send_point(message.frm, message.meta[0])

    def _send_point(self, rank: int, wanted: int) -> None:
        if wanted > self._pass:
            self._early.append((rank, wanted))
        else:
            self._w.move(self._vectors.nbytes)
            self._t.send(rank, FETCHED, (self._pass,), self._point)

    def _take_in(self, message: Message) -> None:
        number, portion = message.meta
        if number != self._pass or self._sum.has(portion):
            message.release()
            return
        self._w.move(2 * self._vectors.nbytes)
        self._sum.put(portion, message.keep())
        self._work()

    def _read(self, message: Message) -> None:
        self._t.send(message.frm, WHOLE, (), [x.clone() for x in self._vectors["w"]])
        self._serves = not message.meta[0]

    def _save(self, message: Message) -> None:
        found = list(self._vectors.pieces(self._w.flat.places, message.meta))
        meta = tuple((piece.name, piece.start) for piece in found)
        self._t.send(message.frm, VECTORS, meta, [piece.values.clone() for piece in found])

    def _restore(self, message: Message) -> None:
        self._vectors.restore(self._w.flat.places, dict(zip(message.meta, message.tensors, strict=True)))
        message.release()
        self._t.send(message.frm, RESTORED)

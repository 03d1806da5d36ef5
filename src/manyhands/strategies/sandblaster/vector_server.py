"""VectorServer: the loop of a rank that holds a shard of all vectors (sharded_vectors.py is its client).

    coordinator ---- COMMAND: some operations ------>  server      <-- FETCH, PORTION ---- replica
                <--- RESULT: a number, if asked for                --- FETCHED: the weights of a pass -->

A pass is a point where the gradient is wanted: w + t d. Passes are numbered. A replica that asks for the weights of a
finished pass gets those of the newest, and sees by the number that its gradient is not needed any more; a request for a
pass that was not opened here yet waits. A gradient of an old pass, or a second one of a portion, is dropped. The
operation that closes a pass waits, with all operations after it, until every portion has arrived: so the result of a
later operation implies that none is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.flat import Span
from manyhands.core.port import Message, Tag, recv
from manyhands.core.worker import Worker
from manyhands.strategies.sandblaster.vectors import InOrder, Vectors

COMMAND, RESULT = Tag("command", credit=64, carries="nothing"), Tag("result", credit=64, carries="nothing")
FETCH, FETCHED = Tag("fetch", carries="nothing"), Tag("fetched", carries="floats")
PORTION = Tag("portion", carries="floats")
READ, WHOLE = Tag("read", carries="nothing"), Tag("whole", carries="floats")
SAVE_VECTORS, VECTORS = Tag("save-vectors", carries="nothing"), Tag("vectors", carries="floats")
RESTORE_VECTORS, RESTORED = Tag("restore-vectors", carries="floats"), Tag("restored", carries="nothing")

HANDLED = COMMAND, FETCH, PORTION, READ, SAVE_VECTORS, RESTORE_VECTORS


class VectorServer:
    """Executes the operations of the coordinator on one shard of all vectors."""

    def __init__(self, w: Worker, coordinator: int, spans: dict[int, list[Span]]) -> None:
        self._w = w
        self._t = w.transport
        self._coordinator = coordinator
        self._needed = {coordinator, *spans}
        mine = spans[w.rank]
        self._vectors = Vectors(w.ops, mine, [w.flat.weights(span) for span in mine])
        self._pass = 0
        self._point: list[Tensor] = []
        self._sum = InOrder(w.ops, ())
        self._waiting: list[tuple[int, int]] = []
        self._queue: deque[tuple[Any, ...]] = deque()
        self._serves = True
        v = self._vectors
        self._operations: dict[str, Callable[..., None]] = {
            "copy": v.copy,
            "scale": v.scale,
            "add": v.add,
            "drop": v.drop,
        }
        self._operations |= {"open": self._open, "close": self._close}
        self._questions: dict[str, Callable[..., float]] = {"dot": v.dot, "size": v.size, "reach": v.reach}

    @torch.no_grad()
    def serve(self) -> None:
        """Handle messages until the answer has been read."""
        handle = {
            COMMAND: self._enqueue,
            FETCH: self._fetch,
            PORTION: self._add_portion,
            READ: self._read,
            SAVE_VECTORS: self._save,
            RESTORE_VECTORS: self._restore,
        }
        while self._serves:
            try:
                message = recv(self._t, *HANDLED)
            except PeerLost as loss:
                if loss.rank in self._needed:
                    raise
            else:
                handle[message.tag](message)

    def _enqueue(self, message: Message) -> None:
        self._queue += message.meta
        self._execute()

    def _execute(self) -> None:
        """Execute queued operations, as far as the arrived portions allow; then send the results."""
        results = []
        while self._queue and not self._waits(*self._queue[0]):
            name, *arguments = self._queue.popleft()
            if name in self._questions:
                results.append(self._questions[name](*arguments))
            else:
                self._operations[name](*arguments)
        for result in results:
            self._t.send(self._coordinator, RESULT, (result,))

    def _waits(self, name: str, *arguments: Any) -> bool:
        return name == "close" and not self._sum.is_complete(arguments[1])

    def _open(self, number: int, t: float) -> None:
        """Begin a pass at w + t d, in new memory: that of the last one may still be lent."""
        self._pass = number
        self._point = [self._w.ops.clone(x) for x in self._vectors["w"]]
        if t:
            for x, d in zip(self._point, self._vectors["d"], strict=True):
                self._w.ops.add(x, d, scale=t)
        self._sum = InOrder(self._w.ops, self._point)
        waiting, self._waiting = self._waiting, []
        for rank, wanted in waiting:
            self._send_point(rank, wanted)

    def _close(self, name: str, portions: int, samples: int) -> None:
        """End a pass: store the mean gradient under a name."""
        self._vectors.put(name, [self._w.ops.divide(x, samples) for x in self._sum.total])

    def _fetch(self, message: Message) -> None:
        self._send_point(message.frm, message.meta[0])

    def _send_point(self, rank: int, wanted: int) -> None:
        if wanted > self._pass:
            self._waiting.append((rank, wanted))
        else:
            self._t.send(rank, FETCHED, (self._pass,), self._point)

    def _add_portion(self, message: Message) -> None:
        number, portion = message.meta
        if number != self._pass or self._sum.has(portion):
            message.release()
            return
        self._sum.put(portion, self._w.ops.keep(message))
        self._execute()

    def _read(self, message: Message) -> None:
        self._t.send(message.frm, WHOLE, (), [x.clone() for x in self._vectors["w"]])
        self._serves = not message.meta[0]

    def _save(self, message: Message) -> None:
        found = list(self._vectors.state_slices(self._w.flat.slots, message.meta))
        meta = tuple((piece.name, piece.start) for piece in found)
        self._t.send(message.frm, VECTORS, meta, [piece.values.clone() for piece in found])

    def _restore(self, message: Message) -> None:
        self._vectors.restore(self._w.flat.slots, dict(zip(message.meta, message.tensors, strict=True)))
        message.release()
        self._t.send(message.frm, RESTORED)

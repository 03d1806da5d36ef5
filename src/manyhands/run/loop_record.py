"""Records of a user's own loop: a line for each step of a rank, and the user's own numbers (`hands.record`).

    hands.record(loss=loss)            the line of the step that is under way, or of the last one
    hands.record(accuracy=0.97)        on the lead an evaluation, after the end of training the result
    hands.record(gradient_norm=1.3)    a line of its own

The line of a step is held back until the next one, so that its loss can still be added: a loop that calls `backward`
itself does not pass its loss to the strategy. The lead's first line is the header. `run/script_record.py` is the other
end, in the launching process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.loop_worker import LoopWorker
from manyhands.core.port import Transport
from manyhands.core.recipe import recipe_of
from manyhands.core.record import Line, encoded
from manyhands.core.strategy import Strategy
from manyhands.engines.local import LineBuffer
from manyhands.run.loop_collectives import LoopCollectives
from manyhands.run.result import sha256
from manyhands.run.training import Training
from manyhands.runtime.transport.transport import RealTransport
from manyhands.strategies.pipeline_plan import drawn_schedule

STEPWISE = ("step", "evaluation", "pause", "numbers", "memory")
"""Kinds of lines that the launcher copies to the file as they are."""
ACCURACY = "accuracy"
"""The number that `report` and `compare --target` know as the result of an evaluation."""


class LineSender:
    """Sends lines to the launching process, as (session, kind, encoded lines)."""

    def __init__(self, transport: RealTransport) -> None:
        self._control, self._session = transport.control, transport.spec.session
        self._buffer = LineBuffer(lambda parcel: self._send("lines", parcel))
        self._has_ended = False

    def __call__(self, line: Line) -> None:
        """Send a line: those of steps many together, all others at once."""
        if line["kind"] in STEPWISE:
            self._buffer.add(line)
            if not self._has_ended:
                return
        self._buffer.send()
        if line["kind"] not in STEPWISE:
            self._has_ended = self._has_ended or line["kind"] == "rank_end"
            self._send(line["kind"], encoded(line))

    def _send(self, kind: str, parcel: bytes) -> None:
        self._control.send_lines([self._session, kind, parcel])


def line_sender(transport: Transport) -> LineSender | None:
    """What takes the lines of this rank; None if its launcher keeps no record."""
    return LineSender(transport) if isinstance(transport, RealTransport) and transport.spec.records else None


class LoopLines:
    """The lines of one rank.

    Args:
        training: this rank's part in the job.
        strategy: the method, as the user gave it.
        write: takes each line.
    """

    def __init__(self, training: Training, strategy: Strategy, write: Callable[[Line], None]) -> None:
        self._training, self._strategy, self._write = training, strategy, write
        self._last: Line | None = None
        self._loss: float | None = None
        self._has_header = training.worker.rank != training.worker.workers[0]
        self.seconds: float | None = None
        training.run.observe = self.add

    def add(self, line: Line) -> None:
        """Take a line of the life cycle; that of a step is held back until the next one."""
        if line["kind"] == "step":
            self._complete(line)
        if not self._has_header:
            self._has_header = True
            self._write(self._header(line.get("samples", self._training.worker.batch_size)))
        if line["kind"] == "step":
            self.release()
            self._last = line
            return
        if line["kind"] == "memory":
            self.seconds = self._training.worker.transport.now()
        self._write(line)

    def _complete(self, line: Line) -> None:
        """Add to a step what only the user's loop knows."""
        if self._loss is not None:
            line["loss"], self._loss = self._loss, None

    def release(self) -> None:
        """Write the line that was held back."""
        if self._last is not None:
            self._write(self._last)
            self._last = None

    def set_loss(self, loss: float | None) -> None:
        """The loss of the step that is under way or, between two steps, of the last one."""
        w = self._training.worker
        if isinstance(w, LoopWorker) and w.in_step:
            self._loss = loss
        elif self._last is not None:
            self._last["loss"] = loss
        else:
            raise Refused("a loss was recorded outside all steps, but belongs to one: give it another name, or step")

    def _header(self, batch_size: int) -> Line:
        """What this rank knows of the run; the launching process adds the rest."""
        w, strategy = self._training.worker, self._training.strategy
        t, traits = w.transport, strategy.traits
        return {
            "kind": "header",
            "method": str(recipe_of(self._strategy)),
            "strategy": repr(strategy),
            "bounded": traits.lockstep or traits.bounded,
            "lag": traits.lag,
            "lag_counts": traits.lag_counts,
            "workers": len(w.workers),
            "servers": len(w.servers),
            "replicas": self._training.replicas,
            "seed": w.seed,
            "start": 0,
            "steps": self._training.announced or None,
            "batch_size": batch_size,
            "evaluate_every": None,
            "remarks": list(strategy.remarks(w.steps)),
            "participants": [{"role": role, "rank": rank, "host": t.hosts[rank]} for rank, role in enumerate(t.roles)],
            **drawn_schedule(strategy, len(w.workers), batch_size),
        }

    def end(self, is_lead: bool | None) -> None:
        """This rank has ended: what it knows of the result; `is_lead` is None if it has failed."""
        self.release()
        w = self._training.worker
        seconds = w.transport.now() if self.seconds is None else self.seconds
        line = {"kind": "rank_end", "rank": w.rank, "seconds": seconds, "bytes_sent": w.transport.bytes_sent}
        if is_lead:
            line["weights_sha256"] = sha256({name: p.detach() for name, p in w.model.named_parameters()})
        self._write(line)


class LoopRecord(LoopCollectives):
    """A part of `Hands`: what is written to the record."""

    _observe: Callable[[Line], None] | None = None
    _lines: LoopLines | None = None
    _ended = False

    def record(self, **numbers: float | Tensor | None) -> None:
        """Add numbers of your own to the record of this run (`manyhands run --out`); without a record, nothing happens.

        Each is a finite number, a tensor with one, or None if it is unknown. `loss` is that of this rank's step under
        way, or of its last one. `accuracy` on the lead is an evaluation, which reports and `compare --target` read.
        """
        found = {name: _number(name, value) for name, value in numbers.items()}
        if self._joined is None or not self._joined.has_begun:
            raise Refused("record was called before training began: call it after prepare, share or the first step")
        if self._lines is None or self._observe is None:
            return
        if "loss" in found and not self._ended:
            self._lines.set_loss(found.pop("loss"))
        if ACCURACY in found and self.lead:
            self._evaluated(found.pop(ACCURACY))
        if found:
            self._add("numbers", step=self._step, rank=self.transport.rank, time=self.transport.now(), values=found)

    def _evaluated(self, accuracy: float | None) -> None:
        if self._ended:
            self._observe and self._observe({"kind": "result", "test_accuracy": accuracy})
        else:
            self._add("evaluation", evaluated=self._step, time=self.transport.now(), accuracy=accuracy)

    @property
    def _step(self) -> int:
        return 0 if self._joined is None else self._joined.worker.step

    def _add(self, kind: str, **fields: Any) -> None:
        assert self._lines is not None
        self._lines.add({"kind": kind, **fields})

    @contextmanager
    def answer(self) -> Iterator[nn.Module]:
        """Within it, the model holds the method's answer on every rank: the centre, the mean, all stages.

        It is for evaluating and saving; then training continues as if nothing had happened. Several prepared models
        hold it together, and a `ModuleList` of them is returned. In the record it is a pause.
        """
        t = self.transport
        began, sent = t.now(), t.bytes_sent
        with super().answer() as model:
            yield model
        if self._lines is not None:
            line = {"paused": t.rank, "from": began, "to": t.now(), "bytes": t.bytes_sent - sent}
            self._add("pause", **line)

    def _begin_record(self, strategy: Strategy) -> None:
        """Record this training from now on."""
        if self._observe is not None and self._joined is not None:
            self._lines = LoopLines(self._joined, strategy, self._observe)

    def _end_record(self, is_lead: bool | None) -> None:
        """Write what was held back, and the end; `is_lead` is None if this rank has failed."""
        if self._lines is not None:
            self._lines.end(is_lead)


def _number(name: str, value: object) -> float | None:
    """A number for the record; refused if it is none, or not finite."""
    if (isinstance(value, Tensor) and value.numel() == 1) or isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise Refused(f"{name} is a {type(value).__name__}, but must be a number, a tensor with one number, or None")
    refuse_unless(value is None or math.isfinite(value), name, value, "finite, or None if it is unknown")
    return value if value is None or isinstance(value, int) else float(value)

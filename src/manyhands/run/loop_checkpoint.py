"""Save and resume a user's own loop: `hands.save` and `hands.load`.

    save    all workers, between two steps: quiesce, gather; the lead writes one checkpoint; training continues
    load    all ranks, before the first step: the lead reads and verifies the checkpoint and sends it to the others

Only the lead's disk is used, since hosts need not share one. A checkpoint has the form of `mh.train`'s: complete or
absent, with a SHA-256 of every file, and nothing in it is pickled. Another number of workers may resume: they continue
at the same number of batches of the pass, and new workers draw random numbers of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from manyhands.core.broadcast import START
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.gather import gather
from manyhands.core.port import Tag, recv
from manyhands.core.snapshot import load_snapshot
from manyhands.core.state import Snapshot, section, under
from manyhands.core.strategy import Saved, Strategy
from manyhands.run.loop_collectives import LoopCollectives
from manyhands.run.loop_resume import Resume
from manyhands.run.loop_state import LOOP, CheckpointWriter, LoopState, of_ranks
from manyhands.run.plain_values import decode, encode
from manyhands.run.prepared import Prepared
from manyhands.run.training import Training
from manyhands.runtime.checkpoint import load_checkpoint
from manyhands.splits.data import Share

LOADED = Tag("loop-loaded")
PARTS = ("weights", "buffers", "state")


class LoopCheckpoints(LoopCollectives):
    """A part of `Hands`: saving and resuming."""

    _strategy: Strategy
    _seed: int
    _prepared: Prepared | None
    _share: Share | None
    _loop: LoopState

    # -- saving -----------------------------------------------------------------------------------

    def save(self, path: str | Path, extra: Mapping[str, Any] | None = None, *, keep: int = 2) -> Path:
        """Save the run as a checkpoint in the folder `path`, on the lead; all workers call it between two steps.

        Saved are the weights, the state of the method, of the optimizers, schedulers and scalers that were prepared,
        the position in the data, and random states. Training then continues as if nothing had been saved.

        Args:
            path: a folder of checkpoints, such as one for each run; it is made if it is not there.
            extra: values of your own, which `load` returns: numbers, strings, None, and lists and dicts of them.
            keep: how many checkpoints stay in the folder.
        """
        training = self._ready("save")
        self._refuse_saving(training, keep)
        loop, w = self._loop, training.worker
        given = {key: encode(value, f"extra[{key!r}]") for key, value in (extra or {}).items()}
        objects, tensors = loop.of_objects()
        training.position.at_call("save")
        writer = CheckpointWriter(Path(path), keep, loop.folders)
        with torch.no_grad():
            mine, own = loop.of_rank(w, self._share)
            ranks = gather(w, (mine, *own), tuple(own.values()))
            if ranks is not None:
                of_each, more = of_ranks(ranks)
                facts = {**self._form(training), "objects": objects, "ranks": of_each}
                writer.add({**self._facts(training), LOOP: facts, "extra": given}, {**tensors, **more})
            draws = w.random.getstate()
            training.run.pause(None, writer.save, None)
            w.random.setstate(draws)  # a pause with a checkpoint seeds it anew
            training.changes.note()
        outcomes = self._values("save", writer.outcome)
        loop.extra = dict(extra or {})
        return writer.path_in(outcomes.values())

    def _start_prepared(self) -> None:
        if self._prepared is not None:
            self._prepared.start()

    def _ready(self, name: str) -> Training:
        """The training, which has begun; in a prepared loop it does so here if it has not."""
        self._start_prepared()
        if self._joined is None or not self._joined.has_begun:
            raise Refused(f"{name} was called before the first step, but there is nothing to save yet")
        return self._joined

    def _refuse_saving(self, training: Training, keep: int) -> None:
        refuse_unless(keep >= 1, "keep", keep, ">= 1")
        training.refuse_within_step("save")
        training.refuse_within_answer("save")
        if not training.strategy.traits.resumable:
            raise Refused(f"a {type(training.strategy).__name__} cannot be saved: its state has no end between steps")

    def _facts(self, training: Training) -> dict[str, Any]:
        """What must fit to resume, and what may have changed."""
        w = training.worker
        return {
            "kind": training.strategy.kind,
            "seed": self._seed,
            "workers": len(w.workers),
            "servers": len(w.servers),
            "batch_size": w.batch_size,
            "strategy": repr(self._strategy),
        }

    def _form(self, training: Training) -> dict[str, Any]:
        return {"form": "prepare" if self._prepared is not None else "step", "replicas": training.replicas}

    # -- loading ----------------------------------------------------------------------------------

    def load(self, path: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint of `save`; returns its `extra`. All ranks call it before the first step.

        In a prepared loop it comes directly after `prepare`. Only the lead reads the checkpoint; if that is damaged,
        missing or of another run, all ranks refuse it with the same words.

        Args:
            path: a checkpoint, or a folder of them, of which the newest is loaded.
        """
        training = self._joined
        if training is None or training.has_begun:
            when = "before prepare" if training is None else "after training had begun"
            raise Refused(f"load was called {when}, but must be called directly after prepare, or before share or step")
        training.unite()
        name, facts, tensors = self._read(training, Path(path))
        if self.transport.role == "worker":
            with torch.no_grad():
                self._restore(training, name, facts, tensors)
        self._loop.folders.add(Path(name).parent.resolve())
        self._loop.extra = decode(facts["extra"], {})
        return dict(self._loop.extra)

    def _read(self, training: Training, path: Path) -> tuple[str, dict[str, Any], Saved]:
        """The name, facts and tensors of a checkpoint, from the lead; its refusal is raised on all ranks."""
        w = training.worker
        if w.rank == w.lead:
            return self._read_for_all(training, path)
        message = recv(w.transport, LOADED, START, frm=w.lead)
        if message.tag.name == START.name:
            raise Refused(f"rank {w.rank} calls hands.load, but rank {message.frm} began without: call it on all ranks")
        refusal, *rest = message.meta
        if refusal:
            raise Refused(refusal)
        name, text, *names = rest
        return name, json.loads(text), dict(zip(names, message.keep(), strict=True))

    def _read_for_all(self, training: Training, path: Path) -> tuple[str, dict[str, Any], Saved]:
        """Read a checkpoint, on the lead, and send it to the others; servers that wait to serve get it later."""
        t = self.transport
        others = t.peers() if self._prepared is None else t.peers("worker")
        try:
            name, facts, tensors = self._verified(training, path)
        except Refused as error:
            for rank in others:
                t.send(rank, LOADED, (str(error),))
            raise
        for rank in others:
            some = tensors if t.roles[rank] == "worker" else {}
            t.send(rank, LOADED, ("", name, json.dumps(facts), *some), tuple(some.values()))
        return name, facts, tensors

    def _verified(self, training: Training, path: Path) -> tuple[str, dict[str, Any], Saved]:
        """Read a checkpoint, on the lead; refused if it is not one of a loop like this."""
        saved = load_checkpoint(path)
        loop = saved.facts.get(LOOP)
        if not isinstance(loop, dict):
            raise Refused(f"{saved.path} was saved by mh.train, but must be a checkpoint of hands.save")
        here, there = {**self._facts(training), **self._form(training)}, {**saved.facts, **loop}
        for key, words in {"kind": "the kind of strategy", "seed": "seed", "form": "the form of the loop"}.items():
            refuse_unless(here[key] == there[key], words, repr(here[key]), f"{there[key]!r}, as in {saved.path}")
        self._loop.refuse_others(loop)
        parts = saved.weights, saved.buffers, saved.state
        tensors = [under(name, some) for name, some in zip(PARTS, parts, strict=True)]
        return str(saved.path), dict(saved.facts), {**tensors[0], **tensors[1], **tensors[2]}

    def _restore(self, training: Training, name: str, facts: dict[str, Any], tensors: Saved) -> None:
        """Load all that is this worker's, on every worker."""
        w, loop = training.worker, facts[LOOP]
        weights, buffers, state = (section(tensors, part) for part in PARTS)
        same = facts["workers"] == len(w.workers)
        known = {int(rank): one["step"] for rank, one in loop["ranks"].items()}
        positions = known if same and len(known) == len(w.workers) else {}
        strategy_state = {key: x for key, x in state.items() if not key.startswith(f"{LOOP}/")}
        snapshot = Snapshot(facts["step"], weights, buffers, strategy_state, positions)
        load_snapshot(w, snapshot)
        self._loop.load_objects(loop, state)
        random = self._loop.load_rank(w, loop, state, training.replicas)
        training.resume = Resume(name, snapshot, random)

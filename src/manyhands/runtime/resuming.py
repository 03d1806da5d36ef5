"""From a run to its checkpoints and back: what must fit, and what may have changed in between.

must fit        the task, the kind of strategy, the seed, the model's parameters
may change      the number of workers, servers and stages, the batch size, knobs such as the learning rate

Where a run stands is counted in samples. With the same replicas and batch size each worker goes on at its own place in
the data; otherwise all go on at the place that the samples consumed so far amount to, rounded down to whole steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.protocols import Strategy
from manyhands.core.saving import Snapshot
from manyhands.runtime.checkpoint import Checkpoint, found_in, load_checkpoint, save_checkpoint

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints, in the folder of the run."""


@dataclass(frozen=True)
class Terms:
    """What a checkpoint says about its run."""

    task: str
    strategy: Strategy
    seed: int
    batch_size: int
    workers: int
    servers: int
    replicas: int

    @property
    def kind(self) -> str:
        """The kind of strategy; its knobs may change."""
        return type(self.strategy).__name__

    def replica(self, rank: int) -> int:
        """Of which copy of the model a worker is part."""
        return rank * self.replicas // self.workers


def saver(folder: Path, terms: Terms) -> Callable[[Snapshot], None]:
    """A function that saves a run at rest in a folder."""
    names = ("task", "kind", "seed", "batch_size", "workers", "servers", "replicas")
    known = {name: getattr(terms, name) for name in names} | {"strategy": repr(terms.strategy)}

    def save(snapshot: Snapshot) -> None:
        firsts = {terms.replica(rank): place for rank, place in snapshot.positions.items()}
        positions = [firsts.get(replica) for replica in range(terms.replicas)]
        facts = {**known, "positions": positions}
        save_checkpoint(folder, snapshot.step, facts, snapshot.weights, snapshot.buffers, snapshot.state)

    return save


def refuse_to_mix(folder: Path, resume: Path | None) -> None:
    """Refuse to save a run among the checkpoints of another one, which it would remove."""
    found = found_in(folder)
    same = resume is not None and folder.resolve() in (resume.resolve(), resume.resolve().parent)
    if found and not same:
        raise Refused(f"{found[0].path} is there already: resume from {folder}, or save somewhere else")


def folder_of(path: str | Path) -> Path:
    """Where to look for checkpoints: in the folder of a run there is one for them."""
    path = Path(path)
    return path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path


def resumed(path: Path, terms: Terms, steps: int) -> Snapshot:
    """Where a run is to go on; refused if the checkpoint is that of something else."""
    saved = load_checkpoint(path)
    facts = saved.facts
    for name in ("task", "kind", "seed"):
        value, bound = getattr(terms, name), facts.get(name)
        refuse_unless(value == bound, _words(name), repr(value), f"{bound!r}, as in {saved.path}")
    step, replicas, batch_size = (_number(saved, name) for name in ("step", "replicas", "batch_size"))
    start = step * replicas * batch_size // (terms.replicas * terms.batch_size)
    refuse_unless(steps > start, "steps", steps, f"> {start}, where {saved.path} is")
    same = (replicas, batch_size) == (terms.replicas, terms.batch_size)
    positions = _positions(facts.get("positions") if same else None, terms, start)
    return Snapshot(start, saved.weights, saved.buffers, saved.state, positions)


def _number(saved: Checkpoint, name: str) -> int:
    value = saved.facts.get(name)
    if not isinstance(value, int):
        raise Refused(f"{name} is {value!r} in {saved.path}, but must be a number to be resumed")
    return value


def _words(name: str) -> str:
    return {"task": "the task", "kind": "the kind of strategy"}.get(name, name)


def _positions(known: Any, terms: Terms, start: int) -> dict[int, int]:
    """Where each worker goes on; if one was lost, its place is not known, and all go on at the same."""
    ranks: Sequence[int] = range(terms.workers)
    if isinstance(known, list) and len(known) == terms.replicas and all(isinstance(one, int) for one in known):
        return {rank: known[terms.replica(rank)] for rank in ranks}
    return dict.fromkeys(ranks, start)

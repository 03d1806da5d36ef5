"""From a run to its checkpoints and back: what must fit, and what may have changed in between.

must fit        the task, the kind of strategy, the seed, the model's parameters
may change      the number of workers, servers and stages, the batch size, knobs such as the learning rate

Progress is counted in samples. With the same replicas and batch size each worker continues at its own position in the
data; otherwise all continue at the position that the samples consumed so far amount to, rounded down to whole steps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.state import Snapshot
from manyhands.runtime.checkpoint import Checkpoint, found_in, load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    from manyhands.run.spec import RunSpec

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints, in the folder of the run."""

MUST_FIT = {"task": "the task", "kind": "the kind of strategy", "seed": "seed"}
"""Facts that a resumed run shares with its checkpoint, and what a refusal calls them."""


def _facts(spec: RunSpec) -> dict[str, Any]:
    """What a checkpoint says about its run; the kind of a strategy does not include its knobs, which may change."""
    return {
        "task": spec.task.name,
        "kind": spec.strategy.kind,
        "seed": spec.seed,
        "batch_size": spec.batch_size,
        "workers": spec.workers,
        "servers": spec.servers,
        "replicas": spec.replicas,
        "strategy": repr(spec.strategy),
    }


def saver(folder: Path, spec: RunSpec) -> Callable[[Snapshot], None]:
    """A function that saves a quiesced run in a folder."""
    known = _facts(spec)

    def save(snapshot: Snapshot) -> None:
        positions = {spec.replica(rank): position for rank, position in snapshot.positions.items()}
        facts = {**known, "positions": [positions.get(replica) for replica in range(spec.replicas)]}
        save_checkpoint(folder, snapshot.step, facts, snapshot.weights, snapshot.buffers, snapshot.state)

    return save


def refuse_to_mix(folder: Path, resume: Path | None) -> None:
    """Refuse to save a run among the checkpoints of another one, which it would remove."""
    found = found_in(folder)
    same = resume is not None and folder.resolve() in (resume.resolve(), resume.resolve().parent)
    if found and not same:
        raise Refused(f"{found[0].path} is there already: resume from {folder}, or save somewhere else")


def folder_of(path: str | Path) -> Path:
    """The folder of checkpoints that a path means: the one inside it if it is the folder of a run, else itself."""
    path = Path(path)
    return path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path


def resumed(path: Path, spec: RunSpec) -> Snapshot:
    """The state from which a run continues; refused if the checkpoint is that of a different run."""
    saved, facts = load_checkpoint(path), _facts(spec)
    for name, words in MUST_FIT.items():
        bound = saved.facts.get(name)
        refuse_unless(facts[name] == bound, words, repr(facts[name]), f"{bound!r}, as in {saved.path}")
    step, replicas, batch_size = (_number(saved, name) for name in ("step", "replicas", "batch_size"))
    start = step * replicas * batch_size // (spec.replicas * spec.batch_size)
    refuse_unless(spec.steps > start, "steps", spec.steps, f"> {start}, where {saved.path} is")
    same = (replicas, batch_size) == (spec.replicas, spec.batch_size)
    positions = _positions(saved.facts.get("positions") if same else None, spec, start)
    return Snapshot(start, saved.weights, saved.buffers, saved.state, positions)


def _number(saved: Checkpoint, name: str) -> int:
    value = saved.facts.get(name)
    if not isinstance(value, int):
        raise Refused(f"{name} is {value!r} in {saved.path}, but must be a number to be resumed")
    return value


def _positions(known: Any, spec: RunSpec, start: int) -> dict[int, int]:
    """Where each worker continues; if one was lost, its position is not known, and all continue at `start`."""
    if isinstance(known, list) and len(known) == spec.replicas and all(isinstance(one, int) for one in known):
        return {rank: known[spec.replica(rank)] for rank in range(spec.workers)}
    return dict.fromkeys(range(spec.workers), start)

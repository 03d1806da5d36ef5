"""LoopState: what a checkpoint of a user's own loop holds besides the method's weights and state.

    of the lead      the optimizers' state and options, schedulers, scalers: equal on all ranks
    of each worker   its position in every loader and in `share`, its random state

Numbers and words are in the manifest's facts, as JSON; tensors are in state.safetensors, below `loop/`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from manyhands.core.errors import ManyhandsError, Refused, refuse_unless
from manyhands.core.gather import Gathered
from manyhands.core.state import Snapshot, section, under
from manyhands.core.strategy import Saved
from manyhands.core.worker import Worker
from manyhands.run.loader_position import LoaderPosition
from manyhands.run.plain_values import decode, encode
from manyhands.run.random_state import random_state, restore_random
from manyhands.run.share_position import SharePosition
from manyhands.runtime.checkpoint import save_checkpoint
from manyhands.runtime.resume import refuse_to_mix
from manyhands.splits.data import Share

Facts = dict[str, Any]
LOOP = "loop"


@dataclass
class LoopState:
    """The objects of a user's loop whose state is saved with it.

    Args:
        objects: optimizers, schedulers and scalers, by kind, in the order of `prepare`.
        positions: those of the loaders, in that order.
    """

    objects: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    positions: list[LoaderPosition] = field(default_factory=list)
    share: SharePosition = field(default_factory=SharePosition)
    extra: dict[str, Any] = field(default_factory=dict)
    """What the user has saved last."""
    folders: set[Path] = field(default_factory=set)
    """Where this run has saved, and what it was resumed from."""

    def watch(self, before_batch: Callable[[], None], keeps_open: Callable[[], bool]) -> None:
        """Call `before_batch` when the loop asks for data; `keeps_open` says whether it leaves data to be resumed."""
        self._callbacks = before_batch, keeps_open
        self.share.before_batch, self.share.keeps_open = self._callbacks

    def tracked(self, loader: Any) -> Any:
        """The same loader, whose position is saved from now on if it has one."""
        if hasattr(loader, "position"):
            self.positions.append(loader.position)
            loader.position.before_batch, loader.position.keeps_open = self._callbacks
        return loader

    # -- saving -----------------------------------------------------------------------------------

    def of_objects(self) -> tuple[Facts, Saved]:
        """What is equal on all ranks."""
        tensors: Saved = {}
        facts = {
            kind: [[_name(one), encode(one.state_dict(), f"{kind}{i}", tensors)] for i, one in enumerate(some)]
            for kind, some in self.objects.items()
        }
        return facts, under(f"{LOOP}/objects", tensors)

    def of_rank(self, w: Worker, share: Share | None) -> tuple[str, Saved]:
        """What this worker alone has, as JSON and tensors."""
        tensors = random_state(w.random)
        for number, position in enumerate(self.positions):
            tensors |= under(f"loader{number}", position.began())
        loaders = [one.facts() for one in self.positions]
        return json.dumps({"step": w.step, "loaders": loaders, "share": self.share.facts(share)}), tensors

    # -- loading ----------------------------------------------------------------------------------

    def refuse_others(self, facts: Facts) -> None:
        """Refuse a checkpoint of other objects than these."""
        for kind, some in self.objects.items():
            here, there = [_name(one) for one in some], [name for name, _ in facts["objects"].get(kind, [])]
            words = f"{kind}s given to prepare are"
            if here != there:
                raise Refused(f"the {words} {_listed(here)}, but must be {_listed(there)}, as in the checkpoint")
        for one in facts["ranks"].values():
            refuse_unless(
                len(one["loaders"]) == len(self.positions),
                "the number of loaders given to prepare",
                len(self.positions),
                f"{len(one['loaders'])}, as in the checkpoint",
            )

    def load_objects(self, facts: Facts, saved: Saved) -> None:
        """Continue with the state of optimizers, schedulers and scalers."""
        tensors = section(saved, f"{LOOP}/objects")
        for kind, some in self.objects.items():
            for one, (name, state) in zip(some, facts["objects"][kind], strict=True):
                try:
                    one.load_state_dict(decode(state, tensors))
                except (ValueError, KeyError) as error:
                    raise Refused(f"the {name} does not fit the one in the checkpoint: {error}") from None

    def load_rank(self, w: Worker, facts: Facts, saved: Saved, replicas: int) -> Saved:
        """Continue at this worker's positions and with its random state, which is returned; empty if there is none."""
        ranks = [facts["ranks"][key] for key in sorted(facts["ranks"], key=int)]
        mine = section(saved, f"{LOOP}/{_key(w.rank)}")
        first = section(saved, f"{LOOP}/{_key(0)}")
        of_replicas, replica = ranks[:: max(1, len(ranks) // facts["replicas"])], w.rank * replicas // len(w.workers)
        for number, position in enumerate(self.positions):
            began = section(mine, f"loader{number}") or section(first, f"loader{number}")
            position.continue_from([one["loaders"][number] for one in of_replicas], replica, began)
        self.share.continue_from([one["share"] for one in of_replicas], replica, replicas)
        if mine:
            restore_random(mine)
        return mine


def of_ranks(gathered: Gathered) -> tuple[Facts, Saved]:
    """The facts of all workers, by rank, and their tensors."""
    facts: Facts = {}
    tensors: Saved = {}
    for rank, ((text, *names), values) in gathered.items():
        facts[str(rank)] = json.loads(text)
        tensors |= under(f"{LOOP}/{_key(rank)}", dict(zip(names, values, strict=True)))
    return facts, tensors


class CheckpointWriter:
    """Writes one checkpoint on the lead; what became of it is for all ranks to know.

    Args:
        folder: the folder of checkpoints.
        keep: how many of them stay.
        known: the folders that this run may save in although there are checkpoints; the folder becomes one of them.
    """

    def __init__(self, folder: Path, keep: int, known: set[Path]) -> None:
        self._folder, self._keep, self._known = folder, keep, known
        self.outcome = ""
        """On the lead, after `save`: "saved" or "failed", and the path or the reason."""

    def add(self, facts: Facts, tensors: Saved) -> None:
        """What is saved besides the snapshot."""
        self._facts, self._tensors = facts, tensors

    def save(self, one: Snapshot) -> None:
        """Write; an error is an outcome, so that no other rank waits for this one."""
        try:
            if self._folder.resolve() not in self._known:
                refuse_to_mix(self._folder, None)
            state = {**one.state, **self._tensors}
            path = save_checkpoint(
                self._folder, one.step, self._facts, one.weights, one.buffers, state, keep=self._keep
            )
            self.outcome = f"saved {path}"
            self._known.add(self._folder.resolve())
        except (OSError, ManyhandsError) as error:
            self.outcome = f"failed {error}"

    def path_in(self, outcomes: Iterable[Any]) -> Path:
        """The path of the checkpoint, by the outcomes of all ranks; a failure is raised."""
        word, _, text = next((one for one in outcomes if one), "failed rank 0 is lost").partition(" ")
        if word == "failed":
            raise Refused(f"nothing was saved: {text}")
        return Path(text)


class GroupOptions:
    """The options of an optimizer's groups: its memory is where the strategy has the weights, and saved there."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> Facts:
        groups = self.optimizer.param_groups
        return {"param_groups": [{name: x for name, x in one.items() if name != "params"} for one in groups]}

    def load_state_dict(self, state: Facts) -> None:
        for group, options in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update(options)


def _name(one: Any) -> str:
    return type(one.optimizer if isinstance(one, GroupOptions) else one).__name__


def _key(rank: int) -> str:
    return f"rank{rank}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"

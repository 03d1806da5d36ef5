"""Grid: any data-parallel method over teams of ranks, each of which holds one replica of the model.

                part 0      part 1            rows: a team computes one gradient (core/team.py)
     team 0     rank 0      rank 1            columns: for its part of the model, the method as always,
     team 1     rank 2      rank 3                     among as many workers as there are teams
     servers    rank 4      rank 4            a server has a shard of every part

A method only uses `w.gradient`, `w.flat`, `w.workers` and `w.transport`. Here it gets a worker whose transport is its
column, whose flat model is its part, and whose gradient is computed by its row. Updates, averages, pushes and pulls are
elementwise, so training each part by the method trains the model by the method.

A rank that loses a member of its team ends as if lost too (where the method continues after a loss): the other teams
see a lost worker in every column.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core.budget import Budget, JoinableBudget, TeamBudget
from manyhands.core.declared_state import StateParts
from manyhands.core.errors import Diverged, ManyhandsError, PeerLost, Refused, refuse_unless
from manyhands.core.gather import Gathered, gather, need_all
from manyhands.core.param_cut import ParamCuts, keep_slices, sliced_copy, sliced_work
from manyhands.core.param_groups import rule_of
from manyhands.core.port import ANY, Message, Tag
from manyhands.core.recipe import recipe_of
from manyhands.core.rule import Rule
from manyhands.core.strategy import Batch, Strategy, Traits, Weights
from manyhands.core.subgroup import Subgroup, as_job_ranks
from manyhands.core.team import Team
from manyhands.core.worker import Worker
from manyhands.splits.tied_weights import shared_names
from manyhands.strategies.column_state import ColumnState

TEAM_WATCH = Tag("team-watch", carries="nothing")
"""Never sent: a receive of it waits for the loss of a member."""


class TeamRow(Subgroup):
    """The members of a team. If one is lost, this rank ends as lost, where `ends_as_lost`."""

    ends_as_lost = False

    def recv(self, *tags: Tag, frm: int = ANY, timeout: float | None = None) -> Message | None:
        try:
            return super().recv(*tags, frm=frm, timeout=timeout)
        except PeerLost as loss:
            if self.ends_as_lost and loss.why != "left":
                self.fail_as_lost(f"its team has lost rank {loss.job_rank}")
            raise

    def watch(self) -> None:
        """Wait for the loss of a member, whatever this rank does."""
        self.recv(TEAM_WATCH)


@dataclasses.dataclass
class Grid(Strategy):
    """A method over teams.

    Args:
        outer: the method that trains each part of the model, with a team for each of its workers.
        team: how the ranks of a team compute a gradient together.
    """

    outer: Strategy
    team: Team
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)
    """What the team has determined, until it is in the record."""

    @property
    def kind(self) -> str:
        """That of the method: a run can be resumed with other teams, or without."""
        return self.outer.kind

    @property
    def rule(self) -> Rule | None:
        """That of the method."""
        return rule_of(self.outer)

    def with_rule(self, change: Callable[[Rule], Rule]) -> Strategy:
        """The same teams, and the method with another rule."""
        return dataclasses.replace(self, outer=self.outer.with_rule(change))

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(
            self.outer.traits,
            joiners=False,
            peekable=False,
            equal_replicas=False,
            keeps_changes=False,
            needs_step="a worker has only a part of the model, and no whole loss or gradient",
            needs_whole_model="its workers are teams already",
        )

    def _size(self, workers: int) -> int:
        return self.team.size or workers

    def replicas(self, workers: int) -> int:
        """As many as the method has of so many teams."""
        size = self._size(workers)
        refuse_unless(workers % size == 0, "workers", workers, f"divisible by {size}, the ranks of a team")
        return self.outer.replicas(workers // size)

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """The team must be able to divide the model, and the method to train its parts separately."""
        why = self.outer.traits.needs_whole_model
        if why:
            raise Refused(f"{recipe_of(self.outer).name} cannot be trained over teams of ranks: {why}")
        teams, size = self.replicas(workers), self._size(workers)
        self.team.check(size, batch_size, model)
        parts, cuts = [self.team.part(model, index, size) for index in range(size)], self.team.cuts(model, size)
        for part in parts:
            self.outer.check(teams, servers, batch_size, part)
        self._check_ties(model, parts, cuts)
        self._check_rule(cuts)

    def _check_rule(self, cuts: ParamCuts) -> None:
        """A rule that computes with whole parameters would take each slice for one."""
        if cuts and self.rule is not None and not self.rule.elementwise:
            raise Refused(
                f"{self.rule} computes with whole parameters, of which slices are on several ranks: "
                "use a rule that is elementwise, or a team without slices"
            )

    def _check_ties(self, model: nn.Module, parts: Sequence[nn.Module], cuts: ParamCuts) -> None:
        """Weights that several parts have stay equal only if every part applies the same gradient to them."""
        own = dict(model.named_parameters(remove_duplicate=False))
        sliced = {id(own[name]) for name in cuts}
        names = [name for name in shared_names(model, parts) if id(own[name]) not in sliced]
        if names and not self.outer.traits.lockstep:
            raise Refused(
                f"{' and '.join(names)} are one parameter of several stages, which a method that is not in lock step "
                "would change differently: use one in lock step, or cut where one stage has both"
            )

    def remarks(self, steps: int) -> Sequence[str]:
        return self.outer.remarks(steps)

    def notes(self) -> Mapping[str, Any]:
        """Those of the method; once, what the team has determined."""
        facts, self.facts = self.facts, {}
        return {**self.outer.notes(), **facts}

    # -- ranks ------------------------------------------------------------------------------------

    def setup(self, w: Worker) -> None:
        """This rank as a worker of its column (`me`), and as a member of its team (`row`)."""
        size = w.team_size
        self.shapes = {name: p.shape for name, p in w.model.named_parameters()}
        first = w.rank - w.rank % size
        self.facts = self.team.settle(w, size)
        self.me = self._member(w, w.rank - first)
        self.me.timer, self.me.random = w.timer, w.random
        self.row = TeamRow(w.transport, range(first, first + size), f"team{w.replica}")
        self.row.ends_as_lost = self.outer.traits.on_worker_loss == "continues"
        if self.row.ends_as_lost and size > 1:
            w.transport.spawn(self.row.watch, daemon=True)
        with self._as_column(w):
            self.outer.setup(self.me)
            self.team.begin(self.me, self.row)
        w.flat, w.trained = self.me.flat, self.me.trained

    def _member(self, w: Worker, index: int) -> Worker:
        """A worker, or a server, of the column that trains the part of this index.

        A worker keeps its slices of its model. A server has a model with the slices of each column.
        """
        self.cuts = self.team.cuts(w.model, w.team_size)
        column = [*w.worker_ranks[index :: w.team_size], *w.servers]
        model, is_server = w.model, w.rank in w.servers
        part = self.team.part(model, index, w.team_size)
        if is_server and self.cuts:
            model, part = sliced_copy(model, part, self.cuts, index)
        me = Worker(
            Subgroup(w.transport, column, f"part{index}"),
            w.task,
            model,
            seed=w.seed,
            steps=w.steps,
            batch_size=w.batch_size,
            data_size=w.data_size,
            rule=self.rule,
        )
        me.step = w.step
        me.trained = part
        if self.cuts and not is_server:
            if me.work is not None:
                me.work = sliced_work(me.work, model, self.cuts, index)
            keep_slices(model, self.cuts, index)
        return me

    @contextmanager
    def _as_column(self, w: Worker) -> Iterator[None]:
        """Run the method on this rank's column: what the job knows is known there, and errors name ranks of the job."""
        me = self.me
        me.step, me.steps, me.batch_size, me.data_size = w.step, w.steps, w.batch_size, w.data_size
        me.samples_in_step, me.options, me.lag = w.samples_in_step, w.options, w.lag
        try:
            with as_job_ranks():
                yield
        except Diverged as error:
            raise Diverged(w.rank, error.step, error.loss, error.what) from None
        w.lag, w.activations = me.lag, me.activations

    def share_budget(self, budget: Budget) -> Budget:
        """Teams draw from a common budget; the steps of workers in lock step are counted already."""
        return TeamBudget(budget, self.row) if isinstance(budget, JoinableBudget) else budget

    def step(self, w: Worker, batch: Batch) -> float | None:
        """The method's step, on this rank's part."""
        with self._as_column(w):
            return self.outer.step(self.me, batch)

    def finish(self, w: Worker) -> None:
        with self._as_column(w):
            self.outer.finish(self.me)
        self.me.end_passes()

    def answer(self, w: Worker) -> Weights | None:
        """The answers of all columns, joined by parameter name."""
        with self._as_column(w):
            mine = self.outer.answer(self.me) or {}
        gathered = gather(w, tuple(mine), list(mine.values()))
        if gathered is None:
            return None
        found = self._joined(gathered, w.team_size)
        if found.keys() != self.shapes.keys():
            need_all(w, gathered)
        return {name: found[name].view(shape) for name, shape in self.shapes.items()}

    def _joined(self, gathered: Gathered, size: int) -> dict[str, Tensor]:
        """Whole parameters, of what the columns have; without those of which a slice is missing."""
        found: dict[str, Tensor] = {}
        missing: dict[str, set[int]] = {name: set(cut.ranges) for name, cut in self.cuts.items()}
        for rank, (names, xs) in gathered.items():
            for name, x in zip(names, xs, strict=True):
                if name in self.cuts:
                    whole = found.setdefault(name, x.new_empty(self.shapes[name]))
                    self.cuts[name].put(whole, rank % size, x)
                    missing[name].discard(rank % size)
                elif not _equal(found.setdefault(name, x), x):
                    raise ManyhandsError(
                        f"{name} belongs to several stages and differs between them: the method does not treat the "
                        "parts of the model alike (a codec, perhaps); cut where one stage has it"
                    )
        return {name: x for name, x in found.items() if not missing.get(name)}

    def serve(self, w: Worker) -> None:
        """A server of every column, each in an activity of its own."""
        self.team.settle(w, w.team_size)
        columns = [w.transport.spawn(partial(self._serve_column, w, index)) for index in range(w.team_size)]
        for column in columns:
            column.join()

    @torch.no_grad()
    def _serve_column(self, w: Worker, index: int) -> None:
        with as_job_ranks():
            copy.deepcopy(self.outer).serve(self._member(w, index))

    # -- checkpoints ------------------------------------------------------------------------------

    def quiesce(self, w: Worker) -> None:
        with self._as_column(w):
            self.outer.quiesce(self.me)

    def resume(self, w: Worker) -> None:
        with self._as_column(w):
            self.outer.resume(self.me)

    def restored(self, w: Worker) -> None:
        with self._as_column(w):
            self.outer.restored(self.me)

    def declared_state(self, w: Worker) -> StateParts:
        """That of the method in every column: what only its lead saves becomes a part of the whole."""
        with self._as_column(w):
            parts = self.outer.declared_state(self.me)
        own = {slot.name for slot in self.me.flat.slots}
        others, index = self.shapes.keys() - own, w.rank % w.team_size
        sliced = {name: (cut, self.shapes[name]) for name, cut in self.cuts.items() if name in own}
        return {name: ColumnState(part, self.me, index, own, others, sliced) for name, part in parts.items()}


def _equal(one: Tensor, other: Tensor) -> bool:
    """Of sizes only nothing can differ."""
    return one is other or one.is_meta or torch.equal(one, other)

"""What every team promises, in every world: its members compute the gradient of one process together.

The cases iterate over EXAMPLES of the modules that `splits/teams.py` exports from. How many bytes a step sends is an
entry of `BYTES_SENT`; a kind of team without one fails.
"""

import copy
import inspect
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
from part_modules import members_of, public_members
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset
from worlds import WORLDS, by_rank, die

from manyhands.core.errors import PeerLost, Refused
from manyhands.core.param_cut import ParamCut, keep_slices
from manyhands.core.state import StateSlice, join
from manyhands.core.subgroup import Subgroup
from manyhands.core.task import Task
from manyhands.core.team import Team
from manyhands.core.worker import Worker
from manyhands.splits import teams
from manyhands.splits.conv_fc import ConvFc
from manyhands.splits.layers import stages
from manyhands.splits.piped import Piped
from manyhands.splits.sliced import Sliced, layers_of
from pace import assert_within
from repeats import only

KINDS = list({kind: None for kind in vars(teams).values() if inspect.isclass(kind)})
TEAMS = {name: team for kind in KINDS for name, team in sys.modules[kind.__module__].EXAMPLES.items()}
WIDTHS = [3, 5, 4, 6, 3, 5, 4, 6, 2]
ROWS, STEPS, LIMIT = 12, 3, 2.0

every_team = pytest.mark.parametrize("name", TEAMS)


def model():
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(a, b, dtype=torch.float64), nn.Tanh()) for a, b in pairwise(WIDTHS)]
    return nn.Sequential(*layers)


def fits(name, size):
    """Whether so many ranks can form this team."""
    try:
        TEAMS[name].check(size, ROWS, model())
    except Refused:
        return False
    return True


SIZES = {name: [size for size in (1, 2, 3, 4) if fits(name, size)] for name in TEAMS}
SIZED = [(name, size) for name in TEAMS for size in SIZES[name]]
every_size = pytest.mark.parametrize(("name", "size"), SIZED)


def task():
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(ROWS * STEPS, n, dtype=torch.float64, generator=generator) for n in (WIDTHS[0], WIDTHS[-1]))
    return Task(model, TensorDataset(x, y), mse_loss, batch_size=ROWS)


def batches(task):
    return list(zip(*(field.split(ROWS) for field in task.data.tensors), strict=True))


class Counted(Subgroup):
    """All ranks of a job, with a count of the messages that are sent to, taken from and returned to each of them.

    Before call number `last` of `send` and `recv` this rank does what `ends` says.
    """

    def __init__(self, transport, last=None, ends=None):
        super().__init__(transport, range(transport.size), "members")
        self.last, self.ends, self.calls = last, ends, 0
        self.sent, self.taken, self.released = Counter(), Counter(), Counter()

    def _count(self):
        if self.calls == self.last:
            self.ends()
        self.calls += 1

    def send(self, to, *rest, **more):
        self._count()
        super().send(to, *rest, **more)
        self.sent[to] += 1

    def recv(self, *tags, **more):
        self._count()
        message = super().recv(*tags, **more)
        self.taken[message.frm] += 1
        return Returned(message, self.released)


class Returned:
    """A message whose return is counted."""

    def __init__(self, message, released):
        self._message, self._released = message, released
        self.frm, self.tag, self.meta, self.tensors = message.frm, message.tag, message.meta, message.tensors

    def release(self):
        self._released[self.frm] += 1
        self._message.release()

    def keep(self):
        self._released[self.frm] += 1
        return self._message.keep()


def member(team, members):
    """A worker that trains its part, and the task."""
    made = task()
    w = Worker(members, made, made.build(0), seed=7, steps=STEPS, batch_size=ROWS)
    team = copy.deepcopy(team)
    w.trained, cuts = team.part(w.model, members.rank, members.size), team.cuts(w.model, members.size)
    keep_slices(w.model, cuts, members.rank)
    team.begin(w, members)
    return w, made


@torch.no_grad()
def compute(team, transport):
    """Some steps: what the member has computed and sent."""
    members = Counted(transport)
    w, made = member(team, members)
    losses, gradients, sent = [], [], []
    for w.step, batch in enumerate(batches(made)):
        before = transport.bytes_sent
        losses.append(w.gradient(batch))
        gradients.append({slot.name: w.flat.gradient_of(slot).clone() for slot in w.flat.slots})
        sent.append(transport.bytes_sent - before)
    return losses, gradients, sent, members.sent, members.taken, members.released


@cache
def computed(world, name, size):
    return WORLDS[world].run(size, partial(compute, TEAMS[name]))


def whole(results, step, name):
    """The gradient of all members together; every parameter, or every slice of it, once."""
    plain, size, found, seen = model(), len(results), {}, Counter()
    cuts = TEAMS[name].cuts(plain, size)
    for index, (_, gradients, *_) in enumerate(results):
        for parameter, gradient in gradients[step].items():
            shape = plain.get_parameter(parameter).shape
            into = found.setdefault(parameter, torch.full(shape, torch.nan, dtype=torch.float64))
            cuts.get(parameter, ParamCut(0, {index: [(0, shape[0])]})).put(into, index, gradient)
            seen[parameter] += gradient.numel()
    assert seen == {parameter: gradient.numel() for parameter, gradient in found.items()}
    return found


ON = ["virtual", "shm", "tcp", "subgroup virtual"]
REAL_SIZES = (2, 4)
"""Two sizes show that real processes do what virtual ones do, which are there in all sizes."""
every_size_on_every_world = pytest.mark.parametrize(
    ("name", "size", "world"),
    only(
        lambda case: case[1] in REAL_SIZES or "virtual" in case[2],
        [(*sized, world) for sized in SIZED for world in ON],
    ),
)


@every_size_on_every_world
def test_the_gradient_is_that_of_one_process(world, name, size):
    results, made = computed(world, name, size), task()
    plain = made.build(0)
    for step, batch in enumerate(batches(made)):
        plain.zero_grad()
        loss = made.loss_of(plain, batch)
        loss.backward()
        found = whole(results, step, name)
        assert found.keys() == dict(plain.named_parameters()).keys()
        for parameter, p in plain.named_parameters():
            assert torch.allclose(found[parameter], p.grad, rtol=0, atol=1e-12), parameter
        assert [losses[step] for losses, *_ in results] == [pytest.approx(loss.item(), abs=1e-12)] * size


@every_size_on_every_world
def test_all_members_know_the_same_loss_to_the_last_bit(world, name, size):
    assert len({tuple(losses) for losses, *_ in computed(world, name, size)}) == 1


@every_size_on_every_world
def test_nothing_is_left_in_flight(world, name, size):
    """What one member has sent to another that has taken, and has returned."""
    counts = [counts for _, _, _, *counts in computed(world, name, size)]
    for sender, (sent, _, _) in enumerate(counts):
        for receiver, (_, taken, released) in enumerate(counts):
            assert sent[receiver] == taken[sender] == released[sender]


def piped_bytes(team, size):
    """An activation and an error for every sample and every cut; all stages of a single rank are one.

    Of slices each rank sends those, and within a stage a micro-batch is exchanged like a mini-batch.
    """
    if team.of is not None:
        ranks, count = team.of.ranks, size // team.of.ranks
        cut = stages(task().build(0), count)
        inside = sum(
            sliced_bytes(team.of, ranks, stage, is_later=number > 0, passes=2 if replays(team) else 1)
            for number, stage in enumerate(cut)
        )
        return inside + ranks * piped_bytes(replace(team, of=None, stages=count), count)
    count = size * (team.chunks if team.schedule == "interleaved" and size > 1 else 1)
    cut = stages(task().build(0), count)
    widths = [next(p for p in reversed(list(stage.parameters())) if p.dim() == 1).numel() for stage in cut[:-1]]
    return 2 * ROWS * sum(widths) * torch.float64.itemsize


def replays(team):
    return team.keep == "inputs" or (team.keep is None and team.schedule == "gpipe")


def sliced_bytes(team, size, plain=None, is_later=False, passes=1):
    """A gathered vector is sent to P-1 others, a summed one 2 (P-1) times, and what is not divided P-1 times.

    `is_later`: the first layer sends errors back. `passes`: forward passes of a mini-batch.
    """
    plain = plain or model()
    layers = {layer.layer: layer for layer in layers_of(team, plain, size)}
    cuts = team.cuts(plain, size)
    numbers = sum(p.numel() for parameter, p in plain.named_parameters() if parameter not in cuts)
    for number, chain in enumerate(plain):
        layer = layers.get(chain[0])
        if layer is not None:
            inputs, outputs = chain[0].in_features, chain[0].out_features
            going_back = {"whole": 1 if layer.way == "in" else 2, "own errors": 1, "slice": 0}[layer.takes]
            numbers += passes * ROWS * {"gather": 1, "keep": 0, "sum": 2}[layer.joins] * outputs
            numbers += ROWS * going_back * inputs * (number > 0 or is_later)
    return (size - 1) * numbers * torch.float64.itemsize


def conv_fc_bytes(team, size):
    """Every layer of this model belongs to the second half, which also sends the data and its errors, each once."""
    neurons = Sliced(size, "neurons")
    first = 2 * ROWS * WIDTHS[0] * (size - 1) * torch.float64.itemsize
    return 0 if size == 1 else first + sliced_bytes(neurons, size)


BYTES_SENT = {Piped: piped_bytes, Sliced: sliced_bytes, ConvFc: conv_fc_bytes}


@every_size_on_every_world
def test_the_bytes_are_those_of_the_formula(world, name, size):
    expected = BYTES_SENT[type(TEAMS[name])](TEAMS[name], size)
    for step in range(STEPS):
        assert sum(sent[step] for _, _, sent, *_ in computed(world, name, size)) == expected


@pytest.mark.parametrize(("name", "size"), only(lambda case: case[1] in REAL_SIZES, SIZED))
def test_the_bits_are_the_same_in_every_world(name, size):
    ways = [computed(world, name, size) for world in ON]
    for step in range(STEPS):
        first, *others = [whole(results, step, name) for results in ways]
        for other in others:
            assert all(torch.equal(first[parameter], other[parameter]) for parameter in first)


@every_size
def test_the_parts_cover_the_model(name, size):
    made, team = model(), TEAMS[name]
    cuts = team.cuts(made, size)
    parts = [{id(p) for p in team.part(made, index, size).parameters()} for index in range(size)]
    for parameter, p in made.named_parameters():
        holders = [index for index, part in enumerate(parts) if id(p) in part]
        if parameter not in cuts:
            assert len(holders) == 1, parameter
            continue
        cut = cuts[parameter]
        assert holders == list(cut.ranges) == sorted(cut.ranges)
        rows = [row for ranges in cut.ranges.values() for start, stop in ranges for row in range(start, stop)]
        assert sorted(rows) == list(range(p.shape[cut.dim]))
    assert not any(part - {id(p) for p in made.parameters()} for part in parts)


@every_size
def test_slices_of_a_flat_parameter_are_found_in_the_whole(name, size):
    """Whatever part of a slice is saved: a checkpoint has whole parameters."""
    made, team = model(), TEAMS[name]
    for parameter, cut in team.cuts(made, size).items():
        p = made.get_parameter(parameter).detach()
        for cuts in ([], [1], [3, 4], range(1, 40, 7)):
            pieces = []
            for index in cut.ranges:
                flat = cut.take(p, index).reshape(-1)
                at = [0, *(stop for stop in cuts if stop < flat.numel()), flat.numel()]
                for start, stop in pairwise(at):
                    runs = cut.runs(p.shape, index, start, flat[start:stop])
                    pieces += [StateSlice(parameter, first, rows, stride) for first, stride, rows in runs]
            assert torch.equal(join(pieces)[parameter], p.reshape(-1))


def note_and_die(transport, folder):
    (folder / "moment").write_text(str(time.monotonic()))
    die(transport)


def die_at(team, number, folder, transport):
    w, made = member(team, Counted(transport, number, partial(note_and_die, transport, folder)))
    while True:
        w.gradient(batches(made)[0])


def outlive(team, transport):
    w, made = member(team, Counted(transport))
    with pytest.raises(PeerLost):
        while True:
            w.gradient(batches(made)[0])
    return time.monotonic()


def calls():
    """Before which call of which member of three of each team it is lost, in which world.

    Virtually a third of them stays, in which every call occurs; of real processes one member for each team and world.
    """
    for place, name in enumerate(TEAMS):
        for shift, world in enumerate(("virtual", "shm", "tcp")):
            for number in range(12) if world == "virtual" else [5]:
                for lost in range(3):
                    turn = number if world == "virtual" else place + shift
                    marks = () if (lost + turn) % 3 == 0 else pytest.mark.soak
                    called = f"{name}-{world}, rank {lost} before call {number}"
                    yield pytest.param(name, world, lost, number, id=called, marks=marks)


@pytest.mark.parametrize(("name", "world", "lost", "number"), list(calls()))
def test_the_loss_of_a_member_is_an_error_on_all_others(world, name, lost, number, tmp_path):
    """Whatever the lost member was about to do, and whatever the others wait for."""
    programs = [partial(outlive, TEAMS[name]) for _ in range(3 if 3 in SIZES[name] else 4)]
    programs[lost] = partial(die_at, TEAMS[name], number, tmp_path)
    times = WORLDS[world].run(len(programs), by_rank(*programs), deaths=[lost])
    assert times[lost] is None
    if world != "virtual":
        moment = float((tmp_path / "moment").read_text())
        assert_within(LIMIT, max(at for at in times if at is not None) - moment)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_team_has_the_members_of_the_protocol_and_no_others(kind):
    assert public_members(kind) == members_of(Team)

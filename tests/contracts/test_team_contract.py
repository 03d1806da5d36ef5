"""What every team promises, in every world: its members compute the gradient of one process together.

The cases iterate over EXAMPLES of the modules that `splits/teams.py` exports from. How many bytes a step sends is an
entry of `BYTES_SENT`; a kind of team without one fails.
"""

import copy
import inspect
import sys
import time
from collections import Counter
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
from part_modules import members_of, public_members
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset
from worlds import WORLDS, by_rank, die

from manyhands.core.errors import PeerLost
from manyhands.core.subgroup import Subgroup
from manyhands.core.task import Task
from manyhands.core.team import Team
from manyhands.core.worker import Worker
from manyhands.splits import teams
from manyhands.splits.layers import stages
from manyhands.splits.piped import Piped
from pace import assert_within

KINDS = {kind for kind in vars(teams).values() if inspect.isclass(kind)}
TEAMS = {name: team for kind in KINDS for name, team in sys.modules[kind.__module__].EXAMPLES.items()}
WIDTHS = [3, 5, 4, 6, 3, 5, 4, 6, 2]
ROWS, STEPS, LIMIT = 12, 3, 2.0

every_team = pytest.mark.parametrize("name", TEAMS)
every_size = pytest.mark.parametrize("size", [1, 2, 3, 4])


def model():
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(a, b, dtype=torch.float64), nn.Tanh()) for a, b in pairwise(WIDTHS)]
    return nn.Sequential(*layers)


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
    w.trained = team.part(w.model, members.rank, members.size)
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


def whole(results, step):
    """The gradient of all members together; every parameter once."""
    found = [item for _, gradients, *_ in results for item in gradients[step].items()]
    assert len(dict(found)) == len(found)
    return dict(found)


ON = ["virtual", "shm", "tcp", "subgroup virtual"]
on_every_world = pytest.mark.parametrize("world", ON)


@on_every_world
@every_team
@every_size
def test_the_gradient_is_that_of_one_process(world, name, size):
    results, made = computed(world, name, size), task()
    plain = made.build(0)
    for step, batch in enumerate(batches(made)):
        plain.zero_grad()
        loss = made.loss_of(plain, batch)
        loss.backward()
        found = whole(results, step)
        assert found.keys() == dict(plain.named_parameters()).keys()
        for parameter, p in plain.named_parameters():
            assert torch.allclose(found[parameter], p.grad, rtol=0, atol=1e-12), parameter
        assert [losses[step] for losses, *_ in results] == [pytest.approx(loss.item(), abs=1e-12)] * size


@on_every_world
@every_team
@every_size
def test_all_members_know_the_same_loss_to_the_last_bit(world, name, size):
    assert len({tuple(losses) for losses, *_ in computed(world, name, size)}) == 1


@on_every_world
@every_team
@every_size
def test_nothing_is_left_in_flight(world, name, size):
    """What one member has sent to another that has taken, and has returned."""
    counts = [counts for _, _, _, *counts in computed(world, name, size)]
    for sender, (sent, _, _) in enumerate(counts):
        for receiver, (_, taken, released) in enumerate(counts):
            assert sent[receiver] == taken[sender] == released[sender]


def piped_bytes(team, size):
    """An activation and an error for every sample and every cut; all stages of a single rank are one."""
    count = size * (team.chunks if team.schedule == "interleaved" and size > 1 else 1)
    cut = stages(task().build(0), count)
    widths = [next(p for p in reversed(list(stage.parameters())) if p.dim() == 1).numel() for stage in cut[:-1]]
    return 2 * ROWS * sum(widths) * torch.float64.itemsize


BYTES_SENT = {Piped: piped_bytes}


@on_every_world
@every_team
@every_size
def test_the_bytes_are_those_of_the_formula(world, name, size):
    expected = BYTES_SENT[type(TEAMS[name])](TEAMS[name], size)
    for step in range(STEPS):
        assert sum(sent[step] for _, _, sent, *_ in computed(world, name, size)) == expected


@every_team
@every_size
def test_the_bits_are_the_same_in_every_world(name, size):
    ways = [computed(world, name, size) for world in ON]
    for step in range(STEPS):
        first, *others = [whole(results, step) for results in ways]
        for other in others:
            assert all(torch.equal(first[parameter], other[parameter]) for parameter in first)


@every_team
@every_size
def test_the_parts_cover_the_model(name, size):
    made = model()
    parts = [TEAMS[name].part(made, index, size) for index in range(size)]
    owners = Counter(id(p) for part in parts for p in part.parameters())
    assert owners == dict.fromkeys((id(p) for p in made.parameters()), 1)


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
    """Before which call of which member of three it is lost, in which world."""
    for world in ("virtual", "shm", "tcp"):
        for number in range(12) if world == "virtual" else [5]:
            for lost in range(3):
                yield pytest.param(world, lost, number, id=f"{world}, rank {lost} before call {number}")


@pytest.mark.parametrize(("world", "lost", "number"), list(calls()))
@every_team
def test_the_loss_of_a_member_is_an_error_on_all_others(world, name, lost, number, tmp_path):
    """Whatever the lost member was about to do, and whatever the others wait for."""
    programs = [partial(outlive, TEAMS[name]) for _ in range(3)]
    programs[lost] = partial(die_at, TEAMS[name], number, tmp_path)
    times = WORLDS[world].run(3, by_rank(*programs), deaths=[lost])
    assert times[lost] is None
    if world != "virtual":
        moment = float((tmp_path / "moment").read_text())
        assert_within(LIMIT, max(at for at in times if at is not None) - moment)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_team_has_the_members_of_the_protocol_and_no_others(kind):
    assert public_members(kind) == members_of(Team)

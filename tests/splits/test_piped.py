"""Teams of pipeline stages: replay, split backward passes, channels, memory; the team contract has the rest."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.core.errors import Deadlock, Refused
from manyhands.core.stage import Stage
from manyhands.core.task import Task
from manyhands.core.worker import Worker
from manyhands.splits import schedules
from manyhands.splits.piped import SCHEDULES, Piped
from manyhands.virtual.world import simulate

FREE = {"latency": 0, "bandwidth": "inf"}


def layer(*more):
    return nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), *more)


class Counting(nn.Module):
    """A buffer that the output depends on, and that each pass changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        out = x * (1 + self.passes)
        self.passes += 1
        return out


MODULES = {
    "plain": lambda: layer(nn.Tanh()),
    "dropout": lambda: layer(nn.Dropout(0.5)),
    "batch norm": lambda: layer(nn.BatchNorm1d(6, dtype=torch.float64)),
    "a buffer in use": lambda: layer(Counting()),
}


def task(module, rows=12, stages=4):
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(rows, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    torch.manual_seed(3)
    made = nn.Sequential(*(module() for _ in range(stages)))
    return Task(lambda: copy.deepcopy(made), TensorDataset(x, y), mse_loss, batch_size=rows)


def computed(team, of, transport, steps=2):
    """The gradients and the buffers of some steps on one member."""
    team = copy.deepcopy(team)
    w = Worker(transport, of, of.build(0), seed=7, steps=steps, batch_size=of.batch_size)
    w.trained = team.part(w.model, transport.rank, transport.size)
    team.begin(w, transport)
    found = {}
    for w.step in range(steps):
        loss = w.gradient(of.data.tensors)
        found |= {(w.step, slot.name): w.flat.gradient_of(slot).clone() for slot in w.flat.slots}
    own = {id(buffer) for buffer in w.trained.buffers()}
    found |= {name: buffer for name, buffer in w.model.named_buffers() if id(buffer) in own}
    return found, loss, w.activations


def together(team, of, size=2, **cluster):
    """What all members have computed, and the most bytes of activations on each."""
    ran = simulate(mh.Cluster(workers=size, **cluster), partial(computed, team, of))
    whole = {name: x for found, *_ in ran.results for name, x in found.items()}
    return whole, [activations for *_, activations in ran.results]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_replay_has_the_same_gradient_to_the_last_bit_and_moves_statistics_once(name, schedule):
    of = task(MODULES[name])
    kept, _ = together(Piped(schedule=schedule, keep="graph"), of)
    replayed, _ = together(Piped(schedule=schedule, keep="inputs"), of)
    assert kept.keys() == replayed.keys()
    assert all(torch.equal(x, replayed[key]) for key, x in kept.items())
    counts = [int(x) for key, x in replayed.items() if "num_batches" in key or "passes" in key]
    assert counts == [2 * 4] * len(counts)
    assert len(counts) == (4 if name in ("batch norm", "a buffer in use") else 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_of_different_sizes_count_by_their_samples(schedule):
    """Ten rows in four micro-batches: not the mean of the means."""
    of = task(MODULES["plain"], rows=10)
    plain = of.build(0)
    of.loss_of(plain, of.data.tensors).backward()
    found, _ = together(Piped(schedule=schedule), of)
    for name, p in plain.named_parameters():
        assert torch.allclose(found[0, name], p.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_products_of_large_layers_are_the_gradients_of_autograd(name, schedule, monkeypatch):
    of = task(MODULES[name])
    autograd, _ = together(Piped(schedule=schedule), of)
    monkeypatch.setattr("manyhands.core.weight_products.LARGE", 0)
    products, _ = together(Piped(schedule=schedule), of)
    assert all(torch.allclose(x, autograd[key], rtol=1e-12, atol=1e-13) for key, x in products.items())


def test_a_zero_bubble_has_the_gradient_of_whole_backward_passes():
    """Also on stage 0, whose input needs no error: there its last layer's is computed in I, the weights' in W."""
    for stages in (2, 4):
        of = task(MODULES["plain"], stages=stages)
        split, _ = together(Piped(schedule="zero-bubble"), of)
        whole, _ = together(Piped(schedule="one-f-one-b"), of)
        assert all(torch.allclose(x, whole[key], rtol=0, atol=1e-14) for key, x in split.items())


def test_the_first_half_computes_no_gradient_of_a_weight():
    def program(transport):
        of = task(MODULES["plain"])
        w = Worker(transport, of, of.build(0), seed=0, steps=1, batch_size=12)
        stage = Stage(w, w.model, lambda inputs, received: w.model(*received), splits=True)
        w.flat.open(by_hooks=False)
        x, y = of.data.tensors
        (loss,) = stage.forward(0, (), [x.clone().requires_grad_()], stage.live, lambda out: mse_loss(out, y))
        (error,) = stage.inward(0, [torch.ones_like(loss)])
        between = len(w.flat._arrived)
        stage.weigh(0)
        return between, len(w.flat._arrived), error.shape

    ran = simulate(mh.Cluster(workers=1), program)
    assert ran.results == [(0, 8, (12, 6))]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_keeps_as_many_activations_as_its_row_says(schedule, size):
    """Equal stages: a micro-batch in flight keeps the same bytes on each of them but the last, which has the loss."""
    of = task(MODULES["plain"], rows=24, stages=8)
    team = Piped(schedule=schedule, micro_batches=12, keep="graph")
    _, most = together(team, of, size)
    per_stage = 8 // size // (2 if schedule == "interleaved" else 1)
    rows = SCHEDULES[schedule](size, 12)
    one = 2 * 6 * 8 * (1 + 2 * per_stage)  # the input, and what comes out of each layer and each tanh
    for rank in range(size - 1):
        in_flight = schedules.in_flight(rows[rank])
        if schedule == "zero-bubble":  # between I and W there are errors, and no outputs of the last layer
            assert 0.5 * in_flight * one <= most[rank] <= 1.5 * in_flight * one
        else:
            assert 0.5 * in_flight * one <= most[rank] <= in_flight * one


def test_inputs_take_less_than_graphs():
    of = task(MODULES["plain"], rows=24, stages=8)
    _, graphs = together(Piped(micro_batches=12, keep="graph"), of)
    _, inputs = together(Piped(micro_batches=12), of)
    assert all(2 * few < many for few, many in zip(inputs, graphs, strict=True))


def test_a_channel_needs_as_much_credit_as_micro_batches_are_in_flight(monkeypatch):
    """With one less, GPipe's first stage waits for a release that follows its own last forward pass."""
    of = task(MODULES["plain"])
    together(Piped(), of)
    counted = schedules.in_flight
    monkeypatch.setattr(schedules, "in_flight", lambda row: counted(row) - 1)
    with pytest.raises(Deadlock, match="credit to send"):
        together(Piped(), of)


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2)


def test_a_stage_that_changes_its_input_cannot_be_replayed():
    of = task(MODULES["plain"])
    changing = Task(lambda: nn.Sequential(InPlace(), *of.build(0)), of.data, mse_loss, batch_size=12)
    with pytest.raises(Refused, match="a stage changes its input in place, but must not, because a replay reads it"):
        together(Piped(), changing)


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"schedule": "interleaved", "micro_batches": 6}, "micro_batches is 6, but must be divisible by 4"),
        ({"schedule": "interleaved"}, "the number of stages is 8, but must be <= 4"),
        ({"chunks": 3}, "chunks is 3, but must be left as it is: only 'interleaved' has several stages per rank"),
        ({"schedule": "interleaved", "chunks": 0}, "chunks is 0, but must be >= 1"),
        ({"keep": "input"}, "keep is input, but must be one of graph, inputs"),
    ],
    ids=str,
)
def test_what_cannot_be_played_is_refused(knobs, why):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8 if "micro_batches" in knobs else 4)))
    with pytest.raises(Refused, match=why):
        Piped(**knobs).check(4, 24, model)

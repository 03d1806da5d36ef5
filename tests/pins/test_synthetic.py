"""Card 2.5: decoupled neural interfaces, against the rows of the card and against what they must be equal to."""

from functools import partial

import pytest
import torch
from test_streams import apart, deep, same, trained
from torch import nn
from torch.utils.data import TensorDataset
from toys import chain, probed

import manyhands as mh
from manyhands.rules import Sgd
from manyhands.splits import schedules
from manyhands.splits.data import Share
from manyhands.splits.layers import stages
from manyhands.splits.versions import Versions
from manyhands.strategies.synthetic import Synthetic

FIRST = [(1, 0.9, 0.1), (0.99, 0.81, 0.171), (0.973071, 0.730612, 0.218545), (0.951805, 0.856047, 0.106207)]
"""w1, w2 and a after each mini-batch; the target is 0 three times, so that c begins with the fourth."""
ROWS = {
    False: [*FIRST, (0.941696, 0.968856, 1.6e-05)],
    True: [*((*row, 0) for row in FIRST[:3]), (*FIRST[3], -0.230893), (0.987875, 0.968856, 0.043969, -0.361672)],
}


def linear(inputs, outputs):
    """M(h, y) = a h + c y, with a = c = 0 at first."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def interfaces(build=linear, lag=0, **knobs):
    schedule = partial(schedules.synthetic, lag=lag)
    return Synthetic(Sgd(0.1), schedule, Versions, build=build, model_rule=Sgd(0.1), **knobs)


def in_this_order(xs, ys):
    """A data set that a run of one worker takes in this order."""
    count = len(xs)
    share = Share(TensorDataset(torch.arange(count).view(-1, 1)), 0, 1, 1, seed=0)
    order = [int(share.next_batch()[0]) for _ in range(count)]
    x, y = (torch.empty(count, 1, dtype=torch.float64) for _ in range(2))
    for position, sample in enumerate(order):
        x[sample], y[sample] = xs[position], ys[position]
    return TensorDataset(x, y)


def scalars():
    plain = chain(2)
    return mh.Task(plain.model, in_this_order([1] * 5, [0, 0, 0, 2, 2]), plain.loss, batch_size=1)


@pytest.mark.parametrize("conditional", ROWS)
def test_the_rows_of_the_card(conditional):
    """h = w1 x, out = w2 h, (out - y)^2 / 2, and rates of 0.1."""
    seen = {0: [], 1: []}

    def note(s, w):
        model = s.predicting.errors
        seen[w.rank].append([w.flat.groups[0].weights.item(), *(model._memory[0].tolist() if w.rank == 0 else ())])

    trained(probed(interfaces(conditional=conditional), learn=note), scalars(), 2, 5)
    found = [(w1, w2, *m) for (w1, *m), (w2,) in zip(seen[0], seen[1], strict=True)]
    assert found == [pytest.approx(row, abs=1e-6) for row in ROWS[conditional]]


def test_a_lag_changes_the_times_and_not_the_weights():
    """M has learned from the mini-batch before in any case, and two forward passes fit into one mini-batch's time."""
    waits, runs = (trained(mh.dni(lag=lag), deep(), 3, 20) for lag in (0, 1))
    assert same(waits, runs)
    assert runs.seconds < waits.seconds


def test_three_stages_equal_formulas_by_hand():
    """Two layers per stage, four samples: the target of the first stage is a prediction of the second."""
    task, steps = deep(batch_size=4), 6
    result = trained(interfaces(), task, 3, steps)
    share, model = Share(task.data, 0, 1, 4, seed=0), task.build(0)
    parts = stages(model, 3)
    guesses = [torch.zeros(5, 5, dtype=torch.float64) for _ in range(2)]
    for _ in range(steps):
        x, y = share.next_batch()
        down, moved, h = [], [], [x]
        for s, stage in enumerate(parts):
            below = h[-1].detach().requires_grad_()
            h.append(stage(below))
            out = nn.functional.mse_loss(h[-1], y) if s == 2 else h[-1]
            error = None if s == 2 else h[-1].detach() @ guesses[s].T / 4
            grads = torch.autograd.grad(out, [below, *stage.parameters()], error)
            down.append(grads[0])
            moved += zip(stage.parameters(), grads[1:], strict=True)
        for s in range(2):
            wrong = h[s + 1].detach() @ guesses[s].T - 4 * down[s + 1]
            guesses[s] -= 0.1 * wrong.T @ h[s + 1].detach() / 4
        for p, g in moved:
            p.data -= 0.1 * g
    for found, expected in zip(result.weights.values(), model.parameters(), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-13)
    assert any(bool(guess.any()) for guess in guesses)


# -- what it must be equal to --------------------------------------------------------------------------


class Weighted(nn.Module):
    """The loss of a sample is the product of out and y: its error is y, times the weights of the frozen last layer."""

    def __init__(self, last):
        super().__init__()
        self.weight = nn.Parameter(last.weight.detach().clone(), requires_grad=False)

    def forward(self, seen):
        return seen[:, -16:] @ self.weight


def frozen_on_top():
    draw = torch.Generator().manual_seed(3)
    x, y = (torch.randn(24, size, generator=draw, dtype=torch.float64) for size in (5, 16))

    def model():
        net = nn.Sequential(nn.Linear(5, 2), nn.Tanh(), nn.Linear(2, 4), nn.Linear(4, 16, bias=False)).double()
        net[3].weight.requires_grad_(False)
        return net

    return mh.Task(model, TensorDataset(x, y), lambda out, y: (out * y).sum(1).mean(), batch_size=3)


@pytest.mark.parametrize("lag", [0, 1])
def test_with_the_true_error_it_is_back_propagation(lag):
    task = frozen_on_top()
    strategy = interfaces(lambda inputs, outputs: Weighted(task.build(0)[3]), lag, conditional=True)
    plain = trained(mh.bsp(lr=0.1), task, 1, 12)
    assert apart(trained(strategy, task, 2, 12), plain) < 1e-14


class Nothing(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, x):
        return x.new_zeros(len(x), self.outputs)


def test_with_errors_of_zero_only_the_last_stage_learns():
    task = deep()
    first = {name: p.detach().clone() for name, p in task.build(0).named_parameters()}
    result = trained(interfaces(Nothing), task, 3, 8)
    moved = {name for name, x in result.weights.items() if not torch.equal(x, first[name])}
    assert moved == {name for name in first if int(name.split(".")[0]) >= 7}


# -- predicted inputs ----------------------------------------------------------------------------------


def test_predicted_inputs_are_those_of_formulas_by_hand():
    """One layer per stage. The first mini-batch has the real activation; I is linear in x, and 0 at first."""
    plain, steps = chain(2), 4
    xs, ys = [1, 0.5, 2, 1.5], [0, 1, 0, 2]
    task = mh.Task(plain.model, in_this_order(xs, ys), plain.loss, batch_size=1)
    result = trained(interfaces(synthetic_inputs=True), task, 2, steps)
    w1, w2, a, b = 1.0, 1.0, 0.0, 0.0
    for m, (x, y) in enumerate(zip(xs, ys, strict=True)):
        h, predicted = w1 * x, b * x
        given = predicted if m else h
        wrong = w2 * given - y
        w1, error = w1 - 0.1 * a * h * x, wrong * w2
        w2, a = w2 - 0.1 * wrong * given, a - 0.1 * (a * h - error) * h
        b -= 0.1 * (predicted - h) * x if m else 0
    assert [x.item() for x in result.weights.values()] == pytest.approx([w1, w2], abs=1e-14)


def test_no_stage_waits_for_an_input_that_is_predicted():
    """The first activation takes a second for each link; after that all stages begin together."""
    cluster = mh.Cluster(workers=4, latency="1 s")
    usual, predicted = (
        mh.train(deep(layers=8), mh.dni(synthetic_inputs=inputs, lag=0), cluster=cluster, steps=20).seconds
        for inputs in (False, True)
    )
    assert predicted < usual

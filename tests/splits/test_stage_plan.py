"""Planned stages: what a model means to PipeDream's partitioner, and the plans that follow."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.core.port import REFERENCE_FLOPS
from manyhands.core.work import ModelWork, Work, WorkSource, note_example
from manyhands.splits.layers import stages
from manyhands.splits.stage_plan import chain_costs, stage_plan
from manyhands.tasks import load


class Sized(nn.Module):
    """Returns so many numbers for a sample, and has so many parameters."""

    def __init__(self, width, parameters):
        super().__init__()
        self.width, self.w = width, nn.Parameter(torch.ones(parameters))

    def forward(self, x):
        return self.w.sum() * x[:, :1].expand(len(x), self.width)


def card():
    """The layers of card 2.8, in numbers of four bytes and seconds of the reference processor."""
    shapes = zip([50, 20, 2, 1], [1, 2, 3, 120], strict=True)
    model = nn.Sequential(*(Sized(width, parameters) for width, parameters in shapes))
    seconds = {str(n): Work(forward=t * REFERENCE_FLOPS) for n, t in enumerate([10, 10, 10, 1])}
    vars(model)[WorkSource.NAME] = WorkSource(lambda _: ModelWork(seconds), lambda: (torch.ones(2, 3),))
    return model


def test_a_model_is_mapped_to_the_lists_of_the_card():
    names, compute, activations, parameters = chain_costs(card(), 1)
    assert names == ["0", "1", "2", "3"]
    assert compute == pytest.approx([10, 10, 10, 1])
    assert activations == [4 * 50, 4 * 20, 4 * 2, 0]
    assert parameters == [4 * 1, 4 * 2, 4 * 3, 4 * 120]


def test_the_plan_of_the_card():
    assert stage_plan(card(), workers=4, samples=1, bandwidth=4 * 10.0) == (("3",), (3, 1))


def test_seconds_and_activations_grow_with_the_samples_and_parameters_do_not():
    one, many = (chain_costs(card(), samples) for samples in (1, 8))
    assert many.compute == pytest.approx([8 * t for t in one.compute])
    assert many.activations == [8 * a for a in one.activations]
    assert many.parameters == one.parameters


def test_layers_without_parameters_belong_to_the_one_before_them():
    frozen = nn.Linear(6, 6).requires_grad_(False)
    inner = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
    relu = nn.ReLU()
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), relu, frozen, relu, inner, nn.Linear(5, 2), relu)
    note_example(model, (torch.ones(1, 2, 2),))
    found = chain_costs(model, 10)
    assert found.names == ["0", "5.0", "6"]
    flops = [2 * 2 * 4 * 6 + 2 * 2 * 6 * 6, 3 * 2 * 6 * 5, 3 * 2 * 5 * 2]  # no error of the data; frozen weights
    assert found.compute == pytest.approx([10 * f / REFERENCE_FLOPS for f in flops])
    assert found.activations == [10 * 4 * 6, 10 * 4 * 5, 0]
    assert found.parameters == [4 * (4 * 6 + 6), 4 * (6 * 5 + 5), 4 * (5 * 2 + 2)]


def test_convolutions_of_vgg16_are_replicated_and_its_fully_connected_layers_are_not():
    """On 4 workers the last stage has time for some convolutions; on 16 the plan is 15 + 1, as in the paper."""
    task = load("vgg16")
    model = task.build(0)
    cut, replicas = stage_plan(model, 4, task.batch_size, 1.25e7)
    assert (cut, replicas) == (("21",), (3, 1))
    assert stage_plan(model, 16, task.batch_size, 1.25e8) == (("28",), (15, 1))
    names, _, _, parameters = chain_costs(model, task.batch_size)
    large = [name for name, size in zip(names, parameters, strict=True) if size > 16e6]
    assert large == ["32", "35", "38"]


def test_with_fast_links_all_workers_have_the_whole_model():
    model = load("vgg16").build(0)
    assert stage_plan(model, 4, 32, float("inf")) == ((), (4,))


def test_every_stage_of_a_plan_has_parameters():
    task = load("digits")
    model = task.build(0)
    for workers in (1, 2, 3, 4, 5, 8):
        for bandwidth in (1e6, 1e7, 1e8, 1e9):
            cut, replicas = stage_plan(model, workers, 32, bandwidth)
            assert sum(replicas) == workers and len(cut) == len(replicas) - 1
            assert all(any(True for _ in model[int(name)].parameters()) for name in cut)


def test_the_work_that_a_task_states_counts():
    plain = load("digits")
    other = mh.Task(plain.model, plain.data, plain.loss, work=1e9)
    found = chain_costs(other.build(0), 5)
    assert sum(found.compute) == pytest.approx(5 * 1e9 / REFERENCE_FLOPS)
    assert len(stages(other.build(0), 4)) == len(found.names)


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x)


def failing():
    data = TensorDataset(torch.zeros(4, 7), torch.zeros(4, 7))
    return mh.Task(lambda: nn.Sequential(nn.Linear(3, 3)), data, nn.functional.mse_loss).build(0)


def twice():
    model = nn.Sequential(*[nn.Linear(3, 3)] * 2)
    note_example(model, (torch.ones(2, 3),))
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Other, "the model is a Other, and plans are made for the layers of an nn.Sequential: make it one, or give"),
        (lambda: nn.Sequential(nn.Linear(3, 3)), r"inputs of the model are not known.* mh.join\(example=\(x,\)\)"),
        (lambda: nn.Sequential(nn.ReLU()), "the number of layers with parameters is 0, but must be >= 1"),
        (twice, "layer 1 is in the model twice, and a stage needs its own"),
        (failing, "the work of the model cannot be counted: a forward pass over the first sample failed"),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused(make, why):
    with pytest.raises(mh.Refused, match=why):
        stage_plan(make(), 2, 4, 1e9)

"""Stages have about equal work, so a network is cut where it computes, not where its parameters are."""

from itertools import combinations, pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.core.errors import Refused
from manyhands.core.work import work_of
from manyhands.splits.cuts import Cuts
from manyhands.splits.layers import stages
from manyhands.splits.tied_weights import shared_names
from manyhands.tasks import load


def lengths(model, count):
    return [len(stage) for stage in stages(model, count)]


def work_by_layer(model):
    work = dict.fromkeys((name for name, _ in model.named_children()), 0.0)
    for name, one in work_of(model).modules.items():
        work[name.partition(".")[0]] += one.total
    return list(work.values())


def small_cnn():
    """The convolutions do 82 % of the work and have 7 % of the parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 16, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def images(model=small_cnn, count=64, batch_size=8):
    x = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return mh.Task(model, TensorDataset(x, torch.arange(count) % 10), cross_entropy, batch_size=batch_size)


# --- the cut


def test_vgg16_is_cut_inside_the_convolutions():
    model = load("vgg16").build(0)
    first, second = stages(model, 2)
    assert isinstance(first[-1], nn.ReLU | nn.Conv2d) and any(isinstance(one, nn.Conv2d) for one in second)
    work = work_by_layer(model)
    assert sum(work[: len(first)]) == pytest.approx(sum(work) / 2, rel=0.07)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", ["vgg16", "alexnet", "cnn", "digits"])
def test_no_other_cut_has_less_work_in_its_largest_stage(name, count):
    model = load(name).build(0)
    work, has = work_by_layer(model), [any(True for _ in layer.parameters()) for layer in model]
    best = min(
        max(sum(work[start:stop]) for start, stop in pairwise([0, *cuts, len(work)]))
        for cuts in combinations(range(1, len(work)), count - 1)
        if all(any(has[start:stop]) for start, stop in pairwise([0, *cuts, len(work)]))
    )
    parts = lengths(model, count)
    cuts = [0, *(sum(parts[: n + 1]) for n in range(count))]
    assert max(sum(work[start:stop]) for start, stop in pairwise(cuts)) == best


def test_a_model_that_no_task_has_built_is_cut_by_its_parameters():
    assert lengths(small_cnn(), 2) == [5, 6], "before the large linear layer, and as early as possible"
    assert lengths(images().build(0), 2) == [3, 8], "between the two large convolutions"


def test_layers_that_only_compute_belong_to_a_stage_that_has_parameters():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Tanh(), nn.Linear(4, 4))
    assert sum(lengths(model, 2)) == 4
    with pytest.raises(Refused, match="the number of stages is 3, but must be <= 2"):
        stages(model, 3)


def test_layers_that_share_weights_over_a_cut_are_cut_by_running_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert [type(stage) for stage in Cuts().stages(model, 2)] == [nn.Sequential] * 2
    model[1].weight = model[0].weight
    first, last = Cuts(example=(torch.zeros(2, 4),)).stages(model, 2)
    assert shared_names(model, [first, last]) == ["0.weight", "1.weight"]
    assert first.own.tensors == {"0.weight": {0, 1}, "0.bias": {0}, "1.bias": {1}}


# --- the clock


def computed(task, strategy, workers):
    """Virtual seconds of computing by rank."""
    seconds = [0.0] * workers
    result = mh.train(task, strategy, cluster=mh.Cluster(workers=workers), steps=4)
    for line in result.records:
        if line["kind"] == "step":
            seconds[line["rank"]] += line["compute"]
    return seconds


@pytest.mark.parametrize("strategy", [mh.gpipe(replay=False), mh.one_f_one_b()], ids=["gpipe", "1f1b"])
def test_seconds_of_stages_follow_their_operations(strategy):
    task = images()
    model = task.build(0)
    work, cuts = work_of(model), lengths(model, 3)
    by_layer = work_by_layer(model)
    expected = [sum(by_layer[sum(cuts[:n]) : sum(cuts[: n + 1])]) for n in range(3)]
    assert sum(expected) == work.total
    seconds = computed(task, strategy, 3)
    assert seconds == pytest.approx([4 * 8 * one / 50e9 for one in expected], rel=0.01)


def test_seconds_of_a_worker_follow_the_operations_of_its_model():
    task = images()
    assert computed(task, mh.bsp(), 2) == pytest.approx([4 * 8 * work_of(task.build(0)).total / 50e9] * 2)


def test_the_seconds_that_a_task_gives_are_divided_by_counted_shares():
    task = images()
    given = mh.Task(task.model, task.data, task.loss, batch_size=8, work=50e9)
    counted, scaled = computed(task, mh.gpipe(replay=False), 3), computed(given, mh.gpipe(replay=False), 3)
    assert sum(scaled) == pytest.approx(4 * 8)
    assert [one / sum(scaled) for one in scaled] == pytest.approx([one / sum(counted) for one in counted])


@pytest.mark.parametrize("name", ["vgg16", "alexnet", "googlenet"])
@pytest.mark.parametrize("method", [mh.gpipe, mh.zero_bubble, mh.pipedream])
def test_networks_for_imagenet_are_planned_on_sizes(method, name):
    """Two stages are faster than one, and not twice as fast."""
    one, two = (
        mh.train(load(name), method(), cluster=mh.Cluster(workers), steps=4, batch_size=8).seconds for workers in (1, 2)
    )
    assert 0.5 * one < two < (1.1 if method is mh.gpipe else 0.95) * one

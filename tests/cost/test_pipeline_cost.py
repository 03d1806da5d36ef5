"""What each rank of a pipeline is predicted to have is what a run measures."""

import copy
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.core.errors import Refused
from manyhands.cost.pipelines import pipeline_cost
from manyhands.rules import Adam, Momentum, Sgd
from manyhands.run.methods import over_team
from manyhands.splits import schedules
from manyhands.strategies.pipeline_plan import pipeline_plan
from manyhands.strategies.streaming import FULL
from manyhands.tasks import load
from repeats import diagonals

METHODS = {
    "gpipe": mh.gpipe,
    "gpipe, graphs": lambda **knobs: mh.gpipe(replay=False, **knobs),
    "one-f-one-b": mh.one_f_one_b,
    "interleaved": mh.interleaved,
    "zero-bubble": mh.zero_bubble,
    "pipelined-backprop": mh.pipelined_backprop,
    "small-batch-pipeline": mh.small_batch_pipeline,
    "pipedream": mh.pipedream,
    "vertical sync": lambda **knobs: mh.pipedream(vertical_sync=True, **knobs),
    "pipedream-2bw": mh.pipedream_2bw,
    "spectrain": mh.spectrain,
    "ddg": mh.ddg,
    "features-replay": mh.features_replay,
    "weight-copies": mh.weight_copies,
    "replicas": lambda **knobs: mh.pipedream(replicas=(2, 1), **knobs),
}
KINDS = ("weights", "gradient", "optimizer", "versions", "version_bytes", "activations")


class Statistics(nn.Module):
    """Keeps the same for any number of samples, and a mask for each."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(24), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(x))


@cache
def chain():
    """Eight linear layers of different widths, and statistics."""
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    widths = [16, 64, 24, 40, 24, 8, 24, 48, 4]
    layers = [[nn.Linear(a, b), nn.Tanh()] for a, b in pairwise(widths)]
    model = nn.Sequential(*(part for pair in layers for part in pair), nn.Linear(4, 4))
    model.insert(4, Statistics())
    x, y = (torch.randn(96, n, generator=draw) for n in (16, 4))
    return mh.Task(lambda: copy.deepcopy(model), TensorDataset(x, y), mse_loss, batch_size=24, name="chain")


@cache
def cnn():
    return load("cnn")


class Skipping(nn.Module):
    """A skip connection over all blocks: no nn.Sequential, so it is cut by running it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(7))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x) + x
        return self.head(torch.cat([x, first], 1))


@cache
def skipping():
    return mh.Task(Skipping, chain().data, mse_loss, batch_size=24)


TASKS = {"chain": chain, "cnn": cnn, "skipping": skipping}


def measured(task, strategy, workers, **where):
    """The memory lines of a run that fills its pipeline, by rank."""
    where = where or {"cluster": mh.Cluster(workers=workers)}
    result = mh.train(task, strategy, steps=1 + (0 if "Grid" in repr(strategy) else FULL * workers), **where)
    return sorted((line for line in result.records if line["kind"] == "memory"), key=lambda line: line["held"])


def assert_alike(cost, lines):
    """Bytes and versions within 10 %."""
    for rank, line in zip(cost.ranks, lines, strict=True):
        if line["versions"] is None:  # of a pipeline that flushes
            line |= {"versions": 1, "version_bytes": 0}
        for kind in KINDS:
            assert getattr(rank, kind) == pytest.approx(line[kind], rel=0.1), (rank.rank, kind)


@pytest.mark.parametrize(("of", "name"), diagonals(3, TASKS, METHODS))
def test_a_prediction_is_what_a_run_measures(of, name):
    workers, task = 2 if name == "interleaved" else 3, TASKS[of]()
    for rule in (Sgd(0.01), Adam(0.01)):
        strategy = METHODS[name](rule=rule)
        assert_alike(pipeline_cost(task, pipeline_plan(strategy, workers)), measured(task, strategy, workers))


def test_an_optimizer_of_torch_counts_too():
    for make in (mh.gpipe, mh.pipedream, mh.pipedream_2bw):
        strategy = make(rule=mh.rules.Torch("AdamW", lr=0.01))
        cost, lines = pipeline_cost(chain(), pipeline_plan(strategy, 2)), measured(chain(), strategy, 2)
        assert_alike(cost, lines)
        assert all(line["optimizer"] >= 2 * line["weights"] * 0.9 for line in lines)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", [mh.gpipe, mh.pipedream])
def test_a_prediction_is_what_real_processes_measure(make):
    strategy = make(rule=Momentum(0.01))
    assert_alike(pipeline_cost(cnn(), pipeline_plan(strategy, 2)), measured(cnn(), strategy, 2, on=mh.Local(2)))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "interleaved"])
def test_the_idle_share_is_that_of_a_run_without_messages(name):
    """Once the pipeline is full; the stages are unequal, and updates take little of the time."""
    workers, strategy, task = 3, METHODS[name](), replace(chain(), work=1e9)
    cost = pipeline_cost(task, pipeline_plan(strategy, workers))
    free = mh.Cluster(workers=workers, latency=0, bandwidth="inf")
    one, all_ = 5 * (2 * workers - 1), 15 * (2 * workers - 1)

    def spent(steps):
        result = mh.train(task, strategy, cluster=free, steps=steps)
        return sum(line["compute"] for line in result.records if line["kind"] == "step"), result.seconds

    (short, began), (long, ended) = spent(one), spent(all_)
    assert 1 - (long - short) / (workers * (ended - began)) == pytest.approx(cost.idle, abs=0.01)
    assert cost.speedup > 0 and all(0 <= rank.idle < 1 for rank in cost.ranks)


def test_equal_stages_have_the_bubble_of_the_schedule():
    """Linear layers of one width; the first one computes no error for its input."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    task = mh.Task(lambda: copy.deepcopy(model), TensorDataset(torch.randn(8, 8), torch.randn(8, 8)), mse_loss, 8)
    cost = pipeline_cost(task, pipeline_plan(mh.one_f_one_b(), 4))
    slow = schedules.bubble(schedules.one_f_one_b(4, 4), backward=2)
    assert slow < cost.idle < slow + 1 / 12 and cost.micro_batches == 4
    assert [rank.in_flight for rank in cost.ranks] == [4, 3, 2, 1]
    assert pipeline_cost(task, pipeline_plan(mh.pipedream(), 4)).idle == pytest.approx(1 / 12)
    assert sum(rank.work for rank in cost.ranks) == pytest.approx(1)


def test_a_model_of_sizes_only_is_planned():
    two = pipeline_cost(load("vgg16"), pipeline_plan(mh.pipedream(), 2))
    assert [rank.parameters for rank in two.ranks] == [1_145_408, 137_212_136]
    assert [rank.versions for rank in two.ranks] == [2, 1]
    assert two.ranks[0].activations > 100 * two.ranks[0].weights, "feature maps of 224 x 224 pixels"
    assert two.speedup == pytest.approx(1.93, abs=0.01)
    few, many = (pipeline_cost(load("vgg16"), pipeline_plan(mh.gpipe(), 2), batch) for batch in (8, 16))
    assert many.ranks[0].activations == 2 * few.ranks[0].activations


@pytest.mark.parametrize("make", [mh.pipedream, mh.gpipe])
def test_a_run_of_sizes_only_measures_all_but_activations(make):
    strategy = make(rule=Momentum(0.01))
    cost = pipeline_cost(load("vgg16"), pipeline_plan(strategy, 2))
    result = mh.train("vgg16", strategy, cluster=mh.Cluster(workers=2), steps=9)
    for rank, line in zip(cost.ranks, result.memory, strict=True):
        kinds = ("weights", "gradient", "optimizer")
        assert [line[kind] for kind in kinds] == [getattr(rank, kind) for kind in kinds]
        assert (line["version_bytes"] or 0) == rank.version_bytes and line["activations"] is None
        assert line["bytes"] <= sum(line[kind] for kind in kinds) + rank.activations, "nothing of the other ranks"


def test_what_the_method_of_a_team_keeps_is_not_known():
    strategy = over_team(mh.diloco(), mh.piped(2))
    cost = pipeline_cost(chain(), pipeline_plan(strategy, 8))
    assert len(cost.ranks) == 2 and {rank.optimizer for rank in cost.ranks} == {rank.total for rank in cost.ranks} == {
        None
    }
    assert all(rank.activations for rank in cost.ranks)


def test_no_plan_and_no_cost():
    assert pipeline_plan(mh.bsp(), 4) is None
    with pytest.raises(Refused, match="batch_size is 3, but must be >= 4, the number of micro-batches"):
        pipeline_cost(chain(), pipeline_plan(mh.pipedream_2bw(), 2), 3)
    with pytest.raises(
        Refused, match="a pipeline needs a task with a loss function, but this one computes its gradient"
    ):
        pipeline_cost(load("rbm"), pipeline_plan(mh.gpipe(), 2))

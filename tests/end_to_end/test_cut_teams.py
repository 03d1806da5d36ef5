"""Teams of stages of models that are no chains: equal to the run without a team."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import manyhands as mh
from branched_models import LENGTH, WORDS, Branching, Gpt, UNet


def words(count=48):
    x = torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.roll(-1, 1))


def images(count=48):
    x = torch.randn(count, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.arange(count) % 10)


def numbers(count=48):
    x = torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    return TensorDataset(x, torch.arange(count) % 3)


def task(model, data, loss=cross_entropy):
    return mh.Task(lambda: model().double(), data, loss, batch_size=8)


TASKS = {
    "gpt": task(Gpt, words(), None),
    "tied gpt": task(lambda: Gpt(tied=True), words(), None),
    "u-net": task(UNet, images()),
    "branching": task(Branching, numbers()),
}


def train(task, team=None, strategy=None, workers=None, **knobs):
    workers = workers or (1 if team is None else team.size)
    cluster = mh.Cluster(workers=workers)
    return mh.train(task, strategy or mh.bsp(), team=team, cluster=cluster, **{"steps": 5, "seed": 1, **knobs})


def difference(one, other):
    return max((w - other.weights[name]).abs().max().item() for name, w in one.weights.items())


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", TASKS)
def test_over_stages_a_model_is_trained_as_by_one_worker(name, stages):
    """Of one micro-batch: BatchNorm and branches see whole mini-batches."""
    alone, teams = train(TASKS[name]), train(TASKS[name], mh.piped(stages, micro_batches=1))
    assert difference(alone, teams) < 1e-12
    assert alone.final_loss == pytest.approx(teams.final_loss, abs=1e-12)

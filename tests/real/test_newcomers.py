"""Real workers that come later: one for a lost one, or because somebody asks for it."""

import os

import pytest
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.tasks.digits import digits

from .tools import KILLED, SPARE, Awaited, struck, taken_by

METHODS = {"ssp": mh.ssp, "hogwild": mh.hogwild, "easgd": lambda: mh.easgd(asynchronous=True)}


def train(strategy, awaited, **where):
    return mh.train("digits", struck(strategy, awaited), workers=2, spares=1, epochs=20, **where)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("method", "where"),
    [
        ("ssp", {"link": "shm"}),
        ("ssp", {"link": "tcp", "servers": 1}),
        ("easgd", {"link": "tcp", "servers": 1}),
        ("hogwild", {"link": "shm"}),
    ],
    ids=lambda one: one if isinstance(one, str) else one["link"],
)
def test_a_spare_takes_the_place_of_a_lost_worker(method, where, tmp_path, quickly):
    result = train(METHODS[method](), Awaited(tmp_path), **where)
    assert result.lost == [(1, KILLED)]
    assert taken_by(result)[SPARE] > 10
    assert result.samples >= (result.steps * 2 - 6) * 32, "all but what the lost one had begun, and not told yet"
    assert result.test_accuracy > 0.93


@pytest.mark.timeout(60)
@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_a_spare_comes_when_it_is_called(link, tmp_path, quickly):
    servers = 1 if link == "tcp" else 0
    result = train(mh.ssp(), Awaited(tmp_path, os.getpid()), link=link, servers=servers)
    assert result.lost == []
    assert taken_by(result)[SPARE] > 10
    assert result.samples == result.steps * 2 * 32
    assert result.test_accuracy > 0.93


@pytest.mark.timeout(60)
def test_a_spare_that_is_not_needed_is_not_started(quickly):
    result = mh.train("digits", mh.ssp(), workers=2, spares=1, epochs=2)
    assert sorted(taken_by(result)) == [0, 1]


def normed():
    return nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_a_spare_begins_with_the_statistics_of_the_others(link, tmp_path, quickly):
    """Inputs have a mean of about 100: a worker that began at 0 would count as many batches as it has taken steps."""
    x, y = digits().data.tensors
    data = TensorDataset(100 + x, y)
    task = mh.Task(normed, data, cross_entropy, test=data, metric=digits().metric, batch_size=32, epochs=20)
    awaited = struck(mh.ssp(), Awaited(tmp_path, os.getpid()))
    result = mh.train(task, awaited, workers=2, spares=1, epochs=20, link=link, servers=int(link == "tcp"))
    assert taken_by(result)[SPARE] > 10
    assert result.test_accuracy > 0.9
    assert (result.buffers["0.running_mean"] - data.tensors[0].mean(0)).abs().max() < 1

"""Factors among real processes: the same bits as in virtual time, and a loss ends the run."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.rules import Momentum
from manyhands.strategies.factors import Factors

from .tools import Strike, kill, struck

pytestmark = pytest.mark.timeout(60)


def wide():
    """Two layers of which the first is worth sending as factors."""
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 1))


def task():
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(90, 40, generator=noise)
    return mh.Task(wide, TensorDataset(x, x[:, :1].sin()), mse_loss, batch_size=5)


@pytest.mark.parametrize(("link", "cluster"), [("shm", {"hosts": 1}), ("tcp", {})], ids=["shared memory", "sockets"])
def test_factors_give_the_same_bits_in_both_worlds(link, cluster, quickly):
    virtual = mh.train(task(), Factors(Momentum(0.1)), cluster=mh.Cluster(workers=3, **cluster), steps=8)
    real = mh.train(task(), Factors(Momentum(0.1)), workers=3, link=link, steps=8)
    assert real.weights_sha256 == virtual.weights_sha256
    chosen = [(line["by_factors"], line["by_all_reduce"]) for line in real.records if "by_factors" in line]
    assert chosen == [({"0.weight": 5}, {"2.weight": 5})] * 3


def test_a_killed_worker_ends_the_run(tmp_path, quickly):
    with pytest.raises(mh.PeerLost, match="rank 1 is lost"):
        mh.train(task(), struck(Factors(Momentum(0.1)), Strike(kill, tmp_path)), workers=2, link="tcp", steps=50)

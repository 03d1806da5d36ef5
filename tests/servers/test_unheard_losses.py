"""Shards in shared memory: a loss that no worker waits for is handled at the end at the latest."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh


class Counter(nn.Module):
    """Its gradient is -1: with SGD of rate 1 it counts updates."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, sample):
        return -self.w.sum() + 0 * sample.mean()


def count(strategy, workers, lost):
    task = mh.Task(Counter, TensorDataset(torch.zeros(8, 1)), batch_size=1, work=50e9)
    cluster = mh.Cluster(workers=workers, hosts=1, faults=[mh.Die(lost, 0.5)])
    return mh.train(task, strategy, cluster=cluster, steps=1).weights["w"].item()


def test_what_waited_for_a_lost_workers_gradient_is_applied_without_it():
    assert count(mh.k_batch_async(k=3, lr=1.0), workers=3, lost=2) == 1
    assert count(mh.softsync(lr=1.0), workers=4, lost=0) == 1


def test_a_bulk_method_does_not_answer_without_its_last_update():
    with pytest.raises(mh.PeerLost, match="rank 1 is lost: it died"):
        count(mh.bsp_server(lr=1.0), workers=2, lost=1)

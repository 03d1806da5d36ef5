"""Saving and resuming a user's own loop, in virtual time: a resumed run is the one that was not interrupted."""

import json
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import manyhands as mh
from manyhands import Refused
from manyhands.core.errors import ManyhandsError
from manyhands.run.join import Hands
from manyhands.run.loader_position import together
from manyhands.run.loaders import part_of
from manyhands.run.plain_values import decode, encode
from manyhands.virtual.budget import VirtualSharedBudget
from manyhands.virtual.world import simulate

from .small import METHODS, ONE_HOST, SERVED, task
from .test_prepared import PREPARED, fresh

DATA = task().data
X, Y = DATA.tensors
BATCH, EPOCHS = 4, 3


def dropping():
    """A model whose passes are random, with a buffer of its own on every rank."""
    return nn.Sequential(nn.Linear(X.shape[1], 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, Y.shape[1]))


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)


def one_cycle(optimizer):
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=1000)


def cluster_for(name, workers=2, servers=0):
    return mh.Cluster(workers=workers, servers=servers, hosts=1 if name in ONE_HOST else None)


def loader(rank=0):
    return DataLoader(DATA, BATCH, shuffle=True)


class Script:
    """A user's script with a prepared loop.

    Args:
        name: the method.
        folder: where it saves and what it loads.
        save_at: the step after which it saves.
        stop_at: the step after which it ends.
    """

    def __init__(self, name="bsp", folder=None, save_at=(), stop_at=math.inf, resume=False, cluster=None, **parts):
        self.name, self.folder, self.save_at, self.stop_at, self.resume = name, folder, save_at, stop_at, resume
        self.cluster = cluster or cluster_for(name)
        self.make, self.optimizer = parts.get("make", dropping), parts.get("optimizer", sgd)
        self.schedule, self.loader = parts.get("schedule", one_cycle), parts.get("loader", loader)
        self.look = parts.get("look", lambda *_: None)

    def __call__(self, transport):
        net = fresh(self.make)
        optimizer, seen = self.optimizer(net), []
        scheduler = self.schedule(optimizer)
        torch.manual_seed(7)
        with Hands(transport, strategy=METHODS[self.name]()) as hands:
            net, optimizer, scheduler, batches = hands.prepare(net, optimizer, scheduler, self.loader(transport.rank))
            extra = hands.load(self.folder) if self.resume else {"epoch": 0, "step": 0}
            self.train(hands, net, optimizer, scheduler, batches, extra, seen)
        return net, seen

    def train(self, hands, net, optimizer, scheduler, batches, extra, seen):
        step = extra["step"]
        for epoch in range(extra["epoch"], EPOCHS):
            for x, y in batches:
                if hands.workers > 1:  # in virtual time all ranks draw from one generator, in any order
                    torch.manual_seed(100 * step + hands.rank)
                loss = mse_loss(net(x), y)
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                seen.append((hands.rank, step, loss.item(), optimizer.param_groups[0]["lr"], x.sum().item()))
                self.look(hands, net, optimizer)
                if step in self.save_at:
                    hands.save(self.folder, extra={"epoch": epoch, "step": step})
                if step == self.stop_at:
                    return

    def run(self):
        return simulate(self.cluster, self).results


def weights(results):
    return [list(net.state_dict().values()) for net, _ in results]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- what was interrupted equals what was not ----------------------------------------------------------


@pytest.mark.parametrize("stop", [3, 5, 14], ids=["in the middle of a pass", "at its end", "in the last pass"])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_resumed_loop_in_lock_step_equals_an_uninterrupted_one(workers, stop, optimizer, tmp_path):
    parts = {"optimizer": optimizer, "cluster": mh.Cluster(workers=workers)}
    whole = Script(**parts).run()
    first = Script(folder=tmp_path, save_at={stop}, stop_at=stop, **parts).run()
    resumed = Script(folder=tmp_path, resume=True, **parts).run()
    for (_, seen), (_, before), (_, later) in zip(whole, first, resumed, strict=True):
        assert seen == before + later
    assert all(same(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))


@pytest.mark.parametrize("name", ["bsp", "bsp_server", "hybrid", "bmuf", "easgd", "d_psgd"])
def test_a_loop_that_saves_equals_one_that_does_not(name, tmp_path):
    cluster = cluster_for(name, servers=name in SERVED)
    plain, saving = (Script(name, tmp_path, save_at=at, cluster=cluster).run() for at in ((), (2, 7, 9)))
    assert all(same(a, b) for a, b in zip(weights(plain)[:2], weights(saving)[:2], strict=True))
    assert len(list(tmp_path.glob("step-*"))) == 2

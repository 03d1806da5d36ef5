"""Tables among real processes: the same bits as in virtual time, and a loss ends the run."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import manyhands as mh

from .tools import Strike, kill, struck

pytestmark = pytest.mark.timeout(60)


class Ratings(nn.Module):
    """Two sparse tables, the larger one of which is not worth sharing at once, and a layer."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(500, 16, sparse=True), nn.Embedding(8, 16, sparse=True)
        self.top = nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, user, item):
        return self.top(self.users(user) * self.items(item)).squeeze(1)


def ratings():
    noise = torch.Generator().manual_seed(0)
    user, item = (torch.randint(0, top, (400,), generator=noise) for top in (500, 8))
    return mh.Task(Ratings, TensorDataset(user, item, torch.randn(400, generator=noise)), mse_loss, batch_size=64)


@pytest.mark.parametrize(
    ("link", "servers", "cluster"),
    [("shm", 0, {"hosts": 1}), ("tcp", 0, {}), ("tcp", 1, {"servers": 1})],
    ids=["shared memory", "sockets", "a server"],
)
def test_rows_give_the_same_bits_in_both_worlds(link, servers, cluster, quickly):
    virtual = mh.train(ratings(), mh.hybrid(), cluster=mh.Cluster(workers=2, **cluster), steps=8)
    real = mh.train(ratings(), mh.hybrid(), workers=2, servers=servers, link=link, steps=8)
    assert real.weights_sha256 == virtual.weights_sha256
    decided = [line["by_shards"].keys() for line in real.records if "by_shards" in line]
    assert decided == [{"users.weight"}] * 2, "the items are dense"


def test_a_killed_worker_ends_the_run(tmp_path, quickly):
    with pytest.raises(mh.PeerLost, match="rank 1 is lost"):
        mh.train(ratings(), struck(mh.hybrid(), Strike(kill, tmp_path)), workers=2, link="tcp", steps=50)

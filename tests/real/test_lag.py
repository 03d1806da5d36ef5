"""Among real processes: the first gradient of a worker waits until the other worker has moved on, so it has a lag.

worker 0   forward: wait for a byte of worker 1 | step | forward: write a byte | step | ...
worker 1   forward: write a byte, wait for `AHEAD` + 1 bytes of worker 0 ............... | step | ...
"""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh

pytestmark = pytest.mark.timeout(60)
AHEAD = 4
"""Steps that worker 0 completes while worker 1 computes its first gradient: then it begins the next one."""


class HeldUp(nn.Module):
    """A parabola. In its first forward pass each worker waits for the other one; their samples tell them apart."""

    def __init__(self, pipes):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.pipes, self.missing = pipes, (1, AHEAD + 1)

    def forward(self, x):
        me = int(x.max())
        send, receive = (os.open(self.pipes[rank], os.O_RDWR) for rank in (me, 1 - me))
        os.write(send, b".")
        missing, self.missing = self.missing[me], (0, 0)
        while missing:
            missing -= len(os.read(receive, missing))
        os.close(send)
        os.close(receive)
        return ((self.w - x) ** 2).sum()


@pytest.mark.parametrize("strategy", [mh.hogwild(lr=0.01), mh.hogbatch(lr=0.01), mh.ad_psgd(lr=0.01)], ids=repr)
def test_the_gradient_of_a_worker_that_is_held_up_has_a_lag(strategy, tmp_path):
    pipes = [str(tmp_path / f"of{rank}") for rank in (0, 1)]
    for pipe in pipes:
        os.mkfifo(pipe)
    kept_open = [os.open(pipe, os.O_RDWR) for pipe in pipes]  # or what is in them would be lost
    task = mh.Task(lambda: HeldUp(pipes), TensorDataset(torch.arange(2.0).view(2, 1)), batch_size=1)
    result = mh.train(task, strategy, workers=2, steps=10)
    for pipe in kept_open:
        os.close(pipe)
    first = {line["rank"]: line["lag"] for line in reversed(result.records) if line["kind"] == "step"}
    assert first[1] >= AHEAD
    assert result.max_lag >= AHEAD and result.mean_lag > 0

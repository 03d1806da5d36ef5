"""Clipping is torch's, parameter by parameter; a shard never cuts a parameter whose norm is needed."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.core.errors import Refused
from manyhands.core.rule import UpdateContext
from manyhands.rules import ClipNorm, ClipValue, Sgd, chain

WAYS = {"servers": {"servers": 2}, "co-located": {}, "shared memory": {"hosts": 1}}


@pytest.mark.parametrize("scale", [0.01, 1, 100])
@pytest.mark.parametrize("name", ["value", "norm"])
def test_equals_torch(name, scale):
    p = nn.Parameter(torch.zeros(5, 7, dtype=torch.float64))
    p.grad = scale * torch.randn(5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = {"value": ClipValue(0.7), "norm": ClipNorm(0.7)}[name]
    given = ours(p.grad.clone(), UpdateContext(p.detach()))
    getattr(nn.utils, f"clip_grad_{name}_")([p], 0.7)
    torch.testing.assert_close(given, p.grad, rtol=0, atol=1e-14)


def test_a_gradient_of_nothing_stays_nothing():
    assert ClipNorm(1)(torch.zeros(3), UpdateContext(torch.zeros(3))).tolist() == [0, 0, 0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", [mh.bsp_server, mh.ssp])
def test_whole_parameters_are_clipped_in_every_method(way, method):
    """One worker, so that plain torch gives the expected result."""
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def model():
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()

    task = mh.Task(model, TensorDataset(x, 9 * x[:, :2]), nn.functional.mse_loss, batch_size=12)
    rule = chain(ClipNorm(0.3), Sgd(0.1))
    result = mh.train(task, method(rule=rule), cluster=mh.Cluster(workers=1, **WAYS[way]), steps=6)
    twin = task.build(0)
    for _ in range(6):
        twin.zero_grad()
        nn.functional.mse_loss(twin(x), 9 * x[:, :2]).backward()
        for p in twin.parameters():
            nn.utils.clip_grad_norm_([p], 0.3)
            p.data -= 0.1 * p.grad
    for name, p in twin.named_parameters():
        assert torch.allclose(result.weights[name], p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [mh.bsp, mh.bsp_server])
def test_the_workers_of_one_host_clip_as_those_of_many_do(method):
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def model():
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()

    task = mh.Task(model, TensorDataset(x, 9 * x[:, :2]), nn.functional.mse_loss, batch_size=4)
    rule = chain(ClipNorm(0.3), Sgd(0.1))
    one, many = (
        mh.train(task, method(rule=rule), cluster=mh.Cluster(workers=2, hosts=hosts), steps=6) for hosts in (1, 2)
    )
    for name, w in one.weights.items():
        assert torch.allclose(many.weights[name], w, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClipValue(0), "limit is 0, but must be > 0 and finite"),
        (lambda: ClipNorm(math.inf), "limit is inf, but must be > 0 and finite"),
        (
            lambda: ClipNorm(1, of="model"),
            "of is 'model', but must be 'parameter': updates are applied slice by slice",
        ),
    ],
)
def test_refuses(make, message):
    with pytest.raises(Refused, match=message):
        make()

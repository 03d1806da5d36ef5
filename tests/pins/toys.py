"""The toy problems of the literature's hand calculations, as tasks of ours, and ways to look inside a run."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh

SECOND = 50e9  # floating-point operations that take a core of speed 1 one second

PLACES = {
    "one server": {"servers": 1},
    "two servers": {"servers": 2},
    "three servers": {"servers": 3},
    "co-located": {},
    "shared": {"hosts": 1},
}
"""Where weights can be kept: knobs of a cluster."""
WHERE = pytest.mark.parametrize("where", PLACES)
SCHEDULE_A = [0, 1, 0, 1]
COPIES = 3


class Parabola(nn.Module):
    """f(w) = a/2 (w - b)^2, the loss itself; `a` and `b` come as data, so every worker has its own.

    There may be several copies of w, each with the same gradient, so that servers have something to share.
    """

    def __init__(self, copies=1):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(copies, dtype=torch.float64))

    def forward(self, a, b):
        return (0.5 * a * (self.w - b) ** 2).sum()


def parabolas(*rows, seconds=None, copies=1):
    """Worker k gets the k-th (a, b)."""
    a, b = torch.tensor(rows, dtype=torch.float64).T
    return mh.Task(lambda: Parabola(copies), TensorDataset(a, b), batch_size=1, work=SECOND * (seconds or 1))


def toy_t(**knobs):
    """Toy T: g1(w) = w - 1, g2(w) = 2 (w - 3), w = 0 at first."""
    return parabolas((1, 1), (2, 3), **knobs)


def chain(stages):
    """h_{s+1} = w_s h_s, loss (h_K - y)^2 / 2 with x = 1, y = 0, all w = 1."""

    def model():
        layers = [nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(stages)]
        for layer in layers:
            nn.init.ones_(layer.weight)
        return nn.Sequential(*layers)

    x, y = torch.ones(8, 1, dtype=torch.float64), torch.zeros(8, 1, dtype=torch.float64)
    return mh.Task(model, TensorDataset(x, y), lambda out, y: 0.5 * ((out - y) ** 2).mean(), batch_size=1)


def probed(strategy, **looks):
    """The strategy with a look after some of its methods, public or private: looks[name](strategy, worker)."""
    kind = type(strategy)

    def after(name, look):
        def method(self, w, *rest):
            result = getattr(kind, name)(self, w, *rest)
            look(self, w)
            return result

        return method

    names = {name: name if hasattr(kind, name) else f"_{name}" for name in looks}
    methods = {names[name]: after(names[name], look) for name, look in looks.items()}
    strategy.__class__ = type(kind.__name__, (kind,), methods)
    return strategy


def number(result):
    """The one weight of a toy."""
    (weight,) = result.weights.values()
    return weight.item()


def noisy(samples=24, batch_size=3):
    """A small problem in double precision that is not convex, and whose samples do not agree."""
    draw = torch.Generator().manual_seed(3)
    x, y = (torch.randn(samples, size, generator=draw, dtype=torch.float64) for size in (4, 2))

    def model():
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()

    return mh.Task(model, TensorDataset(x, y), nn.functional.mse_loss, batch_size)

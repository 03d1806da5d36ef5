"""The ways to train, and a task so small that a run takes milliseconds."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.rules import Sgd
from manyhands.strategies.growing_batch import GrowingBatch

METHODS = {
    "bsp": mh.bsp,
    "fully_sharded": partial(mh.fully_sharded, unit=1),
    "bsp_server": mh.bsp_server,
    "hierarchical_server": mh.hierarchical_server,
    "hybrid": mh.hybrid,
    "bmuf": mh.bmuf,
    "adaptive_batch": lambda lr=0.3, rule=None: GrowingBatch(rule or Sgd(lr), 2, (24,), most=2),
    "ssp": mh.ssp,
    "downpour": mh.downpour,
    "dc_asgd": mh.dc_asgd,
    "k_sync": lambda **knobs: replace(mh.k_sync(**knobs), draws_from_all=False),
    "softsync": mh.softsync,
    "easgd": mh.easgd,
    "easgd asynchronous": lambda **knobs: mh.easgd(asynchronous=True, **knobs),
    "ad_psgd": mh.ad_psgd,
    "d_psgd": mh.d_psgd,
    "gossip": mh.gossip,
    "hogwild": mh.hogwild,
    "asysvrg": mh.asysvrg,
    "sandblaster": mh.sandblaster,
    "gpipe": mh.gpipe,
    "pipedream": mh.pipedream,
}
SERVED = [
    *["bsp_server", "hierarchical_server", "hybrid", "ssp", "downpour", "dc_asgd", "k_sync", "softsync"],
    *["easgd asynchronous", "sandblaster"],
]
"""Those that may have server ranks."""
ONE_HOST = ["hogwild", "asysvrg"]
"""Those whose workers share memory."""


def chain(*sizes):
    """Linear layers with tanh between them."""
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def model():
    """Four stages at most, 210 parameters."""
    return chain(4, 8, 8, 8, 2)


def task(samples=40, model=model, loss=mse_loss, batch_size=4, **settings):
    """A linear map with four inputs and two outputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator)
    y = x @ torch.randn(4, 2, generator=generator)
    return mh.Task(model=model, data=TensorDataset(x, y), loss=loss, batch_size=batch_size, **settings)


def steps_of(result):
    """The lines of the record that tell of a step."""
    return [line for line in result.records if "loss" in line]


def losses(result):
    """What was recorded as a loss, in the order of time."""
    lines = sorted(steps_of(result), key=lambda line: line["time"])
    return [line["loss"] for line in lines if line["loss"] is not None]

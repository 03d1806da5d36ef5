"""The activation meter: what autograd keeps, each tensor once, without the weights."""

import torch
from torch import nn

from manyhands.core.activation_meter import ActivationMeter


def metered(module, x, passes):
    """The result after so many forward passes that are all kept."""
    meter = ActivationMeter()
    meter.on = True
    outs = []
    for m in range(passes):
        mine = x.clone()
        with meter.saving(m, module.parameters()):
            outs.append(module(mine))
        meter.keep(m, mine, outs[-1])
    return meter


def test_the_input_and_the_outputs_of_a_chain_are_counted_once():
    """The input and what comes out of tanh twice: 4 + 8 + 2 numbers per sample; the last layer's output is kept too."""
    chain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(10, 4)
    assert metered(chain, x, 1).most == 4 * 10 * (4 + 8 + 2)
    assert metered(chain, x, 3).most == 3 * metered(chain, x, 1).most


def test_what_was_freed_does_not_count_any_more():
    chain = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    meter = metered(chain, torch.randn(10, 4), 2)
    most = meter.most
    meter.free(0)
    meter.keep("later", torch.zeros(10))
    assert meter.most == most, "less is kept now than before"
    meter.keep("more", torch.zeros(1000))
    assert meter.most == most // 2 + 4 * 1010


def test_nothing_is_counted_while_it_is_off():
    meter = ActivationMeter()
    with meter.saving(0, []):
        nn.Linear(4, 4)(torch.randn(2, 4))
    meter.keep(0, torch.zeros(3))
    assert meter.most is None

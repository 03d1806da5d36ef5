"""Parts of different kinds put together: each of them does its own, and they learn."""

from functools import partial
from statistics import mean

import pytest
import torch

import manyhands as mh
from manyhands.codecs import Feedback, Half, TopK
from manyhands.rules import Adam, DelayCompensation, Sgd, Torch, chain
from manyhands.strategies.local_steps import LocalSteps
from manyhands.strategies.server import Server

from .small import losses, task

UNEVEN = {"workers": 4, "speeds": [1, 0.5, 2, 1], "jitter": 0.3}
PARAMETERS = 202


def train(strategy, data=None, steps=60, **cluster):
    data = data or task(samples=64, batch_size=8)
    return mh.train(data, strategy, cluster=mh.Cluster(**UNEVEN, **cluster), steps=steps, seed=3)


def learns(result):
    told = losses(result)
    tenth = len(told) // 10
    return mean(told[-tenth:]) < 0.6 * mean(told[:tenth])


def differ(one, other):
    return any(not torch.allclose(x, other.weights[name], rtol=1e-3) for name, x in one.weights.items())


@pytest.fixture
def ends(monkeypatch):
    """The strategies of all workers as they were at the end."""
    found = []
    for kind in (Server, LocalSteps):

        def finish(self, w, original=kind.finish):
            original(self, w)
            found.append(self)

        monkeypatch.setattr(kind, "finish", finish)
    return found


# -- staleness, servers, a codec, a correction ----------------------------------------------------


def four_parts(strength=0.5, codec=None):
    rule = chain(DelayCompensation(strength), Sgd(0.02))
    return mh.ssp(staleness=2, rule=rule, codec=codec or Feedback(TopK(0.05)), shard="size")


def test_ssp_with_servers_by_size_top_k_with_feedback_and_delay_compensation(ends):
    result = train(four_parts(), servers=3)
    assert learns(result)
    assert 0 < result.max_ahead <= 2, "stale(2) bounds, and somebody is late"
    for strategy in ends:
        assert sorted(sum(span.numel for span in client.spans) for client in strategy.clients) == [67, 67, 68]
        assert all(memory.abs().sum() > 0 for memory in strategy.encoder.memory), "feedback remembers what was not sent"
    raw = train(four_parts(codec=mh.codecs.Raw()), servers=3)
    steps, k = 60 * UNEVEN["workers"], 3 * 4
    assert raw.bytes - result.bytes == steps * (PARAMETERS * 4 - k * 8), "a shard gets 4 numbers and their places"
    assert differ(result, train(four_parts(strength=0.0), servers=3)), "gradients are corrected"


def test_the_same_among_processes():
    workers, steps = 2, 40
    result = mh.train("digits", four_parts(), workers=workers, servers=1, steps=steps)
    told = losses(result)
    assert mean(told[-10:]) < mean(told[:10])
    assert result.max_ahead <= 2
    raw = workers * steps * 2 * sum(x.nbytes for x in result.weights.values())
    assert result.bytes < 0.6 * raw, "weights come whole, gradients do not go whole"


# -- a spring, on each worker's own clock, in half precision ----------------------------------------


def test_asynchronous_easgd_in_half_precision():
    result, raw = (train(mh.easgd(asynchronous=True, codec=codec), servers=2) for codec in (Half(), None))
    assert learns(result)
    exchanges = 60 * UNEVEN["workers"]
    assert raw.bytes - result.bytes == exchanges * PARAMETERS * 2 * 2, "two bytes less up, and two less down"
    assert result.weights_sha256 != raw.weights_sha256, "it is rounded"


@pytest.mark.parametrize("place", [{"hosts": 1}, {}, {"hosts": 2}], ids=str)
@pytest.mark.parametrize("rule", [Sgd(0.05), Adam(0.01), Torch("RMSprop", lr=0.01)], ids=repr)
def test_it_learns_wherever_the_centre_is_and_with_any_local_rule(rule, place):
    assert learns(train(mh.eamsgd(rule=rule, momentum=0.5, asynchronous=True, codec=Half("bf16")), **place))


def test_half_precision_among_processes():
    sent = {}
    for codec in (Half(), None):
        result = mh.train("digits", mh.easgd(asynchronous=True, codec=codec), workers=2, servers=1, steps=40)
        told = losses(result)
        assert mean(told[-10:]) < mean(told[:10])
        sent[codec] = result.bytes
    once = sum(x.nbytes for x in result.weights.values())
    assert sent[None] - sent[Half()] == 2 * 40 * once, "all but the outcome is half as large"


# -- rounds between hosts -------------------------------------------------------------------------


def test_diloco_on_two_hosts(ends):
    result = train(mh.diloco(lr=0.01, period=5), hosts=2)
    assert learns(result)
    together = train(mh.bsp(rule=Adam(0.01)), hosts=2)
    assert 0 < result.bytes < together.bytes / 4, "a round in five steps is a fifth of the bytes"
    memories = [strategy.slices[0].states[0] for strategy in ends]
    for name in memories[0]:
        assert not torch.equal(memories[0][name], memories[1][name]), "AdamW's memory stays with its worker"
    assert all(torch.equal(strategy.starts[0].weights, ends[0].starts[0].weights) for strategy in ends)


# -- optimizers of torch --------------------------------------------------------------------------

METHODS = {
    "ssp": partial(mh.ssp, staleness=2),
    "downpour": mh.downpour,
    "easgd": partial(mh.easgd, asynchronous=True),
    "diloco": partial(mh.diloco, period=5),
}


@pytest.mark.parametrize("place", [{"servers": 2}, {"hosts": 1}, {}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_adam_of_torch_inside_a_method_is_adam(method, place):
    if method == "diloco":
        place = {name: value for name, value in place.items() if name != "servers"}
    result, ours, plain = (
        train(METHODS[method](rule=rule), **place) for rule in (Torch(torch.optim.Adam, lr=0.01), Adam(0.01), Sgd(0.01))
    )
    assert learns(result)
    assert differ(result, plain)
    if place != {"hosts": 1}:  # there it is kept by one process instead of the memory of all, and takes other turns
        for name, x in result.weights.items():
            torch.testing.assert_close(x, ours.weights[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("method", "kind"), [*zip(METHODS, ["NAdam", "RMSprop", "Adamax", "Adafactor"], strict=True)])
def test_any_optimizer_of_torch_will_do(method, kind):
    result = train(METHODS[method](rule=Torch(kind, lr=0.01)))
    assert learns(result)

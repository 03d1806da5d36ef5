"""Encoded gradients: the limits in which nothing is lost, what is lost otherwise, and codecs in other methods."""

import functools

import pytest
import torch

import manyhands as mh
from manyhands.codecs import Feedback, Half, OneBit, Qsgd, Raw, TopK
from manyhands.rules import Momentum
from repeats import only

from .small import losses, task

FOUR = {"workers": 4, "speeds": [1, 0.5, 2, 1]}
PARAMETERS = 202


def run(strategy, steps=40, data=None, seed=3, **cluster):
    data = data or task(samples=64, batch_size=8)
    return mh.train(data, strategy, cluster=mh.Cluster(**(FOUR | cluster)), steps=steps, seed=seed)


def near(one, other, **tolerance):
    for name, x in one.weights.items():
        torch.testing.assert_close(x, other.weights[name], **tolerance)


# -- limits ------------------------------------------------------------------------------------------

LOSSLESS = {
    "all numbers": lambda: mh.topk_sgd(fraction=1.0),
    "all numbers by partners": lambda: mh.sparcml(fraction=1.0, algorithm="double"),
    "all numbers by owners": lambda: mh.sparcml(fraction=1.0, algorithm="split"),
    "all numbers, told densely": lambda: mh.sparcml(fraction=1.0, algorithm="dense"),
    "raw": lambda: mh.bsp(codec=Raw()),
    "raw stripes": lambda: mh.bsp(codec=Raw(), exchange="stripes"),
    "dense for the whole run": lambda: mh.onebit_sgd(dense=1000),
    "full rank": lambda: mh.powersgd(rank=100, least_rate=1.0),
    "factors": mh.sufficient_factors,
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_if_nothing_is_left_out_it_is_bulk_synchronous_sgd(name):
    near(run(LOSSLESS[name](), steps=10), run(mh.bsp(), steps=10), rtol=1e-4, atol=1e-5)


def test_between_two_it_is_so_to_the_last_bit():
    sums = [mh.bsp(), mh.topk_sgd(fraction=1.0), mh.sparcml(fraction=1.0, algorithm="double"), mh.bsp(codec=Raw())]
    assert len({run(one, workers=2, speeds=None).weights_sha256 for one in sums}) == 1


def test_all_numbers_without_masking_are_momentum_and_with_it_plain_sgd():
    momentum = run(mh.bsp(rule=Momentum(0.1, 0.5)), steps=10)
    plain = run(mh.bsp(lr=0.1), steps=10)
    for masking, same in ((False, momentum), (True, plain)):
        near(run(mh.dgc(fraction=1.0, masking=masking, warmup=0), steps=10), same, rtol=1e-4, atol=1e-5)


# -- what travels ----------------------------------------------------------------------------------------


def test_bytes_on_the_wire_are_those_of_the_codec():
    k = 3
    result, raw = run(mh.topk_sgd(fraction=0.01), steps=20), run(mh.bsp(codec=Raw()), steps=20)
    assert raw.bytes - result.bytes == 20 * 4 * 3 * (4 * PARAMETERS - 8 * k), "to each of three others"


def test_a_host_comes_as_one():
    hosts = {"workers": 4, "hosts": 2, "speeds": None}
    alone, together = (run(mh.topk_sgd(fraction=0.1, by_host=way), **hosts) for way in (False, True))
    assert together.bytes < 0.5 * alone.bytes
    near(run(mh.topk_sgd(fraction=1.0, by_host=True), steps=10, **hosts), run(mh.bsp(), steps=10), rtol=1e-4, atol=1e-5)


def test_a_parameter_that_is_no_longer_touched_still_gets_what_was_not_sent():
    class Fading(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.first(x) + self.second(x) if self.calls <= 1 else self.first(x)

    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x[:, :2].clone())
    fading = mh.Task(model=Fading, data=data, loss=torch.nn.functional.mse_loss, batch_size=8)
    once = run(mh.topk_sgd(fraction=0.05, lr=0.05), 1, fading).weights["second.weight"]
    later = run(mh.topk_sgd(fraction=0.05, lr=0.05), 60, fading).weights["second.weight"]
    assert not torch.equal(once, later)


# -- in methods of all kinds ------------------------------------------------------------------------------

TOPK, HALF = Feedback(TopK(0.15)), Half()
METHODS = {
    "bsp": lambda codec: mh.bsp(lr=0.1, codec=codec),
    "bmuf": lambda codec: mh.bmuf(lr=0.05, codec=codec),
    "diloco": lambda codec: mh.diloco(lr=0.003, period=4, codec=codec),
    "ssp": lambda codec: mh.ssp(lr=0.02, codec=codec),
    "downpour": lambda codec: mh.downpour(codec=codec),
    "easgd": lambda codec: mh.easgd(lr=0.1, codec=codec.codec if isinstance(codec, Feedback) else codec),
    "d-psgd": lambda codec: mh.d_psgd(lr=0.1, codec=codec),
    "ad-psgd": lambda codec: mh.ad_psgd(lr=0.05, codec=codec),
    "gossip": lambda codec: mh.gossip(lr=0.1, codec=codec),
    "gossip in pairs": lambda codec: mh.gossip(lr=0.1, mode="pairwise", codec=codec),
    "gossip by push": lambda codec: mh.gossip(lr=0.1, mode="push", codec=codec),
}
ROUND_ONLY = {"d-psgd", "ad-psgd", "gossip", "gossip in pairs", "gossip by push"}
CODECS = {
    "top-k": TOPK,
    "half": HALF,
    "one bit": Feedback(OneBit()),
    "qsgd": Qsgd(),
}
PAIRS = [
    (method, codec)
    for method in METHODS
    for codec in CODECS
    if codec == "half" or (method not in ROUND_ONLY and (method, codec) != ("easgd", "one bit"))
]


SHOWN = {("bsp", "top-k"), ("bmuf", "one bit"), ("diloco", "qsgd"), ("downpour", "half"), ("downpour", "qsgd")}
SHOWN |= {("easgd", "top-k"), ("ssp", "top-k"), *((method, "half") for method in ROUND_ONLY)}
"""Every method and every codec occur; the other pairs repeat them."""


@functools.cache
def uncompressed(method):
    return run(METHODS[method](None), steps=120)


@pytest.mark.parametrize(("method", "codec"), only(lambda pair: pair in SHOWN, PAIRS))
def test_a_codec_makes_it_send_less_and_it_learns(method, codec):
    result, raw = run(METHODS[method](CODECS[codec]), steps=120), uncompressed(method)
    assert result.bytes < 0.8 * raw.bytes
    told = losses(result)
    tenth = len(told) // 10
    assert sum(told[-tenth:]) < 0.85 * sum(told[:tenth])
    once, again = (run(METHODS[method](CODECS[codec]), steps=20) for _ in range(2))
    assert once.weights_sha256 == again.weights_sha256 != raw.weights_sha256


@pytest.mark.parametrize("make", [mh.d_psgd, mh.ad_psgd], ids=["d-psgd", "ad-psgd"])
def test_rounding_does_not_move_the_mean_of_peers(make):
    """With a rate of almost nothing only averaging moves weights, and that keeps their mean."""
    still = run(make(lr=1e-9, codec=Half("bf16")), steps=30)
    start = task(samples=64, batch_size=8).build(3)
    for name, p in start.named_parameters():
        torch.testing.assert_close(still.weights[name], p.detach(), rtol=0, atol=1e-6)


# -- what theory says is lost -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda feedback: mh.topk_sgd(fraction=0.002, feedback=feedback),
        lambda feedback: mh.onebit_sgd(feedback=feedback),
    ],
    ids=["top-k", "one bit"],
)
def test_without_feedback_less_is_learned(make):
    cluster = mh.Cluster(workers=8)
    fed, starved = (mh.train("digits", make(way), cluster=cluster, epochs=10) for way in (True, False))
    assert fed.final_loss < 0.7 * starved.final_loss

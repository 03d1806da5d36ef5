"""Every method: the same seed gives the same bits, the loss falls, and the record tells the story."""

import dataclasses
import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh
from every_method import loop
from manyhands import catalog
from manyhands.core.strategy import OPTIONAL, Strategy
from repeats import one_of_each

METHODS = {
    **{name.replace("_", "-"): getattr(mh, name) for name in catalog.__all__},
    "dc-asgd adaptive": lambda: mh.dc_asgd(adaptive=True, mean_squares=4),
    "easgd asynchronous": lambda: mh.easgd(asynchronous=True),
    "gossip by push": lambda: mh.gossip(mode="push"),
    "gossip in pairs": lambda: mh.gossip(mode="pairwise"),
    "interleaved": lambda: mh.interleaved(stages=2),
    "filter-split": lambda: mh.filter_split(ranks=1),
    "channel-split": lambda: mh.channel_split(ranks=1),
}
METHOD = pytest.mark.parametrize("method", METHODS)
LOOP = pytest.mark.parametrize("method", one_of_each(lambda name: loop(name, METHODS), METHODS))


def blobs(samples=96):
    """Three clouds of points and a small classifier with dropout and BatchNorm."""
    noise = torch.Generator().manual_seed(1)
    y = torch.arange(samples) % 3
    x = torch.randn(samples, 4, generator=noise) + 2 * nn.functional.one_hot(y, 4)

    def model():
        return nn.Sequential(
            *[nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8)],
            *[nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)],
        )

    return mh.Task(model, TensorDataset(x, y), nn.functional.cross_entropy, batch_size=8, name="blobs")


def slots(method):
    traits = METHODS[method]().traits
    if not traits.one_host:
        yield mh.Cluster(workers=4, speeds=[1, 0.5, 2, 1], jitter=0.3)
    yield mh.Cluster(workers=4, hosts=1, cores=2, jitter=0.3)
    if traits.servers:
        yield mh.Cluster(workers=3, servers=2, latency="1ms", bandwidth="100Mbit")


@LOOP
def test_the_same_seed_gives_the_same_bits_and_times(method):
    for cluster in slots(method):
        one, two, other = (
            mh.train(blobs(), METHODS[method](), cluster=cluster, steps=6, seed=seed) for seed in (7, 7, 8)
        )
        assert one.weights_sha256 == two.weights_sha256 != other.weights_sha256
        assert [line for line in one.records if "loss" in line] == [line for line in two.records if "loss" in line]


@LOOP
def test_the_loss_falls(method):
    steps = 240 if method in ("weight-copies", "dni") else 80  # a copy has one seventh; errors are to be learned first
    result = mh.train(blobs(), METHODS[method](), cluster=mh.Cluster(workers=4), steps=steps, batch_size=16)
    first = next(line["loss"] for line in result.records if line.get("loss") is not None)
    assert result.final_loss < 0.8 * first


@METHOD
def test_the_record_on_disk_is_the_record_in_hand(method, tmp_path):
    result = mh.train(blobs(), METHODS[method](), cluster=mh.Cluster(workers=4), steps=3, out=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    header, *rest, footer = lines
    steps = [line for line in rest if "held" not in line]
    assert [(one["role"], one["rank"]) for one in header["participants"]] == [("worker", rank) for rank in range(4)]
    assert len(steps) == len([line for line in result.records if "step" in line and "rank" in line])
    assert all(line["step"] >= 1 and math.isfinite(line["time"]) for line in steps)
    assert footer["weights_sha256"] == result.weights_sha256
    assert {line["held"]: line["bytes"] > 0 for line in rest if "held" in line} == dict.fromkeys(range(4), True)


@pytest.mark.parametrize(
    "kind", sorted({type(recipe()) for recipe in METHODS.values()}, key=lambda kind: kind.__name__)
)
def test_every_public_method_is_in_the_table(kind):
    """A misspelled optional method would never be called, and nothing would say so."""
    public = {name for name, value in vars(kind).items() if not name.startswith("_") and callable(value)}
    public |= {name for name, value in vars(kind).items() if not name.startswith("_") and isinstance(value, property)}
    fields = {field.name for field in dataclasses.fields(kind)}
    assert public - fields <= Strategy.__abstractmethods__ | OPTIONAL | {"rule"}


def test_the_table_lists_what_a_strategy_may_override():
    public = {name for name in vars(Strategy) if not name.startswith("_")}
    assert public == Strategy.__abstractmethods__ | OPTIONAL


@METHOD
def test_traits_agree_with_the_methods(method):
    """What a strategy says it can do it has a method for, and the other way round."""
    kind, traits = type(METHODS[method]()), METHODS[method]().traits
    has = {name for name in OPTIONAL if getattr(kind, name) is not getattr(Strategy, name)}
    assert not traits.servers or "serve" in has
    assert not traits.joiners or "join_running" in has
    assert not traits.peekable or "peek" in has
    assert traits.resumable == ("declared_state" in has)

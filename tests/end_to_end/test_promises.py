"""What the methods promise, seen from outside: bounded lag, no waiting for the slow, the same bits, honest records."""

import json
import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import manyhands as mh
from manyhands import rules
from manyhands.core.flat import Flat
from manyhands.core.work import work_of
from manyhands.splits.data import Share
from manyhands.tasks import load
from repeats import diagonals

from .small import METHODS, SERVED, chain, losses, steps_of, task

MILLISECOND = 50e9 / 4 / 1000
"""Work per sample that makes a mini-batch of 4 take a worker of speed 1 one millisecond."""

# -- staleness --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [{}, {"servers": 2}, {"hosts": 1}], ids=str)
def test_with_a_straggler_ssp_reaches_its_bound_and_ends_sooner_than_bsp(place):
    digits, slow = load("digits"), mh.Slow([0], 5)
    stale = mh.train(digits, mh.ssp(staleness=3), cluster=mh.Cluster(stragglers=slow, **place), steps=60)
    hosts = {"hosts": place.get("hosts")}
    pooled = place == {
        "hosts": 1
    }  # there bsp moves each weight once, not P times: compare what differs in waiting only
    bulk = mh.train(
        digits, mh.bsp_server() if pooled else mh.bsp(), cluster=mh.Cluster(stragglers=slow, **hosts), steps=60
    )
    assert stale.max_ahead == 3
    assert stale.max_lag > 3, "of a slow worker: a gradient is as old as the updates of the others meanwhile"
    assert stale.samples == bulk.samples
    assert stale.seconds < bulk.seconds


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_no_worker_is_ever_further_ahead_than_the_bound(staleness, seed):
    draw = random.Random(seed)
    cluster = mh.Cluster(
        workers=5,
        servers=seed % 3,
        hosts=1 if seed == 3 else None,
        speeds=[1.0, *(draw.uniform(2, 20) for _ in range(4))],
        jitter=0.3 * (seed % 2),
    )
    result = mh.train(
        task(work=MILLISECOND), mh.ssp(staleness, lr=0.01), cluster=cluster, steps=30, seed=seed, per_worker=True
    )
    ahead = [line["ahead"] for line in steps_of(result)]
    assert len(ahead) == 5 * 30
    assert max(ahead) == result.max_ahead == staleness, "the fastest of five such speeds always gets that far ahead"
    assert min(ahead) == 0


# -- asynchrony -------------------------------------------------------------------------------------


def test_a_peer_answers_while_its_own_gradient_is_being_computed():
    """Two workers: whom rank 1 averages with is rank 0, which computes for 20 ms at a time."""
    few = task(work=MILLISECOND)
    cluster = mh.Cluster(workers=2, cores=2, stragglers=mh.Slow([0], 20))
    result = mh.train(few, mh.ad_psgd(lr=0.01), cluster=cluster, steps=20)
    size = 4 * sum(p.numel() for p in few.build(0).parameters())
    slow = [line for line in steps_of(result) if line["rank"] == 0]
    fast = [line for line in steps_of(result) if line["rank"] == 1]
    assert slow[0]["time"] > 0.020
    meanwhile = [line for line in fast if line["time"] < slow[0]["time"]]
    assert len(meanwhile) >= 15
    assert meanwhile[-1]["bytes"] == len(meanwhile) * size, "each step of rank 1 offered its weights once"
    assert slow[0]["bytes"] >= len(meanwhile) * size, "rank 0 took every one of them"
    waits = [after["waited"] - before["waited"] for before, after in pairwise(fast)]
    assert max(waits) < 0.001, "an answer takes two journeys, not a slow gradient"


@pytest.mark.parametrize("graph", ["ring", "complete"])
def test_no_worker_waits_for_a_slow_peer(graph):
    cluster = mh.Cluster(workers=6, cores=2, stragglers=mh.Slow([2], 20))
    result = mh.train(task(work=MILLISECOND), mh.ad_psgd(lr=0.01, graph=graph), cluster=cluster, steps=30)
    for rank in {0, 1, 3, 4, 5}:
        waited = [0.0, *(line["waited"] for line in steps_of(result) if line["rank"] == rank)]
        assert len(waited) > 30
        assert max(b - a for a, b in pairwise(waited)) < 0.002


# -- the same bits ----------------------------------------------------------------------------------

HASHES = """
import sys, torch
torch.set_num_threads(int(sys.argv[1]))
from end_to_end.test_promises import hashes
print(*hashes(0), sep="\\n")
"""


def wide():
    """Wide enough for torch to use several threads, with dropout to draw random numbers."""
    return nn.Sequential(
        nn.Linear(4, 512), nn.Dropout(0.2), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64), nn.Linear(64, 2)
    )


def hashes(seed):
    data = task(samples=400, model=wide, batch_size=64)
    cluster = mh.Cluster(workers=4, speeds=[1, 2, 3, 4])
    return [
        mh.train(data, make(lr=0.001), cluster=cluster, steps=2, seed=seed).weights_sha256 for make in METHODS.values()
    ]


def test_one_seed_gives_the_same_weights_in_any_process_with_any_number_of_threads():
    here = hashes(0)
    for threads in ("1", "2"):
        surroundings = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        done = subprocess.run(
            [sys.executable, "-c", HASHES, threads],
            cwd=Path(__file__).parents[1],
            env=surroundings,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == here


def test_another_seed_gives_other_weights():
    one, two = hashes(1), hashes(2)
    assert all(a != b for a, b in zip(one, two, strict=True))
    assert len(set(one + two)) >= len(METHODS) + 1


# -- one forward pass per mini-batch ----------------------------------------------------------------


class Tick(nn.Module):
    """Counts how often it is run in training mode."""

    made: list["Tick"]

    def __init__(self):
        super().__init__()
        self.count = 0
        Tick.made.append(self)

    def forward(self, x):
        self.count += self.training
        return x


def ticking():
    return nn.Sequential(
        *[layer for sizes in ((4, 8), (8, 8), (8, 8), (8, 2)) for layer in (nn.Linear(*sizes), Tick())]
    )


@pytest.mark.parametrize("method", [name for name in METHODS if name != "sandblaster"])
def test_every_rank_runs_its_own_model_once_per_mini_batch(method):
    """Sandblaster's line search computes a batch as often as it needs, and whoever is free computes it."""
    Tick.made = []
    data = task(model=ticking, metric=lambda outputs, targets: 0.0)
    mh.train(data, METHODS[method](lr=0.001), cluster=mh.Cluster(workers=4), steps=6)
    counts = [tick.count for tick in Tick.made if tick.count]
    if method in ("gpipe", "pipedream"):
        assert counts == [6 * (2 * 4 if method == "gpipe" else 1)] * 4, "one stage each; gpipe replays its passes"
    else:
        assert len(counts) == 4 * 4, "four ranks with four layers each"
        passes = 3 + 2 * 3 if method == "asysvrg" else 6  # whose inner steps compute two gradients
        assert sum(counts[::4]) == passes * 4


def test_micro_batches_are_forward_passes():
    Tick.made = []
    strategy = mh.gpipe(micro_batches=2, replay=False)
    mh.train(task(model=ticking), strategy, cluster=mh.Cluster(workers=2), steps=5)
    assert [tick.count for tick in Tick.made if tick.count] == [10] * 4


# -- results and records ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_weights_come_back_by_name_in_the_order_and_dtype_of_the_model(method):
    def double():
        return chain(4, 8, 8, 8, 2).double()

    def loss(outputs, targets):
        return mse_loss(outputs, targets.double())

    class Cast(nn.Module):
        def forward(self, x):
            return x.double()

    data = task(model=lambda: nn.Sequential(Cast(), *double()), loss=loss)
    result = mh.train(data, METHODS[method](lr=0.01), steps=5)
    expected = dict(data.build(0).named_parameters())
    assert list(result.weights) == list(expected)
    for name, weight in result.weights.items():
        assert type(weight) is torch.Tensor and weight.dtype == torch.float64
        assert weight.shape == expected[name].shape
        assert not torch.equal(weight, expected[name]), f"{name} has not moved"


@pytest.mark.parametrize("method", METHODS)
def test_the_record_says_who_took_part_and_what_every_step_was_like(method, tmp_path):
    servers = 2 if method in SERVED else 0
    result = mh.train(
        task(), METHODS[method](lr=0.01), cluster=mh.Cluster(workers=4, servers=servers), steps=5, out=tmp_path
    )
    written = [json.loads(line) for line in result.record.read_text(encoding="utf-8").splitlines()]
    assert written == list(result.records)
    first, *rest, last = written
    steps = [line for line in rest if "held" not in line]
    roles = ["worker"] * 4 + ["server"] * servers
    assert [(one["role"], one["rank"]) for one in first["participants"]] == list(zip(roles, range(6), strict=False))
    assert all(line["step"] >= 1 and line["rank"] < 4 and line["time"] >= 0 for line in steps)
    for rank in range(4):
        own = [line for line in steps if line["rank"] == rank]
        assert [line["step"] for line in own] == list(range(1, len(own) + 1))
        assert [line["time"] for line in own] == sorted(line["time"] for line in own)
        for line in own if method != "sandblaster" else ():  # which computes beside its main program
            timer = sum(line[name] for name in ("compute", "encode", "wait", "send"))
            assert line["began"] <= line["compute_began"] and timer <= line["time"] - line["began"] + 1e-8
    assert last["end"] is True
    assert last["weights_sha256"] == result.weights_sha256
    assert result.samples == 5 * 4 * (1 if method in ("gpipe", "pipedream") else 4)


def test_the_record_of_a_run_with_losses_and_of_one_with_sizes_only_is_plain_json_too(tmp_path):
    dies = mh.Cluster(workers=3, servers=1, faults=[mh.Die(2, 0.0003)])
    lost = mh.train(task(), mh.ssp(lr=0.01), cluster=dies, steps=9, out=tmp_path / "lost")
    sizes = mh.train("vgg16", mh.bsp(), cluster=mh.Cluster(workers=2), steps=2, out=tmp_path / "sizes")
    for result in (lost, sizes):
        text = result.record.read_text(encoding="utf-8")
        assert [json.loads(line) for line in text.splitlines()] == list(result.records)
        assert "NaN" not in text
    assert lost.records[-1]["lost"] == [[2, "it died"]]


# -- the budget -------------------------------------------------------------------------------------

TOGETHER = ["ssp", "downpour", "dc_asgd", "easgd asynchronous", "ad_psgd", "gossip", "hogwild"]


def steps_by_rank(result):
    return [sum(line["rank"] == rank for line in steps_of(result)) for rank in range(result.workers)]


@pytest.mark.parametrize("method", TOGETHER)
def test_asynchronous_workers_use_up_one_budget_together(method):
    data = task(work=MILLISECOND)
    cluster = mh.Cluster(workers=4, speeds=[1, 2, 4, 8])
    knobs = {"staleness": 1000} if method == "ssp" else {}
    result = mh.train(data, METHODS[method](lr=0.005, **knobs), cluster=cluster, steps=30)
    taken = steps_by_rank(result)
    assert sum(taken) == 30 * 4
    assert result.samples == 30 * 4 * 4
    assert taken == sorted(taken) and taken[3] > 3 * taken[0]


@pytest.mark.parametrize("method", METHODS)
def test_per_worker_each_takes_as_many_steps(method):
    cluster = mh.Cluster(workers=4, speeds=[1, 2, 4, 8])
    result = mh.train(task(work=MILLISECOND), METHODS[method](lr=0.005), cluster=cluster, steps=7, per_worker=True)
    assert steps_by_rank(result) == [7] * 4


# -- models of all kinds ----------------------------------------------------------------------------


class Odd(nn.Module):
    """A frozen layer, two layers with one weight, a parameter that nothing uses, and a loss of its own."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 6).requires_grad_(False)
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.out = nn.Linear(6, 2)

    def forward(self, x, y):
        hidden = torch.tanh(self.two(torch.tanh(self.one(torch.tanh(self.frozen(x))))))
        return mse_loss(self.out(hidden), y)


def normed():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def by_hand(data, workers, steps, optimizer, seed=0):
    """Plain torch: one model per worker, their gradients averaged, the same step for all."""
    models = [data.build(seed) for _ in range(workers)]
    optimizers = [optimizer(model.parameters()) for model in models]
    shares = [Share(data.data, rank, workers, data.batch_size, seed) for rank in range(workers)]
    for _ in range(steps):
        for model, share in zip(models, shares, strict=True):
            model.zero_grad()
            data.loss_of(model, share.next_batch()).backward()
        for same in zip(*(model.parameters() for model in models), strict=True):
            if same[0].grad is not None:
                mean = torch.stack([p.grad for p in same]).mean(0)
                for p in same:
                    p.grad = mean.clone()
        for one in optimizers:
            one.step()
    return models


def on_the_union(data, workers, steps, optimizer, seed=0):
    """Plain torch: one model on the mini-batches of all workers put together."""
    model = data.build(seed)
    one = optimizer(model.parameters())
    shares = [Share(data.data, rank, workers, data.batch_size, seed) for rank in range(workers)]
    for _ in range(steps):
        batches = [share.next_batch() for share in shares]
        one.zero_grad()
        data.loss_of(model, tuple(map(torch.cat, zip(*batches, strict=True)))).backward()
        one.step()
    return model


def close(weights, model, tolerance=1e-6):
    expected = dict(model.named_parameters())
    assert list(weights) == list(expected)
    for name, p in expected.items():
        torch.testing.assert_close(weights[name], p.detach(), rtol=tolerance, atol=tolerance)


def test_bsp_trains_frozen_tied_and_unused_parameters_as_torch_does():
    data = task(model=Odd, loss=None)
    result = mh.train(data, mh.bsp(rule=rules.Sgd(0.1, weight_decay=0.1)), cluster=mh.Cluster(workers=2), steps=20)
    plain = on_the_union(data, 2, 20, lambda ps: torch.optim.SGD(ps, 0.1, weight_decay=0.1))
    close(result.weights, plain)
    start = data.build(0)
    assert "two.weight" not in result.weights
    assert torch.equal(result.weights["frozen.weight"], start.frozen.weight)
    assert torch.equal(result.weights["unused"], torch.ones(3)), "not even its decay touches it"
    assert not torch.equal(result.weights["one.weight"], start.one.weight)


@pytest.mark.parametrize("place", [{}, {"servers": 1}, {"hosts": 1}], ids=str)
def test_ssp_trains_frozen_tied_and_unused_parameters_as_torch_does(place):
    data = task(model=Odd, loss=None)
    rule = rules.Sgd(0.1, weight_decay=0.1)
    alone = mh.train(data, mh.ssp(rule=rule), cluster=mh.Cluster(workers=1, **place), steps=20)
    close(alone.weights, on_the_union(data, 1, 20, lambda ps: torch.optim.SGD(ps, 0.1, weight_decay=0.1)))
    several = mh.train(data, mh.ssp(lr=0.05), cluster=mh.Cluster(workers=3, **place), steps=150)
    assert several.final_loss < losses(several)[0] / 2
    assert torch.equal(several.weights["unused"], torch.ones(3))
    assert torch.equal(several.weights["frozen.bias"], data.build(0).frozen.bias)


def test_bsp_with_batch_norm_averages_statistics_and_takes_the_largest_count():
    data = task(model=normed, batch_size=8)
    result = mh.train(data, mh.bsp(lr=0.1), cluster=mh.Cluster(workers=2), steps=15)
    one, two = by_hand(data, 2, 15, lambda ps: torch.optim.SGD(ps, 0.1))
    close(result.weights, one)
    assert list(result.buffers) == [name for name, _ in one.named_buffers()]
    for name, expected in one.named_buffers():
        other = dict(two.named_buffers())[name]
        if expected.is_floating_point():
            assert not torch.equal(expected, other), "each worker has seen its own samples"
            torch.testing.assert_close(result.buffers[name], (expected + other) / 2, rtol=1e-5, atol=1e-6)
        else:
            assert result.buffers[name].item() == 15


def test_ssp_with_batch_norm_keeps_statistics_out_of_the_pulls():
    data = task(model=normed, batch_size=8)
    alone = mh.train(data, mh.ssp(lr=0.1), cluster=mh.Cluster(workers=1, servers=1), steps=15)
    (plain,) = by_hand(data, 1, 15, lambda ps: torch.optim.SGD(ps, 0.1))
    close(alone.weights, plain)
    for name, expected in plain.named_buffers():
        torch.testing.assert_close(alone.buffers[name], expected, rtol=1e-5, atol=1e-6)
    uneven = mh.Cluster(workers=3, servers=1, speeds=[1, 2, 3])
    several = mh.train(task(model=normed, batch_size=8, work=MILLISECOND), mh.ssp(lr=0.05), cluster=uneven, steps=60)
    assert several.final_loss < losses(several)[0] / 2
    assert several.buffers["1.num_batches_tracked"].item() == max(steps_by_rank(several))


class Alternating(nn.Module):
    """Uses one parameter in its even calls and another in the odd ones."""

    def __init__(self):
        super().__init__()
        self.even, self.odd = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        self.calls = 0

    def forward(self, x, y):
        used = self.odd if self.calls % 2 else self.even
        self.calls += 1
        return (used * y.mean(0)).sum()


def test_gradients_that_add_up_between_pushes_keep_what_only_one_step_touched():
    data = task(model=Alternating, loss=None)
    method = mh.downpour(n_fetch=2, n_push=2, prefetch=False, phase="end", local_lr=0.0, rule=rules.Sgd(1.0))
    result = mh.train(data, method, cluster=mh.Cluster(workers=1, servers=1), steps=2)
    share = Share(data.data, 0, 1, data.batch_size, 0)
    for name in ("even", "odd"):
        torch.testing.assert_close(result.weights[name], -share.next_batch()[1].mean(0))


# -- sizes only -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ssp", "downpour", "bsp"])
def test_bytes_of_a_model_of_sizes_only_are_those_of_the_closed_form(method):
    vgg = load("vgg16")
    parameters = sum(p.numel() for p in vgg.build(0).parameters())
    tensors = len(list(vgg.build(0).parameters()))
    workers, steps, size = 8, 5, 4 * parameters
    if method == "bsp":
        strategy, servers = mh.bsp(collective="ring"), 0
        expected = steps * 2 * (workers - 1) * (size + 4 * tensors)  # the gradient and its marks, around the ring
    else:
        strategy, servers = METHODS[method](), 2
        reads = steps * workers + 1 + (workers if method == "downpour" else 0)  # the last one, and the first prefetch
        expected = (reads + steps * workers) * size
    result = mh.train(vgg, strategy, cluster=mh.Cluster(workers=workers, servers=servers), steps=steps)
    assert result.weights is None and result.weights_sha256 is None and result.test_accuracy is None
    assert result.bytes_sent == expected
    assert result.samples == steps * workers * 32
    assert result.seconds > steps * 32 * work_of(vgg.build(0)).total / 50e9


def test_the_collective_chosen_for_sizes_only_sends_no_more_than_it_must():
    """Buckets above 64 KiB go the way of Rabenseifner, smaller ones and the marks by butterfly."""
    vgg = load("vgg16")
    flat = Flat(dict(vgg.build(0).named_parameters()))
    lengths = [bucket.numel for bucket in flat.buckets()] + [len(flat.slots)]
    large = sum(length for length in lengths if 4 * length > 64 * 1024)
    small = sum(lengths) - large
    assert large > 1000 * small > 0
    result = mh.train(vgg, mh.bsp(), cluster=mh.Cluster(workers=8), steps=3)
    assert result.bytes_sent == 3 * 4 * (2 * 7 * large + 8 * 3 * small)


# -- optimizers of torch ----------------------------------------------------------------------------

OPTIMIZERS = [
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adam", {}),
    ("AdamW", {"weight_decay": 0.1}),
    ("Adagrad", {}),
    ("RMSprop", {}),
    ("Adadelta", {}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Rprop", {}),
    ("ASGD", {}),
    ("Adafactor", {}),
]


@pytest.mark.parametrize(("kind", "knobs"), OPTIMIZERS, ids=lambda value: value if isinstance(value, str) else "")
def test_any_optimizer_of_torch_does_in_bsp_and_at_a_server_what_it_does_alone(kind, knobs):
    data, rule = task(), rules.Torch(kind, lr=0.02, **knobs)

    def alone(parameters):
        return getattr(torch.optim, kind)(parameters, lr=0.02, **knobs)

    bulk = mh.train(data, mh.bsp(rule=rule), cluster=mh.Cluster(workers=2), steps=12)
    close(bulk.weights, by_hand(data, 2, 12, alone)[0], 1e-5)
    served = mh.train(data, mh.ssp(rule=rule), cluster=mh.Cluster(workers=1, servers=1), steps=12)
    close(served.weights, by_hand(data, 1, 12, alone)[0], 1e-5)


@pytest.mark.parametrize(
    ("kind", "place"), diagonals(2, ["Adam", "Adafactor"], [{}, {"servers": 1}, {"hosts": 1}]), ids=str
)
def test_optimizers_of_torch_train_behind_any_kind_of_shard(kind, place):
    rule = rules.Torch(kind, lr=0.02)
    result = mh.train(task(), mh.ssp(rule=rule), cluster=mh.Cluster(workers=3, **place), steps=120)
    assert result.final_loss < losses(result)[0] / 2


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("bsp", "sandblaster")])
def test_every_method_takes_an_optimizer_of_torch(method):
    result = mh.train(task(), METHODS[method](rule=rules.Torch("Adam", lr=0.03)), steps=60)
    assert result.final_loss < losses(result)[0] / 2

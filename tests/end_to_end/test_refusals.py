"""What cannot work is refused before the first step, with the value and the bound; later failures are named."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands import rules
from manyhands.codecs import ByLayer, Feedback, Half, TernGrad, TopK, WarmUp
from manyhands.tasks import load

from .small import METHODS, SERVED, model, steps_of, task

DATA_PARALLEL = [name for name in METHODS if name not in ("gpipe", "pipedream")]


def refused(call):
    """The message of the refusal; nothing has been observed of a first step."""
    observed = []
    watcher = SimpleNamespace(start=lambda *_: None, step=observed.append, stop=lambda: None)
    with pytest.raises(mh.Refused) as caught:
        call(watcher)
    assert observed == []
    return str(caught.value)


def train(strategy, data=None, **settings):
    """A run that has not begun, waiting for its watcher."""
    return lambda watcher: mh.train(data or task(), strategy(), progress=watcher, **settings)


def make(strategy, **knobs):
    return lambda _: strategy(**knobs)


def cluster(**settings):
    return lambda _: mh.Cluster(**settings)


# -- knobs ------------------------------------------------------------------------------------------

HALF, TOP, ONE_SCALE = Half(), TopK(0.1), TernGrad(shared=True)
KNOBS = [
    (make(mh.ssp, staleness=-1), "staleness is -1, but must be >= 0"),
    (make(mh.easgd, center_rate=1.5), "center_rate is 1.5, but must be 0 to 1"),
    (make(mh.easgd, moving_rate=-0.1), "moving_rate is -0.1, but must be 0 to 1"),
    (make(mh.easgd, period=0), "period is 0, but must be >= 1"),
    (make(mh.easgd, codec=Feedback(HALF)), f"codec is {Feedback(HALF)}, but must be one without a memory: what is not"),
    (make(mh.d_psgd, codec=TopK(0.1)), f"codec is {TopK(0.1)}, but must be one that sends every number"),
    (make(mh.ad_psgd, codec=TopK(0.1)), f"codec is {TopK(0.1)}, but must be one that sends every number"),
    (make(mh.gossip, codec=TopK(0.1)), f"codec is {TopK(0.1)}, but must be one that sends every number"),
    (make(mh.ssp, codec=ONE_SCALE), f"codec is {ONE_SCALE}, but must be one with a scale of its own"),
    (make(mh.downpour, codec=WarmUp(ByLayer(TOP, 9, ONE_SCALE), 5)), "but must be one with a scale of its own"),
    (make(mh.bsp, exchange="stripes"), "exchange is stripes, but must be gather without a codec"),
    (make(mh.bsp, by_host=True), "by_host is True, but must be False without a codec"),
    (make(mh.bsp, codec=HALF, collective="ring"), "collective is ring, but must be auto with a codec"),
    (make(mh.bsp, codec=HALF, exchange="sparcml"), f"codec is {HALF}, but must be one that gives pairs"),
    (make(mh.eamsgd, codec=TOP, asynchronous=True), f"codec is {TOP}, but must be one that sends every number"),
    (make(mh.easgd, codec=Feedback(HALF), asynchronous=True), f"codec is {Feedback(HALF)}, but must be one that sends"),
    (make(mh.downpour, n_fetch=0), "fetch_every is 0, but must be >= 1"),
    (make(mh.downpour, n_push=-2), "push_every is -2, but must be >= 1"),
    (make(mh.downpour, phase="middle"), "phase is 'middle', but must be 'start' or 'end'"),
    (make(mh.downpour, local_lr=-1.0), "local_lr is -1.0, but must be >= 0"),
    (make(mh.asysvrg, full_steps=0), "full_steps is 0, but must be >= 1"),
    (make(mh.asysvrg, inner_steps=-1), "inner_steps is -1, but must be >= 1"),
    (make(mh.sandblaster, history=-1), "history is -1, but must be >= 0"),
    (make(mh.sandblaster, portion=0), "portion is 0, but must be >= 1"),
    (make(mh.sandblaster, batches=0), "batches is 0, but must be >= 1"),
    (make(mh.sandblaster, iterations=0), "iterations is 0, but must be >= 1"),
    (make(mh.gpipe, micro_batches=0), "micro_batches is 0, but must be >= 1"),
    (train(mh.gpipe, batch_size=30), "batch_size is 30, but must be divisible by micro_batches = 4"),
    (train(lambda: mh.ssp(shard="rows")), "shard is rows, but must be one of size, layer, round-robin"),
    (train(lambda: mh.bsp(collective="gossip")), "collective is gossip, but must be one of auto, native, shared, ring"),
    (make(mh.gossip, mode="shout"), "mode is shout, but must be one of push, pull, pairwise"),
    (make(mh.gossip, period=0), "period is 0, but must be >= 1"),
    (make(mh.d_psgd, mix="before"), "mix is 'before', but must be 'beside' or 'after'"),
    (train(lambda: mh.d_psgd(graph="star")), "graph is star, but must be one of ring, complete, exponential, torus"),
    (train(lambda: mh.ad_psgd(graph="star")), "graph is star, but must be one of ring, complete, exponential, torus"),
    (train(lambda: mh.ad_psgd(graph="random", bipartite=True)), "graph is random, but must be one that always has two"),
    (train(lambda: mh.ad_psgd(bipartite=True), cluster=mh.Cluster(workers=3)), "a ring of 3 ranks is not bipartite"),
]


@pytest.mark.parametrize(("call", "message"), KNOBS, ids=[message for _, message in KNOBS])
def test_a_knob_is_refused_with_its_value_and_its_bound(call, message):
    assert message in refused(call)


@pytest.mark.parametrize("lr", [0, -0.1, math.nan, math.inf])
@pytest.mark.parametrize("method", METHODS)
def test_a_learning_rate_that_cannot_train_is_refused(method, lr):
    assert refused(make(METHODS[method], lr=lr)).startswith(f"lr is {lr}, but must be > 0")


# -- machines ---------------------------------------------------------------------------------------

MACHINES = [
    (cluster(workers=0), "workers is 0, but must be >= 1"),
    (cluster(workers=-3), "workers is -3, but must be >= 1"),
    (cluster(servers=-1), "servers is -1, but must be >= 0"),
    (cluster(workers=4, hosts=0), "hosts is 0, but must be 1 to 4"),
    (cluster(workers=4, hosts=5), "hosts is 5, but must be 1 to 4"),
    (cluster(cores=0), "cores is 0, but must be >= 1"),
    (cluster(jitter=-0.5), "jitter is -0.5, but must be >= 0"),
    (cluster(cpu_per_byte=-1), "cpu_per_byte is -1, but must be >= 0"),
    (cluster(workers=3, speeds=[1, 2]), "the number of speeds is 2, but must be 3"),
    (cluster(workers=2, speeds=[1, 0]), "speeds is [1, 0], but must be all > 0"),
    (cluster(latency="fast"), "latency is 'fast', but must be a time such as 50us"),
    (cluster(latency=-1), "latency is -1, but must be a time such as 50us"),
    (cluster(bandwidth="10Gbits"), "bandwidth is '10Gbits', but must be a rate such as 10Gbit"),
    (cluster(bandwidth=0), "bandwidth is 0, but must be > 0"),
    (cluster(local_bandwidth="0B"), "local_bandwidth is 0B, but must be > 0"),
    (cluster(workers=2, servers=1, faults=[mh.Die(3)]), "straggler is 3, but must be 0 to 2"),
    (cluster(workers=2, stragglers=mh.Slow([2])), "straggler is 2, but must be 0 to 1"),
    (cluster(workers=2, order=[0, 2]), "a rank in order is 2, but must be 0 to 1"),
    (lambda _: mh.Die(-1), "the rank of a fault is -1, but must be >= 0"),
    (lambda _: mh.Die(0, at=-1), "the time of a fault is -1, but must be a time such as 50us"),
    (lambda _: mh.Slow([0], 0), "factor is 0, but must be > 0"),
    (lambda _: mh.SlowLink(0, factor=math.inf), "factor is inf, but must be > 0 and finite"),
    (train(mh.hogwild, cluster=mh.Cluster(hosts=2)), "hosts is 2, but this method needs all workers on 1 host"),
    (train(mh.ssp, cluster=mh.Cluster(servers=2), servers=3), "servers is 3, but the cluster has 2"),
    (train(mh.ssp, servers=-1), "servers is -1, but must be >= 0"),
    (train(mh.ssp, workers=0), "workers is 0, but must be >= 1"),
    (train(mh.hogwild, workers=2, link="tcp"), "link is tcp, but must be shm: the workers of this method share memory"),
    (train(mh.bsp, on=mh.Local(2), workers=2), "workers is 2, but must be left out beside on=Local(workers=2, "),
    (train(mh.bsp, on=mh.Cluster(2), link="tcp"), "link is tcp, but must be left out beside on=Cluster(workers=2, "),
    (train(mh.bsp, on=mh.Cluster(2), cluster=mh.Cluster(2)), "give it to mh.Local or mh.Cluster"),
    (train(mh.bsp, on=mh.Local), "but must be mh.Local(...) or mh.Cluster(...)"),
    (train(mh.bsp, on=4), "on is 4, but must be mh.Local(...) or mh.Cluster(...)"),
    (train(mh.bsp, on=mh.Local(2, servers=1)), "servers is 1, but must be 0: this method has none"),
    (train(mh.bsp, on=mh.Local(2, spares=1)), "the number of joining workers is 1, but must be 0"),
    (train(mh.ssp, load("vgg16"), on=mh.Local(2)), "the task is vgg16, but must be one with data"),
    (lambda _: mh.Local(0), "workers is 0, but must be >= 1"),
    (lambda _: mh.Local(servers=-1), "servers is -1, but must be >= 0"),
    (lambda _: mh.Local(link="udp"), "link is udp, but must be shm or tcp"),
    (lambda _: mh.Local(spares=-1), "spares is -1, but must be >= 0"),
    (train(lambda: mh.bsp(collective="shared")), "the number of hosts of a shared collective is 4, but must be 1"),
]


@pytest.mark.parametrize(("call", "message"), MACHINES, ids=[message for _, message in MACHINES])
def test_machines_that_cannot_be_are_refused_with_the_value_and_the_bound(call, message):
    assert message in refused(call)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in SERVED])
def test_servers_are_refused_by_a_method_that_has_none(method):
    assert "servers is 2, but must be 0" in refused(train(METHODS[method], cluster=mh.Cluster(servers=2)))


@pytest.mark.parametrize("method", SERVED)
def test_more_servers_than_parameters_are_refused(method):
    tiny = task(model=lambda: nn.Sequential(nn.Linear(4, 2)))
    message = refused(train(METHODS[method], tiny, cluster=mh.Cluster(servers=11)))
    assert message == "servers is 11, but must be <= 10, the number of parameters"
    assert mh.train(tiny, METHODS[method](lr=0.01), cluster=mh.Cluster(servers=10), steps=2).servers == 10


def test_more_servers_than_layers_are_refused_when_layers_stay_whole():
    message = refused(train(lambda: mh.ssp(shard="layer"), servers=5))
    assert message == "servers is 5, but must be <= 4, the number of layers (sharding by layer)"


# -- budgets and tasks ------------------------------------------------------------------------------

BUDGETS = [
    ({"steps": 3, "epochs": 2}, "steps is 3 and epochs is 2, but only one of them can be given"),
    ({"steps": 0}, "steps is 0, but must be >= 1"),
    ({"steps": -5}, "steps is -5, but must be >= 1"),
    ({"epochs": 0}, "epochs is 0, but must be > 0"),
    ({"epochs": -1}, "epochs is -1, but must be > 0"),
    ({"epochs": math.nan}, "epochs is nan, but must be > 0"),
    ({"batch_size": 0}, "batch_size is 0, but must be >= 1"),
]


@pytest.mark.parametrize(("budget", "message"), BUDGETS, ids=[message for _, message in BUDGETS])
def test_a_budget_that_makes_no_sense_is_refused(budget, message):
    assert message in refused(train(mh.bsp, **budget))


@pytest.mark.parametrize("method", DATA_PARALLEL)
def test_a_data_set_smaller_than_the_workers_is_refused(method):
    message = refused(train(METHODS[method], task(samples=3), cluster=mh.Cluster(workers=4)))
    assert message == "the number of samples is 3, but must be >= 4, the number of workers"


def test_an_empty_task_is_refused():
    assert "the number of samples is 0, but must be >= 1" in refused(lambda _: task(samples=0))
    assert "batch_size is 0, but must be >= 1" in refused(lambda _: task(batch_size=0))
    assert "epochs is 0, but must be > 0" in refused(lambda _: task(epochs=0))


@pytest.mark.parametrize("method", ["gpipe", "pipedream"])
def test_a_pipeline_is_refused_a_model_that_it_cannot_cut(method):
    class Net(nn.Linear):
        pass

    message = refused(train(METHODS[method], task(model=lambda: Net(4, 2))))
    assert message == "the number of stages is 4, but must be <= 1, into which the model can be cut"
    message = refused(train(METHODS[method], cluster=mh.Cluster(workers=5)))
    assert message == "the number of stages is 5, but must be <= 4, the number of layers with parameters"

    assert "loss function" in refused(train(METHODS[method], task(loss=None)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_initial_weights_that_are_no_numbers_are_refused_by_name(method, value):
    def broken():
        layers = model()
        with torch.no_grad():
            layers[4].weight[1, 2] = value
        return layers

    message = refused(train(METHODS[method], task(model=broken)))
    assert message == "4.weight holds NaN or infinity before the first step, but must be finite"


def test_a_frozen_weight_that_is_no_number_is_refused_too():
    def broken():
        layers = model()
        layers[0].requires_grad_(False).weight.fill_(math.nan)
        return layers

    assert "0.weight holds NaN or infinity" in refused(train(mh.bsp, task(model=broken)))


def test_a_refused_run_of_a_named_task_says_what_there_is():
    assert "did you mean digits?" in refused(lambda watcher: mh.train("digit", mh.bsp(), progress=watcher))


# -- a loss that is no number -----------------------------------------------------------------------


class Fragile(nn.Module):
    """A layer that gives NaN in one of its calls, if it is asked about the samples of one rank."""

    def __init__(self, breaks, call):
        super().__init__()
        self.breaks, self.call, self.calls = breaks, call, 0

    def forward(self, x):
        self.calls += 1
        return x * math.nan if self.breaks(x) and self.calls == self.call + 1 else x


@pytest.mark.parametrize("method", [name for name in DATA_PARALLEL if name != "sandblaster"])
@pytest.mark.parametrize(("rank", "step"), [(0, 0), (2, 5)])
def test_a_loss_that_is_no_number_stops_the_run_and_names_rank_and_step(method, rank, step):
    """Rank r of 4 owns the samples r, r + 4, ...; here each sample is its own number.

    In Sandblaster any worker may compute them, any number of times: it has its own test.
    """
    x = torch.arange(40.0).reshape(40, 1)
    data = mh.Task(
        model=lambda: nn.Sequential(Fragile(lambda x: x[0].item() % 4 == rank, step), nn.Linear(1, 1)),
        data=TensorDataset(x, x),
        loss=nn.functional.mse_loss,
        batch_size=4,
    )
    knobs = {"full_steps": 20} if method == "asysvrg" else {}  # one forward pass per step
    with pytest.raises(mh.Diverged, match=f"the loss is nan on rank {rank} at step {step}: ") as caught:
        mh.train(data, METHODS[method](lr=1e-6, **knobs), cluster=mh.Cluster(workers=4), steps=20)
    assert (caught.value.rank, caught.value.step) == (rank, step)


@pytest.mark.parametrize(("method", "calls"), [("gpipe", 2 * 4), ("pipedream", 1)])
def test_in_a_pipeline_the_last_stage_sees_it(method, calls):
    data = task(model=lambda: nn.Sequential(*model(), Fragile(lambda x: True, 4 * calls)))
    with pytest.raises(mh.Diverged) as caught:
        mh.train(data, METHODS[method](lr=0.01), cluster=mh.Cluster(workers=4), steps=20)
    assert (caught.value.rank, caught.value.step) == (3, 4)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "sandblaster"])
def test_a_learning_rate_that_is_much_too_large_ends_as_diverged(method, tmp_path):
    """A line search would turn back."""
    data = task(model=lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], nn.Linear(4, 2)))
    strategy = METHODS[method](lr=1e6, **({"rule": rules.Sgd(1e6)} if method == "downpour" else {}))
    with pytest.raises(mh.Diverged):
        mh.train(data, strategy, steps=100, out=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert lines[0]["participants"]
    assert all(math.isfinite(line["loss"]) for line in lines if line.get("loss") is not None)


# -- shares that are not even -----------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("samples", [5, 7, 37])
def test_uneven_shares_never_hang(method, samples):
    result = mh.train(task(samples=samples), METHODS[method](lr=0.01), cluster=mh.Cluster(workers=4), epochs=3)
    replicas = 1 if method in ("gpipe", "pipedream") else 4
    assert result.samples == max(1, 3 * samples // (4 * replicas)) * 4 * replicas
    assert len({line["rank"] for line in steps_of(result)}) == 4


@pytest.mark.parametrize("method", METHODS)
def test_digits_are_not_divisible_by_four_workers(method):
    digits = load("digits")
    assert len(digits.data) % 4 == 1
    result = mh.train(digits, METHODS[method](), cluster=mh.Cluster(workers=4), epochs=1.2)
    assert 1.1 * len(digits.data) <= result.samples <= 1.2 * len(digits.data)


def test_a_share_of_one_sample_is_drawn_again_and_again():
    x = torch.eye(4)
    data = mh.Task(model=lambda: nn.Linear(4, 1), data=TensorDataset(x, x[:, :1]), loss=nn.functional.mse_loss)
    result = mh.train(data, mh.bsp(lr=0.1), cluster=mh.Cluster(workers=4), steps=50, batch_size=3)
    assert result.samples == 50 * 4 * 3
    assert result.final_loss < 0.1

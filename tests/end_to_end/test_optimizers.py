"""Optimizers of torch inside the methods: every class, and parameter groups that differ, do what they do alone."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands import catalog, rules
from manyhands.splits.data import Share

from .small import chain, task
from .test_own_loop import Joined

STEPS, BATCH = 6, 4
SMALL = {"rtol": 0, "atol": 1e-12}


def doubled(data):
    return TensorDataset(*(field.double() for field in data.tensors))


DATA = doubled(task().data)


def model():
    return chain(4, 6, 5, 2).double()


def matrices():
    """Without biases: some optimizers take nothing else."""
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 2, bias=False)).double()


def fresh(make=model):
    torch.manual_seed(0)
    return make()


def grouped(net):
    """Biases do not decay, and learn faster."""
    weights = [p for name, p in net.named_parameters() if not name.endswith("bias")]
    biases = [p for name, p in net.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.3}, {"params": biases, "weight_decay": 0.0, "lr": 0.05}]
    return torch.optim.AdamW(groups, lr=0.02)


GROUPS = {
    "*.bias": rules.Adam(0.05, decoupled=True),
    "*": rules.Adam(0.02, weight_decay=0.3, decoupled=True),
}


def taken(share_of=1, data=DATA, steps=STEPS):
    """The mini-batches of each worker."""
    shares = [Share(data, rank, share_of, BATCH, seed=0) for rank in range(share_of)]
    return [[share.next_batch() for share in shares] for _ in range(steps)]


def alone(optimizer, rows, make=model):
    """Plain torch on the mini-batches of all workers put together."""
    net = fresh(make)
    one = optimizer(net)
    for row in rows:
        x, y = (torch.cat(fields) for fields in zip(*row, strict=True))
        one.zero_grad()
        mse_loss(net(x), y).backward()
        one.step()
    return net


def joined(strategy, optimizer, cluster, make=model, steps=STEPS, data=DATA):
    """The same in an own loop, as seen on the last rank."""

    def program(hands, losses):
        for x, y in hands.share(data, BATCH, steps=steps):
            losses.append(hands.step(x, y))

    return Joined(strategy, program, cluster, make, optimizer=optimizer).models[-1]


def assert_close(net, expected):
    for (name, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, **SMALL, msg=lambda said, name=name: f"{name}: {said}")


# -- parameter groups -------------------------------------------------------------------------------

PLAIN = {
    "adag": {"period": 1},
    "adaptive_batch": {"factor": 1},
    "agn": {"period": 1},
    "backup_workers": {"backups": 0},
    "bmuf": {"block_momentum": 0.0, "nesterov": False, "period": 2},
    "dgc": {"fraction": 1.0, "momentum": 0.0, "warmup": 0},
    "diloco": {"outer_lr": 1.0, "outer_momentum": 0.0, "period": 2},
    "gpipe": {"micro_batches": 1},
    "interleaved": {"micro_batches": 1, "stages": 1},
    "one_f_one_b": {"micro_batches": 1},
    "zero_bubble": {"micro_batches": 1},
    "k_sync": {"k": 1},
    "k_async": {"k": 1},
    "k_batch_async": {"k": 1},
    "onebit_sgd": {"dense": 1000},
    "post_local_sgd": {"warmup": 2},
    "sparcml": {"fraction": 1.0},
    "topk_sgd": {"fraction": 1.0},
}
"""With these knobs one worker is alone; the other methods need none."""
NOT_PLAIN = {
    *("asysvrg", "easgd", "eamsgd", "hierarchical_server", "sandblaster", "fp16_sgd", "qsgd", "strom"),
    "pipedream_2bw",  # one update late, with one worker too
}
SERVED = [
    *["adag", "agn", "asgd_momentum", "backup_workers", "bsp_server", "dc_asgd", "downpour", "dyn_sgd"],
    *["k_async", "k_batch_async", "k_sync", "softsync", "ssp", "staleness_aware"],
]


def slots():
    for name in sorted(set(catalog.__all__) - NOT_PLAIN):
        yield name, {}
        if name in SERVED:
            yield name, {"servers": 2}
        if name in ("bsp_server", "ssp"):
            yield name, {"servers": 2, "shard": "layer"}


def method(name, **knobs):
    return getattr(mh, name)(**PLAIN.get(name, {}), **knobs)


@pytest.mark.parametrize(("name", "place"), [*slots()], ids=str)
def test_one_worker_with_groups_of_parameters_is_torch(name, place):
    knobs = {"shard": place["shard"]} if "shard" in place else {}
    cluster = mh.Cluster(workers=1, servers=place.get("servers", 0))
    net = joined(method(name, **knobs), grouped, cluster)
    assert_close(net, alone(grouped, taken()))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *[(name, {}) for name in ("hogwild", "d_psgd", "model_averaging", "bsp")],
        *[(name, place) for name in ("bsp_server", "ssp", "dc_asgd") for place in ({}, {"hosts": 1}, {"servers": 2})],
        *[(name, {"servers": 2, "shard": "layer"}) for name in ("bsp_server", "ssp")],
    ],
    ids=str,
)
def test_one_worker_with_rules_by_name_is_torch(name, place):
    """Our own rules may also lie in shared memory."""
    place = dict(place)
    knobs = {"shard": place.pop("shard")} if "shard" in place else {}
    data = mh.Task(model, DATA, mse_loss, batch_size=BATCH)
    result = mh.train(data, method(name, rule=rules.by_name(GROUPS), **knobs), cluster=mh.Cluster(1, **place), steps=6)
    expected = dict(alone(grouped, taken()).named_parameters())
    assert list(result.weights) == list(expected)
    for one, weight in result.weights.items():
        torch.testing.assert_close(weight, expected[one].detach(), **SMALL)


@pytest.mark.parametrize("name", ["easgd", "eamsgd"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_spring_pulls_beside_the_groups(name, asynchronous):
    """e = (x - c) / 2;  c <- c + e;  x <- x - e + rule(g(x))."""
    knobs = {"center_rate": 0.5, "moving_rate": 0.5, "asynchronous": asynchronous}
    knobs |= {"momentum": 0.0} if name == "eamsgd" else {}
    net = joined(getattr(mh, name)(**knobs), grouped, mh.Cluster(workers=1))
    x, c = fresh(), fresh()
    optimizer = grouped(x)
    for ((batch, target),) in taken():
        optimizer.zero_grad()
        mse_loss(x(batch), target).backward()
        with torch.no_grad():
            for p, q in zip(x.parameters(), c.parameters(), strict=True):
                e = (p - q) / 2
                q += e
                p -= e
        optimizer.step()
    assert_close(net, c)


def test_variance_reduction_with_groups_on_one_large_batch_is_torch():
    """Where every mini-batch is all data, nothing varies: the first step makes mu, the others are plain."""
    few = TensorDataset(*(field[:BATCH] for field in DATA.tensors))
    strategy = mh.asysvrg(full_steps=1, inner_steps=100)
    net = joined(strategy, grouped, mh.Cluster(workers=1, hosts=1), data=few)
    assert_close(net, alone(grouped, taken(data=few)[1:]))


@pytest.mark.parametrize("name", ["gpipe", "pipedream"])
def test_stages_have_the_groups_of_their_parameters(name):
    net = joined(getattr(mh, name)(), grouped, mh.Cluster(workers=3 if name == "gpipe" else 1))
    assert_close(net, alone(grouped, taken()))


@pytest.mark.parametrize("place", [{}, {"hosts": 1}, {"hosts": 2}, {"servers": 2}], ids=str)
def test_bulk_methods_with_groups_are_one_large_mini_batch(place):
    name = "bsp_server" if "servers" in place else "bsp"
    net = joined(getattr(mh, name)(), grouped, mh.Cluster(workers=3, **place))
    assert_close(net, alone(grouped, taken(3)))


def test_groups_that_differ_on_some_rank_are_refused():
    made = []

    def optimizer(net):
        made.append(net)
        return grouped(net) if len(made) < 3 else torch.optim.AdamW(net.parameters())

    with pytest.raises(
        mh.Refused, match=r"rank 2 has another model than rank 0: .* here, 0\.weight .* in group 0 there"
    ):
        joined(mh.bsp(), optimizer, mh.Cluster(workers=3))


# -- every class ------------------------------------------------------------------------------------

KINDS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
REFUSED = {
    "LBFGS": "the optimizer is LBFGS, but must be one that needs no closure",
    "SparseAdam": "the optimizer is SparseAdam, but must be one for dense gradients",
}
INSIDE = {
    "bsp": mh.bsp,
    "bsp_server": mh.bsp_server,
    "ssp": mh.ssp,
    "model_averaging": lambda: mh.model_averaging(period=2),
}


def test_the_classes_that_are_refused_exist():
    assert REFUSED.keys() <= KINDS.keys()
    assert {"SGD", "Adam", "AdamW", "Adafactor", "Rprop"} <= KINDS.keys()


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("kind", KINDS)
def test_every_class_of_torch_moves_weights_as_it_does_alone_or_is_refused(kind, inside):
    servers = 2 if inside in SERVED else 0
    make = matrices if kind == "Muon" else model

    def optimizer(net):
        return KINDS[kind](net.parameters(), lr=0.02)

    if kind in REFUSED:
        with pytest.raises(mh.Refused, match=REFUSED[kind]):
            joined(INSIDE[inside](), optimizer, mh.Cluster(workers=1, servers=servers))
        return
    net = joined(INSIDE[inside](), optimizer, mh.Cluster(workers=1, servers=servers), make)
    assert_close(net, alone(optimizer, taken(), make))
    assert not torch.equal(next(net.parameters()), next(fresh(make).parameters()))


@pytest.mark.skipif("Muon" not in KINDS, reason="this torch has no Muon")
def test_muon_takes_matrices_and_says_so():
    rule = rules.Torch("Muon", lr=0.02)
    with pytest.raises(mh.Refused, match=r"Torch\(Muon, lr=0\.02\) does not take a parameter of shape \(6,\)"):
        mh.train(mh.Task(model, DATA, mse_loss), mh.bsp(rule=rule), cluster=mh.Cluster(1), steps=1)
    both = rules.by_name({"*.bias": rules.Torch("AdamW", lr=0.02), "*": rule})
    result = mh.train(mh.Task(model, DATA, mse_loss), mh.bsp(rule=both), cluster=mh.Cluster(2), steps=30)
    assert result.final_loss < result.records[1]["loss"]


def test_an_optimizer_without_a_rate_is_refused():
    class Rateless(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

    with pytest.raises(mh.Refused, match="the optimizer is Rateless, but must be one that is given a learning rate lr"):
        joined(mh.bsp(), lambda net: Rateless(net.parameters()), mh.Cluster(workers=1))


def test_what_is_given_to_join_is_not_changed():
    net = fresh()
    optimizer = grouped(net)
    before = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    parameters = [list(group["params"]) for group in optimizer.param_groups]
    joined(mh.bsp(), lambda _: optimizer, mh.Cluster(workers=1), lambda: net)
    for group, options, own in zip(optimizer.param_groups, before, parameters, strict=True):
        assert {name: value for name, value in group.items() if name != "params"} == options
        assert all(one is other for one, other in zip(group["params"], own, strict=True))
    assert not optimizer.state

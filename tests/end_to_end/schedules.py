"""Random schedules: a method with random knobs, on random machines, to which random things happen.

Everything is drawn from one number, so a number is all that one needs to see a schedule again.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from random import Random
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands import catalog
from manyhands.codecs import Feedback, Half, Raw, TopK
from manyhands.core.errors import Refused
from manyhands.peers import sides
from manyhands.rules import Adam, Momentum, Sgd, Torch
from manyhands.servers import AggregationTree

SERVED = [*catalog.quorum.__all__, *catalog.delayed.__all__, "bsp_server", "downpour", "hierarchical_server", "ssp"]
"""Parameter servers."""
BULK = ["bsp_server", "hierarchical_server"]
GROUPED = ["bsp_server", "downpour", "hierarchical_server", "softsync", "ssp"]
"""Those whose workers may come to the shards in groups."""
ELASTIC = ["eamsgd", "easgd"]
TOGETHER = [*catalog.local.__all__, "adaptive_batch", "bsp", "hybrid"]
"""All take every step, or every round, together."""
PEERS = ["ad_psgd", "d_psgd", "gossip"]
SHARED = ["hogbatch", "hogwild"]
"""All write into one memory."""
LOSING = mh.Die, mh.Stop, mh.CutLink
LAYERS, WIDTH = 3, 2
SECONDS = 1e-3
"""What a sample takes on a machine of speed 1."""

# -- what is learned ------------------------------------------------------------------------------


class Layer(nn.Module):
    """Numbers that begin at 0."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))


def toy():
    """Layers that all learn the same: f(w) = a/2 w^2 - b w."""
    return nn.ModuleList([Layer() for _ in range(LAYERS)])


def descent(model, a, b):
    """The loss, and a w - b, its gradient; that is quicker than a backward pass."""
    weights = {name: w.detach() for name, w in model.named_parameters()}
    loss = sum(((0.5 * a * w - b) * w).sum() for w in weights.values()) / len(a)
    return loss, {name: (a * w - b).mean(0) for name, w in weights.items()}


def parabolas(samples, workers):
    """The cards' toy T: g = w - 1 for even workers, 2 (w - 3) for odd ones."""
    rows = [[(1.0, 1.0), (2.0, 6.0)][place % workers % 2] for place in range(samples)]
    a, b = torch.tensor(rows, dtype=torch.float64).T
    return TensorDataset(a[:, None].repeat(1, WIDTH), b[:, None].repeat(1, WIDTH))


def counters(samples, workers):
    """The first number of a layer counts samples by -1 each; the second one adds up what each of them is known by."""
    known_by = torch.tensor([Random(place).randrange(1, 1000) for place in range(samples)], dtype=torch.float64)
    b = torch.stack([torch.ones(samples, dtype=torch.float64), known_by], dim=1)
    return TensorDataset(torch.zeros_like(b), b)


TOYS = {"parabolas": parabolas, "counters": counters}
RATES = {"parabolas": 0.05, "counters": 1.0}

# -- a schedule -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """One run; `mh.train` is told nothing else."""

    number: int
    method: str
    knobs: dict[str, Any]
    toy: str
    steps: int
    batch_size: int
    cluster: mh.Cluster

    @cached_property
    def strategy(self):
        return getattr(mh, self.method)(**self.knobs)

    @property
    def lr(self):
        return RATES[self.toy]

    @property
    def workers(self):
        return self.cluster.workers

    @property
    def doomed(self):
        """Who will be lost, if the run is long enough."""
        losses = [fault for fault in self.cluster.faults if isinstance(fault, LOSING)]
        return {fault.rank: fault.why for fault in sorted(losses, key=lambda fault: -fault.at)}

    @property
    def is_plain(self):
        """Whether gradients are applied as they are: by SGD without a memory."""
        return isinstance(self.knobs.get("rule", Sgd(1)), Sgd)

    @property
    def spared(self):
        """The workers without whom the others go on, as the method's docstring has it."""
        if self.method in (*PEERS, *SHARED):
            return set(range(self.workers))
        asynchronous = (self.method in SERVED and self.method not in BULK) or self.knobs.get("asynchronous")
        if not asynchronous and self.method != "sandblaster":
            return set()
        vital = {0} if self.method == "sandblaster" else set(self.aggregators)
        return set(range(self.workers)) - self._keepers - vital

    @property
    def aggregators(self):
        """The workers that push for their groups."""
        groups = self.knobs.get("groups", 0)
        return AggregationTree(groups, Raw()).aggregators(range(self.workers)) if groups else []

    @property
    def _keepers(self):
        """The workers that keep a shard."""
        rule = self.knobs.get("rule", Sgd(1))
        in_memory = len(set(self.cluster.placement())) == 1 and "owner" not in rule.needs and not self.aggregators
        if self.cluster.servers or in_memory:
            return set()
        by_layer = self.knobs.get("shard", "size") != "size" or not rule.elementwise
        return set(range(min(self.workers, LAYERS if by_layer else LAYERS * WIDTH)))

    def run(self, **changes):
        """Train."""
        data = TOYS[self.toy](3 * self.workers * self.batch_size + 1, self.workers)
        task = mh.Task(toy, data, batch_size=self.batch_size, work=SECONDS * 50e9, gradient=descent)
        cluster = replace(self.cluster, **changes)
        return mh.train(task, self.strategy, cluster=cluster, steps=self.steps, seed=self.number)


def draw(number):
    """The schedule of that number."""
    chance = Random(number)
    method = METHODS[number % len(METHODS)]
    workers, data = chance.randint(2, 6), chance.choice(list(TOYS))
    if method == "sandblaster":
        data = "parabolas"  # a straight line has no lowest point
    knobs = _knobs(method, chance, workers, RATES[data])
    cluster = _machines(method, knobs, chance, workers)
    return Schedule(number, method, knobs, data, chance.randint(2, 5), chance.choice([1, 1, 2]), cluster)


def with_faults(schedule, seconds):
    """The same with things that happen within so many seconds."""
    chance = Random(f"{schedule.number} faults")
    ranks, faults = schedule.cluster.size, []
    for _ in range(chance.choice([0, 1, 1, 2, 2, 3])):
        kind, at = chance.choice([*LOSING, mh.Slow, mh.SlowLink]), chance.uniform(0, 1.1) * seconds
        rank, factor = chance.randrange(ranks), round(chance.uniform(2, 20), 1)
        if kind in LOSING:
            faults.append(kind(rank, at))
        else:
            faults.append(mh.Slow([rank], factor, at) if kind is mh.Slow else mh.SlowLink(rank, at, factor))
    return replace(schedule, cluster=replace(schedule.cluster, faults=faults))


# -- machines -------------------------------------------------------------------------------------


def _machines(method, knobs, chance, workers):
    serves = method in (*SERVED, "sandblaster") or knobs.get("asynchronous")
    one_host = method in (*SHARED, "asysvrg") or knobs.get("collective") == "shared"
    slots = [1] if one_host else [None, None, 1, 1, chance.randint(1, workers)]
    slow = mh.Slow([chance.randrange(workers)], chance.choice([3, 10]))
    return mh.Cluster(
        workers=workers,
        servers=chance.choice([0, 0, 1, 2, 3]) if serves else 0,
        hosts=chance.choice(slots),
        cores=chance.choice([None, None, 1, 2]),
        speeds=[round(2 ** chance.uniform(-2, 2), 2) for _ in range(workers)] if chance.random() < 0.7 else None,
        jitter=chance.choice([0, 0.1, 0.5]),
        latency=chance.choice([0, 1e-6, 5e-5, 1e-3, 1e-2]),
        bandwidth=chance.choice([1e4, 1e6, "10Gbit", "inf"]),
        local_latency=chance.choice([0, 1e-6, 1e-4]),
        local_bandwidth=chance.choice([1e6, "64Gbit"]),
        cpu_per_byte=chance.choice([0, 0, 1e-9, 1e-6]),
        stragglers=[slow] if chance.random() < 0.2 else [],
    )


# -- knobs ----------------------------------------------------------------------------------------


def _knobs(method, chance, workers, lr):
    """What the method can be told, drawn at random; most rules are SGD, for that can be checked to the last digit."""
    own = OWN_KNOBS[method](chance, workers)
    if method in ("asgd_momentum", "sandblaster"):
        own["lr"] = lr if method != "sandblaster" else 1.0
    else:
        own["rule"] = Sgd(lr)
        plain_only = own.get("cache") or own.get("memory", "keep") != "keep" or method == "asysvrg"
        if chance.random() < 0.15 and not plain_only:
            own["rule"] = chance.choice([Adam(lr), Momentum(lr, 0.5), Torch(torch.optim.RMSprop, lr=0.01)])
    if method in (*SERVED, *ELASTIC):
        own["shard"] = chance.choice(["size", "layer", "round-robin"])
    if method in SERVED and chance.random() < 0.4:
        own["codec"] = chance.choice([Feedback(TopK(0.5)), Feedback(TopK(0.1)), Feedback(Half())])
    if own.get("asynchronous") and chance.random() < 0.4:
        own["codec"] = Half(chance.choice(["fp16", "bf16"]))
    if method == "hierarchical_server" or (method in GROUPED and not own.get("cache") and chance.random() < 0.4):
        own["groups"] = chance.randint(2, workers)
    return own


def _any(**choices):
    """Knobs with a few values each, which may depend on the number of workers."""

    def pick(chance, workers):
        return {
            name: chance.choice(values(workers) if callable(values) else values) for name, values in choices.items()
        }

    return pick


def _up_to(workers):
    return [None, *range(1, workers + 1)]


def _ad_psgd(chance, workers):
    own = _any(graph=["ring", "complete", "exponential", "torus", "random"], bipartite=[False, True])(chance, workers)
    try:
        sides(own["graph"], workers)
    except Refused:
        own["bipartite"] = False
    return own if own["graph"] != "random" else {**own, "bipartite": False}


def _elastic(**more):
    """One rate, or none; the centre of several workers in lock step does not follow a strong spring."""

    def pick(chance, workers):
        own = _any(period=[1, 2, 3], asynchronous=[False, True, True], **more)(chance, workers)
        strong = 0.3 if own["asynchronous"] else 0.3 / workers
        return own | chance.choice([{}, {"center_rate": 0.9}, {"center_rate": 0.5}, {"moving_rate": strong}])

    return pick


OWN_KNOBS = {
    "ad_psgd": _ad_psgd,
    "adag": _any(period=[1, 2, 3], gamma=[inf], local_lr=[None, 0.0]),
    "adaptive_batch": _any(factor=[1, 2, 3], most=[1, 2, 4]),
    "agn": _any(period=[1, 2, 3], local_lr=[None, 0.0]),
    "asgd_momentum": _any(momentum=[0.0, 0.0, None]),
    "asysvrg": _any(full_steps=[1, 2], inner_steps=[1, 2, 3]),
    "backup_workers": _any(backups=lambda workers: range(workers), distinct=[True, True, False]),
    "bmuf": _any(period=[1, 2, 3], block_momentum=[0.0, 0.0, None], nesterov=[True, False]),
    "bsp": _any(collective=["auto", "auto", "native", "shared", "ring", "tree", "butterfly", "rabenseifner"]),
    "bsp_server": _any(),
    "d_psgd": _any(graph=["ring", "complete", "exponential", "torus", "random"], mix=["beside", "after"]),
    "dc_asgd": _any(strength=[0.0, 0.0, 0.04], adaptive=[False, True], mean_squares=[1, 6]),
    "diloco": _any(period=[1, 2, 3], outer_lr=[1.0], outer_momentum=[0.0, 0.0, 0.9]),
    "downpour": _any(
        n_fetch=[1, 1, 2, 3],
        n_push=[1, 1, 2, 3],
        prefetch=[True, False],
        phase=["start", "end"],
        local_lr=[0.0, 0.1],
        warm_start=[0, 0, 1, 3, 50],
    ),
    "dyn_sgd": _any(),
    "eamsgd": _elastic(momentum=[0.0, 0.5]),
    "easgd": _elastic(),
    "gossip": _any(mode=["push", "pull", "pairwise"], period=[1, 1, 2]),
    "hierarchical_server": _any(),
    "hogbatch": _any(),
    "hogwild": _any(),
    "hybrid": _any(threshold=[0.5]),
    "k_async": _any(k=_up_to),
    "k_batch_async": _any(k=_up_to),
    "k_sync": _any(k=_up_to),
    "model_averaging": _any(period=[1, 2, 3], phase=["end", "start"], memory=["keep", "average", "reset"]),
    "post_local_sgd": _any(period=[1, 2, 3], warmup=[0, 1, 3, 9]),
    "sandblaster": _any(history=[0, 1, 5], portion=[1, 2], batches=[1, 2, 3], iterations=[1, 2]),
    "simuparallel": _any(),
    "softsync": _any(splitting=lambda workers: range(1, workers + 2), modulated=[True, False]),
    "ssp": _any(staleness=[0, 1, 2, 3], cache=[False, True]),
    "staleness_aware": _any(),
    "weighted_averaging": _any(period=[1, 2, 3], by=["samples", "samples", "loss", "fisher"]),
}
METHODS = list(OWN_KNOBS)

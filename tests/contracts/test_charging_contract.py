"""Simulated time does not leak into methods: it is charged by the operations that move or compute, by bytes written.

Three promises: every vector operation is charged by the bytes that it writes; whatever a method writes without them is
charged too; and a run on sizes only takes as long as the run with numbers.
"""

import ast
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from greenlet import getcurrent
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

import manyhands as mh
import manyhands.virtual.kernel
from every_method import EVERY, loop
from manyhands import catalog
from manyhands.codecs import Half, Raw
from manyhands.collectives.plain import PlainCollective
from manyhands.core.encoder import Encoder
from manyhands.core.flat import ParamSlot, Span
from manyhands.core.port import REFERENCE_BYTES, REFERENCE_FLOPS
from manyhands.core.rule import UpdateContext
from manyhands.core.stage import Stage
from manyhands.core.vector_ops import UNCHARGED, VectorOps, vector_ops
from manyhands.core.weight_slice import WeightSlice
from manyhands.core.worker import Worker
from manyhands.rules import Adam, Sgd
from manyhands.splits.piped import SCHEDULES
from manyhands.splits.synthetic import SyntheticModel
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.grid import Grid
from manyhands.virtual.closed_form_collectives import ClosedFormCollective
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.world import simulate
from repeats import one_of_each

PACKAGE = Path(mh.__file__).parent
N = 1000


def vector(device):
    return torch.ones(N, device=device)


def payload(codec, device):
    return codec.encode(torch.ones(N), None) if device == "cpu" else (torch.empty(codec.nbytes(vector(device))),)


class Lent:
    """A message of two vectors."""

    def __init__(self, device):
        self.tensors = vector(device), vector(device)

    def keep(self):
        return self.tensors


OPERATIONS = {
    "copy": (1, lambda ops, x: ops.copy(x, x.clone())),
    "clone": (1, lambda ops, x: ops.clone(x)),
    "keep": (2, lambda ops, x: ops.keep(Lent(x.device.type))),
    "joined": (3, lambda ops, x: ops.joined([x, x, x])),
    "zero": (1, lambda ops, x: ops.zero(x)),
    "zeros_like": (1, lambda ops, x: ops.zeros_like(x)),
    "add": (1, lambda ops, x: ops.add(x, x, scale=2)),
    "scale": (1, lambda ops, x: ops.scale(x, 2)),
    "scaled": (1, lambda ops, x: ops.scaled(x, 2)),
    "divide": (1, lambda ops, x: ops.divide(x, 2)),
    "difference": (1, lambda ops, x: ops.difference(x, x)),
    "encoded": (1, lambda ops, x: ops.encoded(Half(), x)),
    "encoded, the vector itself": (0, lambda ops, x: ops.encoded(Raw(), x)),
    "decoded": (1, lambda ops, x: ops.decoded(Half(), payload(Half(), x.device.type), x)),
    "decoded, the vector itself": (0, lambda ops, x: ops.decoded(Raw(), (x,), x)),
    "decode": (1, lambda ops, x: ops.decode(Raw(), (x,), torch.empty_like(x))),
    "add_decoded": (1, lambda ops, x: ops.add_decoded(Raw(), (x,), x.clone(), torch.empty_like(x))),
    "computes": (5, lambda ops, x: ops.computes(x, passes=5)),
}
"""For each operation on vectors of N numbers: how many such vectors it writes."""


def seconds_of(run):
    """How long one rank of a reference core takes in simulated time."""

    def program(transport):
        run(vector_ops(transport))
        return transport.now()

    (seconds,) = simulate(Cluster(workers=1), program).results
    return seconds


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_charged_by_the_bytes_it_writes(name, device):
    vectors, run = OPERATIONS[name]
    assert seconds_of(lambda ops: run(ops, vector(device))) == pytest.approx(4 * N * vectors / REFERENCE_BYTES)


def test_every_operation_is_tested():
    public = {name for name, value in vars(VectorOps).items() if callable(value) and not name.startswith("_")}
    assert public - {"product", "charge_flops"} == {name.partition(",")[0] for name in OPERATIONS}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_matrix_product_is_charged_by_its_floating_point_operations(device):
    a, b = torch.ones(3, 5, device=device), torch.ones(5, 7, device=device)
    assert seconds_of(lambda ops: ops.product(a, b)) == pytest.approx(2 * 3 * 5 * 7 / REFERENCE_FLOPS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_sizes_stay_sizes(name):
    found = OPERATIONS[name][1](UNCHARGED, vector("meta"))
    assert all(x.is_meta for x in tree_leaves(found) if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("rule", [Sgd(0.1), Adam(0.1)], ids=["sgd", "adam"])
@pytest.mark.parametrize(("gradients", "copies", "untouched"), [(1, 0, ()), (3, 0, ()), (1, 2, ()), (2, 0, (1,))])
def test_an_update_is_one_pass_for_each_gradient_and_each_copy(rule, gradients, copies, untouched):
    slots = [ParamSlot(name, Span(0, i * N, (i + 1) * N), torch.Size([N]), i) for i, name in enumerate("ab")]

    def update(ops):
        one = WeightSlice(ops, Span(0, 0, 2 * N), torch.ones(2 * N), slots, rule)
        gs, into = ([torch.ones(2 * N) for _ in range(count)] for count in (gradients, copies))
        one.apply_mean(gs, UpdateContext(one.weights), untouched, into)

    numbers = N * (2 - len(untouched))
    assert seconds_of(update) == pytest.approx(4 * numbers * (gradients + copies) / REFERENCE_BYTES)


# -- methods ------------------------------------------------------------------------------------------

WIDTH, LARGE = 48, 500
"""Of the layers of the model, and a number of elements that only vectors like parameters have."""


def wide_task(sizes_only=False):
    """A model whose layers are larger than anything else in a run."""

    def model():
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    return mh.Task(model, TensorDataset(x, x), nn.functional.mse_loss, batch_size=4, sizes_only=sizes_only)


def clusters(name):
    traits = EVERY[name]().traits
    if not traits.one_host:
        yield mh.Cluster(workers=4)
    yield mh.Cluster(workers=4, hosts=1)
    if traits.servers:
        yield mh.Cluster(workers=3, servers=2)


class Written(TorchDispatchMode):
    """Counts the bytes that torch writes outside of what charges by itself, and those that were charged for that."""

    def __init__(self):
        super().__init__()
        self.inside = defaultdict(int)
        self.nbytes = self.charged = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if not self.inside[getcurrent()] and not function.is_view and "empty" not in str(function):
            large = [x for x in tree_leaves(found) if isinstance(x, torch.Tensor) and x.numel() >= LARGE]
            self.nbytes += sum(x.nbytes for x in large)
        return found

    def enter(self, function):
        """A function that charges by itself, or whose work is part of the time of a message."""

        def entered(*args, **kwargs):
            me = getcurrent()
            self.inside[me] += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.inside[me] -= 1

        return entered

    def declare(self, function):
        """`computes`, called by a method that then computes by itself."""

        def declared(ops, *outs, passes=1):
            if not self.inside[getcurrent()]:
                self.charged += passes * sum(x.nbytes for x in outs)
            return function(ops, *outs, passes=passes)

        return declared


PRIMITIVES = [(Worker, "_run"), *((Stage, name) for name in ("forward", "backward", "inward", "weigh"))]
PRIMITIVES += [(SyntheticModel, "predict"), (SyntheticModel, "learn")]
PRIMITIVES += [(kind, "answer") for kind in {type(make()) for make in EVERY.values()} if "answer" in vars(kind)]
PRIMITIVES += [
    (kind, name)
    for kind in (VectorOps, WeightSlice, Encoder, ClosedFormCollective, *PlainCollective.__subclasses__())
    for name, value in vars(kind).items()
    if callable(value) and name not in ("computes", "__init__")
]
"""What may write large vectors: passes of the model, answers, vector operations, updates, codecs, collectives."""


@pytest.fixture
def written(monkeypatch):
    mode = Written()
    for kind, name in PRIMITIVES:
        monkeypatch.setattr(kind, name, mode.enter(vars(kind)[name]))
    for kind in (VectorOps, *VectorOps.__subclasses__()):
        monkeypatch.setattr(kind, "computes", mode.declare(vars(kind)["computes"]))
    stack = torch._C._len_torch_dispatch_stack
    monkeypatch.setattr(manyhands.virtual.kernel, "_dispatches", lambda: max(0, stack() - 1))  # this mode may stay
    return mode


@pytest.mark.parametrize("name", one_of_each(loop, EVERY))
def test_what_a_method_writes_by_itself_is_charged(name, written):
    """At most two passes are written for each that is charged: torch makes temporary vectors, memory sees one pass."""
    for cluster in clusters(name):
        counts = []
        for steps in (4, 8):  # the difference is without setup
            written.nbytes = written.charged = 0
            task = wide_task()
            with written:
                mh.train(task, EVERY[name](), cluster=cluster, steps=steps)
            counts.append((written.nbytes, written.charged))
        (few, few_charged), (many, many_charged) = counts
        assert many - few <= 2 * (many_charged - few_charged)


class Leaking(AllReduce):
    """A method with a bare operation of torch."""

    def step(self, w, batch):
        w.flat.groups[0].weights.mul_(0.999)
        return super().step(w, batch)


def test_a_method_that_computes_by_itself_is_found(written):
    counts = []
    for kind in (AllReduce, Leaking):
        written.nbytes = written.charged = 0
        task = wide_task()
        with written:
            mh.train(task, kind(Sgd(0.1)), cluster=mh.Cluster(workers=2), steps=3)
        counts.append(written.nbytes)
        assert written.charged == 0
    weights = 4 * (WIDTH * WIDTH + WIDTH)
    assert counts[1] - counts[0] == 2 * 3 * 4 * weights, "of 2 workers in 3 steps, 4 bytes each"


NEED_NUMBERS = {name.replace("_", "-") for name in catalog.slices.__all__} | {"sandblaster"}
"""They join slices while the model runs, or search along a line for less loss."""
SIZES_VARY = {"sparcml", "strom"}
"""The size of what they send depends on the numbers, and is an estimate without them."""


@pytest.mark.parametrize("name", EVERY)
def test_sizes_alone_are_enough_to_know_the_time(name):
    for cluster in clusters(name):
        if name in NEED_NUMBERS:
            with pytest.raises(mh.Refused, match="real data"):
                mh.train(wide_task(sizes_only=True), EVERY[name](), cluster=cluster, steps=12)
            continue
        numbers, sizes = (
            mh.train(wide_task(sizes_only), EVERY[name](), cluster=cluster, steps=12) for sizes_only in (False, True)
        )
        assert sizes.weights is None and sizes.final_loss is None
        assert sizes.samples == numbers.samples
        assert sizes.seconds == (pytest.approx(numbers.seconds, rel=0.25) if name in SIZES_VARY else numbers.seconds)


class Residual(nn.Module):
    """A model that is cut by running it: a value that a skip connection needs passes over two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(9))

    def forward(self, x):
        outer = x = self.layers[0](x)
        for layer in self.layers[1:-1]:
            x = x + layer(x).relu()
        return self.layers[-1](x * outer)


PIPELINES = {name: EVERY[name.replace("_", "-")] for name in catalog.pipelines.__all__}
PIPELINES |= {f"over teams, {one}": lambda one=one: Grid(mh.ssp(), mh.piped(2, schedule=one)) for one in SCHEDULES}


@pytest.mark.parametrize("name", PIPELINES)
def test_sizes_alone_are_enough_to_know_the_time_of_a_model_that_is_cut(name):
    tasks = [replace(wide_task(sizes_only), model=Residual) for sizes_only in (False, True)]
    numbers, sizes = (mh.train(one, PIPELINES[name](), cluster=mh.Cluster(workers=4), steps=12) for one in tasks)
    assert sizes.seconds == numbers.seconds and sizes.bytes == numbers.bytes
    assert sizes.weights is None and sizes.final_loss is None


# -- the package --------------------------------------------------------------------------------------

CHARGES = {
    *("core/port.py", "core/subgroup.py", "core/vector_ops.py", "core/worker.py"),
    "runtime/transport/transport.py",
}
"""Where time is charged, besides the simulator itself."""
KNOWS_SIZES = {
    "core/vector_ops.py": "the operations",
    "core/flat.py": "the layout of a model",
    "core/worker.py": "the memory of a worker",
    "core/send_guard.py": "what was lent",
    "core/footprint.py": "ranks that refer to one model",
    "strategies/grid.py": "parameters of several stages, which must be equal",
    "splits/cutting.py": "stages that cannot be compared with the model",
    "collectives/group.py": "memory to lend from",
    "collectives/shared.py": "shared memory",
    "collectives/compressed/streams.py": "how many numbers a sparse sum has",
    "codecs/payload.py": "a scale",
    "codecs/terngrad.py": "a scale",
}
"""Where a tensor is asked whether it has numbers, besides the simulator itself."""


def users_of(*names):
    """The files of the package that use an attribute of one of these names."""
    for path in PACKAGE.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if any(getattr(node, "attr", getattr(node, "name", "")) in names for node in nodes):
            file = path.relative_to(PACKAGE).as_posix()
            if not file.startswith("virtual/"):
                yield file


def test_only_primitives_charge_time_and_ask_for_numbers():
    assert set(users_of("charge_copy", "charge_compute")) == CHARGES
    assert set(users_of("is_meta")) == KNOWS_SIZES.keys()

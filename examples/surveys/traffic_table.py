"""The work and the traffic of parallel methods: Table 1 of a survey beside counts from a virtual cluster.

For a network of L layers with N neurons each, mini-batches of T samples, M of them per epoch, and K machines that (if
synchronous) average after every tau mini-batches of their own, the survey has, up to constants,

                        computing node    parameter server    communication
    synchronous SGD     N^2 L T M / K     N^2 L M / tau       N^2 L M / tau     a model per machine and average
    asynchronous SGD    N^2 L T M / K     N^2 L M             N^2 L M           a model per mini-batch
    pipelined SGD       N^2 L T M / K     N^2 L M             N T M             an activation per mini-batch and link

Here each of them trains such a network with real gradients. Counted are the operations of forward and backward passes,
the numbers that servers write, or machines when they average, and the numbers that cross links. The count of an epoch
is that of two epochs minus that of one, so that reading the result at the end is left out. Layers have biases.

The server of the pipeline is its 2K - 1 copies of the weights, which each machine averages for its own layers once per
round of 2K - 1 mini-batches: N^2 L M is the count of all machines. Pipelines without copies average nothing.

Reference: D. Yook, H. Lee, I. Yoo, A survey on parallel training algorithms for deep neural networks, 2020

Examples:
    traffic_table.py
    traffic_table.py --neurons 512 --samples 16
    traffic_table.py --workers 8 --period 5 --out runs/mine
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from unittest.mock import patch

import torch
from _drawing import Figure, draw
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.collectives.choose import SMALL
from manyhands.core.port import REFERENCE_FLOPS
from manyhands.core.strategy import Strategy
from manyhands.core.worker import Worker
from manyhands.strategies.local_steps import LocalSteps
from manyhands.strategies.streaming import Streaming
from manyhands.virtual.transport import VirtualTransport

BYTES = 4
RATE = 0.01
"""The learning rate does not affect the traffic."""


@dataclass(frozen=True)
class Setting:
    """The parameters, in the survey's letters."""

    N: int = 256
    L: int = 8
    T: int = 64
    M: int = 80
    K: int = 4
    tau: int = 10

    def task(self) -> mh.Task:
        """An autoencoder; an epoch has M mini-batches."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.M * self.T, self.N, generator=generator)
        return mh.Task(model=self.network, data=TensorDataset(x, x), loss=mse_loss, batch_size=self.T, name="mlp")

    @property
    def weights(self) -> int:
        return self.N**2 * self.L

    @property
    def biases(self) -> Fraction:
        """The number of parameters per weight."""
        return 1 + Fraction(1, self.N)

    def network(self) -> nn.Sequential:
        return nn.Sequential(*[nn.Sequential(nn.Linear(self.N, self.N), nn.Tanh()) for _ in range(self.L)])


@dataclass(frozen=True)
class Row:
    """A method, the survey's formula, and the expected ratio of our count to it."""

    family: str
    method: str
    paper: str
    formula: Fraction
    constant: Fraction
    why: str
    strategy: Strategy
    averaging: Fraction
    """The survey's formula for the parameter server."""
    averaging_constant: Fraction
    averaging_why: str
    servers: int = 0
    links: int = 1
    """The number of links with equal traffic: the survey counts one of them."""


@dataclass(frozen=True)
class Count:
    """What was counted in an epoch."""

    operations: Fraction
    """Of the passes, on all machines together."""
    averaged: Fraction
    """Numbers written by servers, or by machines that average."""
    sent: Fraction
    """Numbers on all links together."""


def rows(s: Setting) -> list[Row]:
    """The rows of the table, before counting."""
    return [
        through_a_server(s, "synchronous", "bsp-server", "N^2 L M, tau = 1", mh.bsp_server(lr=RATE)),
        averaged(s),
        through_a_server(s, "asynchronous", "downpour", "N^2 L M", mh.downpour(lr=RATE, n_fetch=1, n_push=1)),
        through_a_server(s, "asynchronous", "ssp", "N^2 L M", mh.ssp(lr=RATE)),
        piped(s),
        copied(s),
    ]


def through_a_server(s: Setting, family: str, method: str, paper: str, strategy: Strategy) -> Row:
    why = "2: weights in, gradients out; 1 + 1/N: biases"
    formula, constant = Fraction(s.weights * s.M), 2 * s.biases
    if family == "synchronous":
        passes, served = 1, "1: a pass for every gradient, the last one with the update; 1 + 1/N: biases"
    else:
        passes, served = 2, "2: an update for every gradient, and a copy of the weights to be sent; 1 + 1/N: biases"
    return Row(family, method, paper, formula, constant, why, strategy, formula, passes * s.biases, served, servers=1)


def averaged(s: Setting) -> Row:
    why = "2 (K - 1) / K: a machine's share of an all-reduce; 1 + 1/N: biases"
    formula, constant = Fraction(s.weights * s.M, s.tau), Fraction(2 * (s.K - 1), s.K) * s.biases
    strategy = mh.model_averaging(lr=RATE, period=s.tau)
    served = "2: a mean and a copy on every machine; 1 + 1/N: biases"
    row = "synchronous", "model-averaging", "N^2 L M / tau", formula, constant, why, strategy
    return Row(*row, formula, 2 * s.biases, served)


def piped(s: Setting) -> Row:
    why = "2: activations forward, gradients back; an inner stage has two links, and no weights are sent"
    formula, constant = Fraction(s.N * s.T * s.M), Fraction(2)
    row = "pipelined", "pipedream", "N T M", formula, constant, why, mh.pipedream(lr=RATE)
    return Row(*row, Fraction(s.weights * s.M), Fraction(0), "0: there is one copy of the weights", links=s.K - 1)


def copied(s: Setting) -> Row:
    """The survey's pipeline: its 2K - 1 copies are averaged after every round; no average ends an incomplete one."""
    other, copies = piped(s), 2 * s.K - 1
    rounds = 2 * s.M // copies - s.M // copies
    constant = Fraction(rounds * (2 * copies + 1), s.M) * s.biases
    served = "4K - 1 passes over the weights for every 2K - 1 mini-batches of complete rounds; 1 + 1/N: biases"
    row = "pipelined", "weight-copies", "N T M", other.formula, other.constant, other.why, mh.weight_copies(lr=RATE)
    return Row(*row, Fraction(s.weights * s.M), constant, served, links=s.K - 1)


# -- counting ------------------------------------------------------------------------------------------


def count(row: Row, s: Setting) -> Count:
    """An epoch."""
    once, twice = (run(row, s, epochs) for epochs in (1, 2))
    return Count(*(b - a for a, b in zip(once, twice, strict=True)))


def run(row: Row, s: Setting, epochs: int) -> tuple[Fraction, Fraction, Fraction]:
    """Operations, numbers written by servers or averages, and numbers sent."""
    cluster = mh.Cluster(workers=s.K, servers=row.servers)
    with charges() as counted:
        sent = mh.train(s.task(), row.strategy, cluster=cluster, epochs=epochs).bytes_sent
    operations = Fraction(round(counted["operations"] * REFERENCE_FLOPS))
    return operations, Fraction(round(counted["averaged"]), BYTES), Fraction(sent, BYTES)


@contextmanager
def charges() -> Iterator[dict[str, float]]:
    """Sum up what the virtual cluster charges: seconds of passes; bytes written by servers or while averaging."""
    counted: dict[str, float] = defaultdict(float)
    averaging: set[int] = set()
    compute, copy = VirtualTransport.charge_compute, VirtualTransport.charge_copy

    def charge_compute(self: VirtualTransport, seconds: float) -> None:
        counted["operations"] += seconds
        compute(self, seconds)

    def charge_copy(self: VirtualTransport, nbytes: int) -> None:
        counted["averaged"] += nbytes if self.role == "server" or self.rank in averaging else 0
        copy(self, nbytes)

    def while_averaging(method: Callable[..., None]) -> Callable[..., None]:
        def noted(self: object, w: Worker, *rest: object) -> None:
            averaging.add(w.rank)
            method(self, w, *rest)
            averaging.discard(w.rank)

        return noted

    with (
        patch.object(VirtualTransport, "charge_compute", charge_compute),
        patch.object(VirtualTransport, "charge_copy", charge_copy),
        patch.object(Streaming, "_average", while_averaging(Streaming._average)),
        patch.object(LocalSteps, "_combine", while_averaging(LocalSteps._combine)),
    ):
        yield counted


# -- printing ------------------------------------------------------------------------------------------


def print_traffic(table: Sequence[Row], counts: Sequence[Count]) -> None:
    print(
        f"{'':14}{'method':17}{'paper':18}{'formula':>12}{'one link':>14}{'ratio':>8}{'explained':>11}{'all links':>14}"
    )
    for row, found in zip(table, counts, strict=True):
        ours = found.sent / row.links
        numbers = f"{float(row.formula):>12,.0f}{float(ours):>14,.0f}{float(ours / row.formula):>8.4f}"
        print(
            f"{row.family:14}{row.method:17}{row.paper:18}{numbers}{float(row.constant):>11.4f}{float(found.sent):>14,.0f}"
        )
    print("\nthe ratios (one link of a pipeline; of other methods all traffic):")
    for row in table:
        print(f"{row.method:17}{row.why}")


def print_work(s: Setting, table: Sequence[Row], counts: Sequence[Count]) -> None:
    """The two columns of computation: of one node, the mean of all; and of the server, or of all averages together."""
    node, explained = Fraction(s.weights * s.T * s.M, s.K), passes_of(s)
    print("\noperations of passes per epoch and node, and numbers that servers or averages write\n")
    print(f"{'method':17}{'node':>14}{'ours':>16}{'ratio':>8}{'explained':>11}", end="")
    print(f"{'server':>14}{'ours':>14}{'ratio':>8}{'explained':>11}")
    for row, found in zip(table, counts, strict=True):
        ours = found.operations / s.K
        print(f"{row.method:17}{float(node):>14,.0f}{float(ours):>16,.0f}{float(ours / node):>8.4f}", end="")
        print(f"{float(explained):>11.4f}{float(row.averaging):>14,.0f}{float(found.averaged):>14,.0f}", end="")
        print(f"{float(found.averaged / row.averaging):>8.4f}{float(row.averaging_constant):>11.4f}")
    print(
        "\nthe ratios: 6 - 2/L for nodes: a multiply-add is two operations, in three products; the first layer has two"
    )
    for row in table:
        print(f"{row.method:17}{row.averaging_why}")


def passes_of(s: Setting) -> Fraction:
    return 6 - Fraction(2, s.L)


def print_quotient(s: Setting, table: Sequence[Row], counts: Sequence[Count]) -> None:
    """The survey's argument for pipelines."""
    ours = {row.method: found.sent / row.links for row, found in zip(table, counts, strict=True)}
    quotient, expected = ours["downpour"] / ours["pipedream"], Fraction(s.N * s.L, s.T)
    print(f"\n{'asynchronous / pipelined':31}{'N L / T':18}{float(expected):>12.2f}{float(quotient):>14.2f}", end="")
    print(f"{float(quotient / expected):>8.4f}{float(s.biases):>11.4f}")
    print(
        f"This compares all traffic of {s.K} workers with their server to one link of the pipeline; for all "
        f"{s.K - 1} links\nit is {float(quotient / (s.K - 1)):.2f}. A link of the pipeline carries less as long as "
        f"T < N L, here {s.T} < {s.N * s.L:,}."
    )


def figure_of(s: Setting, table: Sequence[Row], counts: Sequence[Count]) -> Figure:
    """Numbers per epoch, for each method: the formula and ours."""
    names = [f"{row.family}: {row.method}" for row in table]
    bars = {
        "formula": [row.formula for row in table],
        "sent": [found.sent / row.links for row, found in zip(table, counts, strict=True)],
    }
    data = [{"type": "bar", "name": name, "x": names, "y": [float(x) for x in ys]} for name, ys in bars.items()]
    setting = f"N = {s.N}, L = {s.L}, T = {s.T}, M = {s.M}, K = {s.K}, tau = {s.tau}"
    layout = {
        "title": {"text": f"Numbers sent per epoch (of a pipeline: per link), {setting}"},
        "yaxis": {"type": "log", "title": {"text": "numbers"}},
    }
    return {"data": data, "layout": layout}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    usual = Setting()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--neurons", type=int, default=usual.N, help="N, neurons of a layer")
    parser.add_argument("--layers", type=int, default=usual.L, help="L, layers")
    parser.add_argument("--samples", type=int, default=usual.T, help="T, samples of a mini-batch")
    parser.add_argument("--batches", type=int, default=usual.M, help="M, mini-batches of an epoch, a multiple of K tau")
    parser.add_argument("--workers", type=int, default=usual.K, help="K, machines")
    parser.add_argument("--period", type=int, default=usual.tau, help="tau, mini-batches between two averages")
    parser.add_argument(
        "--small", action="store_true", help="a network that takes two seconds; overrides the other options"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/surveys/traffic_table"), help="the folder of the figure")
    given = parser.parse_args(argv)
    refuse(parser, given)
    return given


def refuse(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Refuse settings without an exact count: incomplete rounds, and vectors that another algorithm sums."""
    if given.workers < 2 or given.period < 1 or given.batches % (given.workers * given.period):
        parser.error(f"batches is {given.batches}, but must be a multiple of {given.workers} workers x {given.period}")
    if given.layers * given.neurons**2 * BYTES <= SMALL:
        parser.error(f"{given.layers} layers of {given.neurons} neurons are small, but must have more than 64 KiB")


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    s = Setting(given.neurons, given.layers, given.samples, given.batches, given.workers, given.period)
    s = Setting(N=64, L=8, T=16, M=16, K=4, tau=2) if given.small else s
    print(f"numbers sent per epoch; N = {s.N}, L = {s.L}, T = {s.T}, M = {s.M}, K = {s.K}, tau = {s.tau}\n")
    table = rows(s)
    counts = [count(row, s) for row in table]
    print_traffic(table, counts)
    print_quotient(s, table, counts)
    print_work(s, table, counts)
    print(draw(figure_of(s, table, counts), given.out / "traffic.html"))


if __name__ == "__main__":
    main()

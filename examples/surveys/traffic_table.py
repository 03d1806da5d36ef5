"""The traffic of parallel methods: three formulas of a survey beside counts from a virtual cluster.

For a network of L layers with N neurons each, mini-batches of T samples, M of them per epoch, and K machines that (if
synchronous) average after every tau mini-batches of their own, Table 1 of the survey has, up to constants,

    synchronous SGD     N^2 L M / tau     a model per machine and average
    asynchronous SGD    N^2 L M           a model per mini-batch
    pipelined SGD       N T M             an activation per mini-batch, on each link

Here each of them trains such a network with real gradients, and all numbers that cross a link are counted. The count of
an epoch is that of two epochs minus that of one, so that reading the result at the end is left out. Layers have biases.

Reference: D. Yook, H. Lee, I. Yoo, A survey on parallel training algorithms for deep neural networks, 2020

Examples:
    traffic_table.py
    traffic_table.py --neurons 512 --samples 16
    traffic_table.py --workers 8 --period 5 --out runs/mine
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
from _drawing import Figure, draw
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.collectives.choose import SMALL
from manyhands.core.strategy import Strategy

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
    servers: int = 0
    links: int = 1
    """The number of links with equal traffic: the survey counts one of them."""


def rows(s: Setting) -> list[Row]:
    """The rows of the table, before counting."""
    return [
        through_a_server(s, "synchronous", "bsp-server", "N^2 L M, tau = 1", mh.bsp_server(lr=RATE)),
        averaged(s),
        through_a_server(s, "asynchronous", "downpour", "N^2 L M", mh.downpour(lr=RATE, n_fetch=1, n_push=1)),
        through_a_server(s, "asynchronous", "ssp", "N^2 L M", mh.ssp(lr=RATE)),
        piped(s),
    ]


def through_a_server(s: Setting, family: str, method: str, paper: str, strategy: Strategy) -> Row:
    why = "2: weights in, gradients out; 1 + 1/N: biases"
    formula, constant = Fraction(s.N**2 * s.L * s.M), 2 * s.biases
    return Row(family, method, paper, formula, constant, why, strategy, servers=1)


def averaged(s: Setting) -> Row:
    why = "2 (K - 1) / K: a machine's share of an all-reduce; 1 + 1/N: biases"
    formula, constant = Fraction(s.N**2 * s.L * s.M, s.tau), Fraction(2 * (s.K - 1), s.K) * s.biases
    strategy = mh.model_averaging(lr=RATE, period=s.tau)
    return Row("synchronous", "model-averaging", "N^2 L M / tau", formula, constant, why, strategy)


def piped(s: Setting) -> Row:
    why = "2: activations forward, gradients back; an inner stage has two links, and no weights are sent"
    formula, constant = Fraction(s.N * s.T * s.M), Fraction(2)
    return Row("pipelined", "pipedream", "N T M", formula, constant, why, mh.pipedream(lr=RATE), links=s.K - 1)


def count(row: Row, s: Setting) -> Fraction:
    """The numbers sent over one link in an epoch."""
    cluster = mh.Cluster(workers=s.K, servers=row.servers)
    once, twice = (mh.train(s.task(), row.strategy, cluster=cluster, epochs=epochs).bytes_sent for epochs in (1, 2))
    return Fraction(twice - once, BYTES * row.links)


def print_table(table: Sequence[Row], counted: Sequence[Fraction]) -> None:
    print(f"{'':14}{'method':17}{'paper':18}{'formula':>12}{'ours':>14}{'ratio':>8}{'explained':>11}")
    for row, ours in zip(table, counted, strict=True):
        numbers = f"{float(row.formula):>12,.0f}{float(ours):>14,.0f}{float(ours / row.formula):>8.4f}"
        print(f"{row.family:14}{row.method:17}{row.paper:18}{numbers}{float(row.constant):>11.4f}")
    print("\nthe ratios:")
    for row in table:
        print(f"{row.method:17}{row.why}")


def print_quotient(s: Setting, table: Sequence[Row], counted: Sequence[Fraction]) -> None:
    """The survey's argument for pipelines."""
    ours = {row.method: found for row, found in zip(table, counted, strict=True)}
    quotient, expected = ours["downpour"] / ours["pipedream"], Fraction(s.N * s.L, s.T)
    print(f"\n{'asynchronous / pipelined':31}{'N L / T':18}{float(expected):>12.2f}{float(quotient):>14.2f}", end="")
    print(f"{float(quotient / expected):>8.4f}{float(s.biases):>11.4f}")
    print(
        f"This compares all traffic of {s.K} workers with their server to one link of the pipeline; for all "
        f"{s.K - 1} links\nit is {float(quotient / (s.K - 1)):.2f}. A link of the pipeline carries less as long as "
        f"T < N L, here {s.T} < {s.N * s.L:,}."
    )


def figure_of(s: Setting, table: Sequence[Row], counted: Sequence[Fraction]) -> Figure:
    """Numbers per epoch, for each method: the formula and ours."""
    names = [f"{row.family}: {row.method}" for row in table]
    bars = {"formula": [row.formula for row in table], "sent": counted}
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
    counted = [count(row, s) for row in table]
    print_table(table, counted)
    print_quotient(s, table, counted)
    print(draw(figure_of(s, table, counted), given.out / "traffic.html"))


if __name__ == "__main__":
    main()

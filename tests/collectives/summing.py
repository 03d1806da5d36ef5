"""Small workers for tests of compressed sums, and codecs that are easy to follow."""

from dataclasses import dataclass

import torch
from torch import nn

from manyhands.codecs import TopK
from manyhands.core.codec import CodecTraits
from manyhands.core.flat import Span
from manyhands.core.port import Tag
from manyhands.core.task import Task
from manyhands.core.worker import Worker
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.world import simulate

NUMEL = 7 * 83 + 7 + 3 * 2 * 11 + 13
"""Of the first group of the model: odd, and enough for 8 stripes."""
WHOLE = Span(0, 0, NUMEL)
CUT = [Span(0, 0, 590), Span(0, 590, 591), Span(0, 591, NUMEL)]
"""Some parameters as a whole, and one in three pieces."""


class Model(nn.Module):
    """Parameters of several shapes, and one of another dtype."""

    def __init__(self):
        super().__init__()
        shapes = {"a": (7, 83), "b": (7,), "c": (3, 2, 11), "d": (13,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.float64)))
        self.e = nn.Parameter(torch.zeros(2, 9, dtype=torch.float32))


def task(sizes_only=False):
    return Task(model=Model, data=[(torch.zeros(1), torch.zeros(1))], sizes_only=sizes_only)


def worker(transport, sizes_only=False):
    one = task(sizes_only)
    return Worker(transport, one, one.build(0), seed=3, steps=1, batch_size=1)


def gradient(rank, step=0, numel=NUMEL):
    """The gradient of a worker in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64)


def meta(numel=NUMEL):
    return torch.empty(numel, dtype=torch.float64, device="meta")


def adding(make, *, steps=1, first=0, spans=(WHOLE,), vectors=gradient, saved=None, sizes_only=False):
    """A program that returns the sum of every step, and the state of the sum at the end."""

    def program(transport):
        w = worker(transport, sizes_only)
        one = make(w)
        if saved is not None:
            one.restore(saved)
        sums = []
        for step in range(first, first + steps):
            w.step = step
            x = meta() if sizes_only else vectors(w.rank, step)
            for span in spans:
                one.all_reduce(x, span)
            sums.append(x.clone())
            x.fill_(7)  # no rank reads it any more
        return sums, {name: value.clone() for name, value in one.state().items()}

    return program


def added(P, make, *, cluster=None, **more):
    """Run that on P ranks."""
    return simulate(cluster or Cluster(workers=P), adding(make, **more))


def sums_of(run):
    """The sums of every step; all ranks must have the same bits."""
    sums = run.results[0][0]
    for others, _ in run.results:
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(sums, others, strict=True))
    return sums


def bits(x):
    return x.view(torch.int64)


def states_of(run):
    return [state for _, state in run.results]


def left(states, *kinds):
    """The sum of what all workers have not sent yet, as one row."""
    total = torch.zeros(NUMEL, dtype=torch.float64)
    spans = dict(zip("abcd", total.split([7 * 83, 7, 3 * 2 * 11, 13]), strict=True))
    for state in states:
        for name, row in spans.items():
            for kind in kinds:
                row += state.get(f"{kind}/{name}", 0)
    return total


def all_gradients(P, steps, first=0):
    return sum(gradient(rank, step) for rank in range(P) for step in range(first, first + steps))


def decoded(codec, x, memory=None):
    out = torch.full_like(x, torch.nan)
    codec.decode(codec.encode(x, memory), out)
    return out


@dataclass(frozen=True)
class OneBit:
    """The mean of what is positive, the mean of what is not, and which is which."""

    by_parameter: bool = False
    traits = CodecTraits()

    def memory(self, like):
        return None

    def encode(self, x, memory):
        up = x >= 0
        means = [x[one].mean() if bool(one.any()) else x.new_zeros(()) for one in (up, ~up)]
        return up.view(-1).to(torch.uint8), torch.stack(means)

    def decode(self, payload, out):
        up, means = payload
        out.copy_(torch.where(up.view(out.shape) == 1, means[0], means[1]))

    def nbytes(self, like):
        return like.numel() + 2 * like.element_size()


@dataclass(frozen=True)
class Pairs(TopK):
    """Top-k that says what it keeps."""

    def pairs(self, payload):
        return tuple(payload)


@dataclass(frozen=True)
class Dithered:
    """Rounds at random, so that not even the sender knows the payload beforehand."""

    by_parameter: bool = False
    traits = CodecTraits()

    def memory(self, like):
        return None

    def encode(self, x, memory):
        return ((x + torch.rand(x.shape)).floor().to(torch.int32),)

    def decode(self, payload, out):
        out.copy_(payload[0])

    def nbytes(self, like):
        return 4 * like.numel()


@dataclass(frozen=True)
class ByLayer:
    """Another codec, parameter by parameter."""

    codec: object
    by_parameter: bool = True
    traits = CodecTraits()

    def __getattr__(self, name):
        return getattr(self.codec, name)


class Recorder:
    """A transport that records sender, receiver and bytes of every message."""

    def __init__(self, transport, log):
        self._transport = transport
        self._log = log

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def send(self, to, tag: Tag, meta=(), tensors=(), **more):
        kind = tag.name.split(":")[1]
        self._log.append((kind, tag.key, self.rank, to, sum(x.nbytes for x in tensors)))
        self._transport.send(to, tag, meta, tensors, **more)

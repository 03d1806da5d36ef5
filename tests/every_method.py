"""Every name of `manyhands list` with default settings, and what its card and its strategy say about a run of it."""

import dataclasses
import functools
from contextlib import suppress

import pytest

import manyhands as mh
from manyhands.codecs import Half
from manyhands.core.method_index import methods
from manyhands.tasks import load

METHODS = {name: getattr(mh, method.function) for name, method in methods().items()}
VARIANTS = {
    "easgd asynchronous": functools.partial(mh.easgd, asynchronous=True),
    "easgd in fp16": functools.partial(mh.easgd, asynchronous=True, codec=Half()),
    "gossip by push": functools.partial(mh.gossip, mode="push"),
    "gossip in pairs": functools.partial(mh.gossip, mode="pairwise"),
    "ssp with a cache": functools.partial(mh.ssp, cache=True, lr=0.03),
    "terngrad with one scale": functools.partial(mh.terngrad, shared_scale=True),
}
"""Other loops behind the same names."""
NARROW = {
    "interleaved": functools.partial(mh.interleaved, stages=2),
    "filter-split": functools.partial(mh.filter_split, ranks=1),
    "channel-split": functools.partial(mh.channel_split, ranks=1),
}
"""With all workers in one pipeline the first would need twice as many layers as workers. The others divide
convolutions, of which the small tasks have none (tests/end_to_end/test_slices.py has some)."""
EVERY = METHODS | VARIANTS | NARROW
BATCH_SIZE, SAMPLES = 32, 1437
"""Those of digits."""
GOOD = 0.93
"""The accuracy that two workers reach at least, whatever happens to them."""


def ends_when_one_is_lost(name):
    """What its traits say."""
    return EVERY[name]().traits.on_worker_loss == "ends"


def repeats(strategy):
    """Whether a run gives the same bits again, in either world: not if workers write into one memory without locks."""
    return strategy.traits.lockstep and not strategy.traits.one_host


def accepts_joiners(strategy):
    """Whether workers may come later."""
    return strategy.traits.joiners


def replicas(strategy, workers):
    """How many copies of the model so many workers hold."""
    return strategy.replicas(workers)


def links(strategy):
    """How its ranks may be connected."""
    return ["shm"] if strategy.traits.one_host else ["shm", "tcp"]


def fits(strategy, workers, servers=0):
    """Whether the method trains digits with so many."""
    if servers and not strategy.traits.servers:
        return False
    with suppress(mh.Refused):
        strategy.check(workers, servers, BATCH_SIZE, load("digits").build(0))
        return True
    return False


def workers_up_to(strategy, most):
    """As many as it can have: a pipeline has no more stages than there are layers."""
    return next(workers for workers in range(most, 0, -1) if fits(strategy, workers))


def loop(name, methods=EVERY):
    """What a method trains by: its ways and the kinds of its parts, but not its codec, its rule and its numbers."""
    strategy = methods[name]()
    parts = [getattr(strategy, one.name) for one in dataclasses.fields(strategy) if one.name not in ("codec", "rule")]
    ways = [part.func if isinstance(part, functools.partial) else part for part in parts]
    return type(strategy), *(way if isinstance(way, str | bool) or callable(way) else type(way) for way in ways)


def one_of_each_file():
    """A method for every file of strategies."""
    found = {}
    for name, recipe in METHODS.items():
        found.setdefault(type(recipe()).__module__, name)
    return list(found.values())


# -- tests of all of them: those of one method run in one process of pytest if it is told `--dist loadgroup` ----------


def _param(name, *others):
    return pytest.param(name, *others, marks=pytest.mark.xdist_group(name))


EVERY_METHOD = pytest.mark.parametrize("name", [_param(name) for name in EVERY])


def on_every_link(names=EVERY):
    """Every method on every link that it may have."""
    pairs = [_param(name, link) for name in names for link in links(EVERY[name]())]
    return pytest.mark.parametrize(("name", "link"), pairs)

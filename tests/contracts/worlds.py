"""The worlds in which every Transport contract is tested. A new world is one more entry of WORLDS.

A world runs `program(transport)` on every rank and gives the results by rank, None for a rank that died. Real
processes import the program by name, so programs are functions at the top of a module, or `partial`s of such.
"""

import os
import signal
from dataclasses import replace
from functools import partial

from manyhands.core.port import Tag
from manyhands.core.subgroup import Subgroup
from manyhands.runtime.launch.launch import launch
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.faults import Die
from manyhands.virtual.world import simulate

NEVER = Tag("never")
"""A tag that no rank sends."""


def die(transport):
    """Kill this rank here and now; it must be among the `deaths` of its run."""
    transport.flush()
    while transport.is_simulated:
        transport.recv(NEVER, frm=transport.rank)
    os.kill(os.getpid(), signal.SIGKILL)


def call_newcomer(launcher, transport):
    """Start the next spare; in virtual time it joins at its own time, long after the others are idle."""
    if not transport.is_simulated:
        os.kill(launcher, signal.SIGUSR1)


def by_rank(*programs):
    """A program that is another one on every rank; the last one is that of all further ranks too."""
    return partial(_choose, programs)


def _choose(programs, transport):
    return programs[min(transport.rank, len(programs) - 1)](transport)


def _and_leave(program, transport):
    result = program(transport)
    transport.leave()
    return result


class Virtual:
    """Ranks in virtual time. A rank that is to die waits for its death, long after the others are idle."""

    first, suffix = 0, ""

    def run(self, size, program, *, hosts=None, servers=0, deaths=(), newcomers=0):
        """Run on `size` ranks, the last `servers` of them servers, the others spread over `hosts`; more come later."""
        faults = [Die(rank, at=1000.0 * number) for number, rank in enumerate(deaths, start=1)]
        times = [1000.0 * (number + 1) for number in range(newcomers)]
        cluster = self.cluster(workers=size - servers, servers=servers, hosts=hosts, faults=faults, newcomers=times)
        return simulate(cluster, partial(_and_leave, program)).results

    cluster = Cluster


class Real:
    """Ranks in processes of their own. They come from a fork server that has imported all they need but done nothing,
    so that a test does not wait for torch; hosts are as many as asked for, all of them on this machine."""

    def __init__(self, link):
        self.link = link

    first, suffix = 0, ""
    """The job's rank of the first rank, and what messages add to the names of tags."""

    def run(self, size, program, *, hosts=None, servers=0, deaths=(), newcomers=0):
        """Run on `size` ranks; lent tensors are watched."""
        shape = Cluster(workers=size - servers, servers=servers, hosts=hosts, newcomers=[0.0] * newcomers)
        placed = self.placed(shape)
        return launch(
            partial(_and_leave, program),
            workers=size - servers,
            servers=servers,
            hosts=placed,
            link=self.link,
            context="forkserver",
            checks_lending=True,
            spares=newcomers,
        ).results

    def placed(self, shape):
        return tuple(shape.placement())


# -- a subgroup of each world -------------------------------------------------------------------------


class OneMore(Cluster):
    """A cluster whose first worker is outside of the group, on the host of the second."""

    def placement(self):
        inside = replace(self, workers=self.workers - 1, faults=[], newcomers=self.newcomers)
        placed = Cluster.placement(inside)
        return [placed[0], *placed]


def _in_subgroup(program, transport):
    """The program on all ranks but the first, which leaves at once."""
    if transport.rank:
        return program(Subgroup(transport, range(1, transport.size), "group"))
    return None


class InSubgroup:
    """The ranks of a group within a job that has one rank more."""

    first, suffix = 1, ":group"

    def __init__(self, world):
        self._world = world

    def run(self, size, program, *, deaths=(), **shape):
        """Run on the ranks of the group; deaths are counted in it."""
        later = [rank + 1 for rank in deaths]
        return self._world.run(size + 1, partial(_in_subgroup, program), deaths=later, **shape)[1:]


class VirtualWithOneMore(Virtual):
    cluster = OneMore


class RealWithOneMore(Real):
    def placed(self, shape):
        placed = replace(shape, workers=shape.workers - 1).placement()
        return (placed[0], *placed)


WORLDS = {
    "virtual": Virtual(),
    "shm": Real("shm"),
    "tcp": Real("tcp"),
    "subgroup virtual": InSubgroup(VirtualWithOneMore()),
    "subgroup shm": InSubgroup(RealWithOneMore("shm")),
    "subgroup tcp": InSubgroup(RealWithOneMore("tcp")),
}

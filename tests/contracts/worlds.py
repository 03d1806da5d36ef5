"""The worlds in which every Transport contract is tested. A new world is one more entry of WORLDS.

A world runs `program(transport)` on every rank and gives the results by rank, None for a rank that died. Real
processes import the program by name, so programs are functions at the top of a module, or `partial`s of such.
"""

import os
import signal
from functools import partial

from manyhands.core.port import Tag
from manyhands.runtime.launch.launch import launch
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.faults import Die
from manyhands.virtual.transport import VirtualTransport
from manyhands.virtual.world import simulate

NEVER = Tag("never")
"""A tag that no rank sends."""


def die(transport):
    """Kill this rank here and now; it must be among the `deaths` of its run."""
    transport.flush()
    while isinstance(transport, VirtualTransport):
        transport.recv(NEVER, frm=transport.rank)
    os.kill(os.getpid(), signal.SIGKILL)


def call_newcomer(launcher, transport):
    """Start the next spare; in virtual time it joins at its own time, long after the others are idle."""
    if not isinstance(transport, VirtualTransport):
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

    def run(self, size, program, *, hosts=None, servers=0, deaths=(), newcomers=0):
        """Run on `size` ranks, the last `servers` of them servers, the others spread over `hosts`; more come later."""
        faults = [Die(rank, at=1000.0 * number) for number, rank in enumerate(deaths, start=1)]
        times = [1000.0 * (number + 1) for number in range(newcomers)]
        cluster = Cluster(workers=size - servers, servers=servers, hosts=hosts, faults=faults, newcomers=times)
        return simulate(cluster, partial(_and_leave, program)).results


class Real:
    """Ranks in processes of their own. They come from a fork server that has imported all they need but done nothing,
    so that a test does not wait for torch; hosts are as many as asked for, all of them on this machine."""

    def __init__(self, link):
        self.link = link

    def run(self, size, program, *, hosts=None, servers=0, deaths=(), newcomers=0):
        """Run on `size` ranks; lent tensors are watched."""
        shape = Cluster(workers=size - servers, servers=servers, hosts=hosts, newcomers=[0.0] * newcomers)
        placed = tuple(shape.placement())
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


WORLDS = {"virtual": Virtual(), "shm": Real("shm"), "tcp": Real("tcp")}

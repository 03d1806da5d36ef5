"""Which algorithm sums? By name, or `auto`: by where the ranks are and how much there is to sum.

    one rank                      nothing to do
    one host                      shared
    several hosts, <= 64 KiB      butterfly: fewest rounds
                   more           rabenseifner if P is a power of two, else ring: fewest bytes

`native` leaves it to the world: `torch.distributed` among real processes, a closed form in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.protocols import Collective, Transport, on_one_host
from manyhands.topology.collectives.butterfly import Butterfly
from manyhands.topology.collectives.group import check_ranks
from manyhands.topology.collectives.rabenseifner import Rabenseifner
from manyhands.topology.collectives.ring import Ring
from manyhands.topology.collectives.shared import Shared
from manyhands.topology.collectives.tree import Tree

SMALL = 64 * 1024
"""Bytes up to which rounds cost more than bytes."""


class Alone:
    """The collective of one rank."""

    def all_reduce(self, x: Tensor) -> None:
        """x is the sum."""


class BySize:
    """Few rounds for small vectors, few bytes for large ones."""

    def __init__(self, transport: Transport, group: Sequence[int]) -> None:
        power_of_two = len(group) & (len(group) - 1) == 0
        self._small = Butterfly(transport, group)
        self._large: Collective = Rabenseifner(transport, group) if power_of_two else Ring(transport, group)

    def all_reduce(self, x: Tensor) -> None:
        """Sum in place."""
        small = x.nbytes <= SMALL
        (self._small if small else self._large).all_reduce(x)


def auto(transport: Transport, group: Sequence[int]) -> Collective:
    """What suits these ranks."""
    if len(group) == 1:
        return Alone()
    return Shared(transport, group) if on_one_host(transport, group) else BySize(transport, group)


def native(transport: Transport, group: Sequence[int]) -> Collective:
    """What the world has."""
    return transport.collective(group)


ALGORITHMS: dict[str, Callable[[Transport, Sequence[int]], Collective]] = {
    "auto": auto,
    "native": native,
    "shared": Shared,
    "ring": Ring,
    "tree": Tree,
    "butterfly": Butterfly,
    "rabenseifner": Rabenseifner,
}


def all_reducer(name: str, transport: Transport, group: Sequence[int]) -> Collective:
    """The all-reduce called `name` over `group`, the same sorted ranks on each of them; for one activity at a time."""
    refuse_unless(name in ALGORITHMS, "collective", name, f"one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name](transport, check_ranks(transport, group))

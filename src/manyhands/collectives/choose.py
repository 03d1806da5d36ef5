"""Which algorithm does a group use? By name, or `auto`: by where the ranks are and how long the vector is.

    one rank                      nothing to do
    one host                      shared
    several hosts, <= 64 KiB      butterfly: fewest rounds
                   more           rabenseifner if P is a power of two, else ring: fewest bytes

`native` is what the world has: `torch.distributed` among real processes, a closed form in virtual time. Every
algorithm has all operations of `Collective`; those of which it has no form of its own are in `plain`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from manyhands.collectives.butterfly import Butterfly
from manyhands.collectives.group import check_op, check_ranks, vector
from manyhands.collectives.plain import PlainCollective
from manyhands.collectives.rabenseifner import Rabenseifner
from manyhands.collectives.ring import Ring
from manyhands.collectives.shared import Shared
from manyhands.collectives.tree import Tree
from manyhands.core.errors import refuse_unless
from manyhands.core.port import Collective, ReduceOp, Transport, on_one_host

SMALL = 64 * 1024
"""Bytes up to which rounds cost more than bytes."""


class Alone(PlainCollective):
    """The collective of one rank: no messages."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        super().__init__(transport, ranks, "alone")

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        """Nothing: `x` is the result."""
        check_op(op)
        vector(x)


class BySize:
    """Few rounds for short vectors, few bytes for long ones."""

    def __init__(self, transport: Transport, group: Sequence[int]) -> None:
        power_of_two = len(group) & (len(group) - 1) == 0
        self._small = Butterfly(transport, group)
        self._large: Collective = Rabenseifner(transport, group) if power_of_two else Ring(transport, group)

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        self._for(x).all_reduce(x, op)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._for(x).reduce_scatter(x)

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        self._for(out).all_gather(mine, out)

    def broadcast(self, x: Tensor, root: int) -> None:
        self._for(x).broadcast(x, root)

    def all_to_all(self, xs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """The same in both algorithms; lengths may differ from rank to rank, so they cannot decide."""
        self._small.all_to_all(xs, outs)

    def barrier(self) -> None:
        self._small.barrier()

    def _for(self, x: Tensor) -> Collective:
        return self._small if x.nbytes <= SMALL else self._large


def auto(transport: Transport, group: Sequence[int]) -> Collective:
    """The algorithm for these ranks."""
    if len(group) == 1:
        return Alone(transport, group)
    return Shared(transport, group) if on_one_host(transport, group) else BySize(transport, group)


def native(transport: Transport, group: Sequence[int]) -> Collective:
    """The collective of the world."""
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


def collective(name: str, transport: Transport, group: Sequence[int]) -> Collective:
    """The collective called `name` over `group`, the same sorted ranks on each of them; for one activity at a time."""
    refuse_unless(name in ALGORITHMS, "collective", name, f"one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name](transport, check_ranks(transport, group))

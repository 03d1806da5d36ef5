"""The names of the literature, each a recipe of a few lines. A family's `__all__` says which it has."""

from manyhands.catalog import (
    asynchronous,
    batch,
    compressed,
    delayed,
    local,
    peers,
    pipelines,
    quorum,
    stale,
    synchronous,
)
from manyhands.catalog.asynchronous import *  # noqa: F403
from manyhands.catalog.batch import *  # noqa: F403
from manyhands.catalog.compressed import *  # noqa: F403
from manyhands.catalog.delayed import *  # noqa: F403
from manyhands.catalog.local import *  # noqa: F403
from manyhands.catalog.peers import *  # noqa: F403
from manyhands.catalog.pipelines import *  # noqa: F403
from manyhands.catalog.quorum import *  # noqa: F403
from manyhands.catalog.stale import *  # noqa: F403
from manyhands.catalog.synchronous import *  # noqa: F403

__all__ = [
    *asynchronous.__all__,
    *batch.__all__,
    *compressed.__all__,
    *delayed.__all__,
    *local.__all__,
    *peers.__all__,
    *pipelines.__all__,
    *quorum.__all__,
    *stale.__all__,
    *synchronous.__all__,
]

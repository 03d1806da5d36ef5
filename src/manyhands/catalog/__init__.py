"""The names of the literature, each a recipe of a few lines. A family's `__all__` says which it has."""

from manyhands.catalog import asynchronous, pipelines, stale, synchronous
from manyhands.catalog.asynchronous import *  # noqa: F403
from manyhands.catalog.gossip import *  # noqa: F403
from manyhands.catalog.gossip import __all__ as _gossip  # the family has a method of the same name
from manyhands.catalog.pipelines import *  # noqa: F403
from manyhands.catalog.stale import *  # noqa: F403
from manyhands.catalog.synchronous import *  # noqa: F403

__all__ = [*asynchronous.__all__, *_gossip, *pipelines.__all__, *stale.__all__, *synchronous.__all__]

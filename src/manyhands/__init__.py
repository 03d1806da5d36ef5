"""manyhands: train one network with many workers, by every method of the literature, on one interface.

This file has the public names and nothing else: those below, and every method of the catalog. Each is imported when it
is first used, so that the help of the command line does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands import codecs, rules, splits
    from manyhands.catalog import *  # noqa: F403
    from manyhands.core.errors import ChangedInFlight, Deadlock, Diverged, ManyhandsError, PeerLost, Refused
    from manyhands.core.task import Task
    from manyhands.engines.local import Local
    from manyhands.run.compare import Comparison, compare
    from manyhands.run.join import Hands, join
    from manyhands.run.result import Result
    from manyhands.run.train import train
    from manyhands.runtime.checkpoint import load_checkpoint
    from manyhands.splits.teams import conv_fc, piped, sliced
    from manyhands.virtual.cluster import Cluster
    from manyhands.virtual.faults import CutLink, Die, Slow, SlowLink, Stop
    from manyhands.virtual.world import on_ranks

__version__ = "0.2.0"

_HOMES = {
    "manyhands.codecs": ["codecs"],
    "manyhands.run.compare": ["Comparison", "compare"],
    "manyhands.core.errors": ["ChangedInFlight", "Deadlock", "Diverged", "ManyhandsError", "PeerLost", "Refused"],
    "manyhands.core.task": ["Task"],
    "manyhands.engines.local": ["Local"],
    "manyhands.run.join": ["Hands", "join"],
    "manyhands.run.train": ["train"],
    "manyhands.run.result": ["Result"],
    "manyhands.rules": ["rules"],
    "manyhands.runtime.checkpoint": ["load_checkpoint"],
    "manyhands.splits": ["splits"],
    "manyhands.splits.teams": ["conv_fc", "piped", "sliced"],
    "manyhands.virtual.cluster": ["Cluster"],
    "manyhands.virtual.faults": ["CutLink", "Die", "Slow", "SlowLink", "Stop"],
    "manyhands.virtual.world": ["on_ranks"],
}
"""The module of every public name that is not a method."""

__all__ = [
    "ChangedInFlight",
    "Cluster",
    "Comparison",
    "CutLink",
    "Deadlock",
    "Die",
    "Diverged",
    "Hands",
    "Local",
    "ManyhandsError",
    "PeerLost",
    "Refused",
    "Result",
    "Slow",
    "SlowLink",
    "Stop",
    "Task",
    "codecs",
    "compare",
    "conv_fc",
    "join",
    "load_checkpoint",
    "on_ranks",
    "piped",
    "rules",
    "sliced",
    "splits",
    "train",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            module = import_module(home)
            return module if home == f"manyhands.{name}" else getattr(module, name)
    if not name.startswith("_") and name in (catalog := import_module("manyhands.catalog")).__all__:
        return getattr(catalog, name)
    raise AttributeError(f"module 'manyhands' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *import_module("manyhands.catalog").__all__])

"""manyhands: train one network with many workers, by every method the literature knows, on one interface.

Here are the public names and nothing else: those below, and every method of the catalog. They are imported
when first used, so that asking the command line for help does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands import codecs, rules, splits
    from manyhands.catalog import *  # noqa: F403
    from manyhands.comparison import Comparison, compare
    from manyhands.core.errors import ChangedInFlight, Deadlock, Diverged, ManyhandsError, PeerLost, Refused
    from manyhands.core.task import Task
    from manyhands.hands import Hands, join
    from manyhands.jobs import train
    from manyhands.result import Result
    from manyhands.runtime.checkpoint import load_checkpoint
    from manyhands.virtual.cluster import Cluster
    from manyhands.virtual.faults import CutLink, Die, Slow, SlowLink, Stop
    from manyhands.virtual.world import on_ranks

__version__ = "0.2.0"

_HOMES = {
    "manyhands.codecs": ["codecs"],
    "manyhands.comparison": ["Comparison", "compare"],
    "manyhands.core.errors": ["ChangedInFlight", "Deadlock", "Diverged", "ManyhandsError", "PeerLost", "Refused"],
    "manyhands.core.task": ["Task"],
    "manyhands.hands": ["Hands", "join"],
    "manyhands.jobs": ["train"],
    "manyhands.result": ["Result"],
    "manyhands.rules": ["rules"],
    "manyhands.runtime.checkpoint": ["load_checkpoint"],
    "manyhands.splits": ["splits"],
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
    "join",
    "load_checkpoint",
    "on_ranks",
    "rules",
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

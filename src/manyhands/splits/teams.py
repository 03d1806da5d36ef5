"""The kinds of team by name: `team=mh.piped(stages=2)`, or `--team "sliced(2)"` on the command line."""

from manyhands.splits.piped import Piped
from manyhands.splits.sliced import Sliced

__all__ = ["Piped", "Sliced", "piped", "sliced"]

piped = Piped
sliced = Sliced

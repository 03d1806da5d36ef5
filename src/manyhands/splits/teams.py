"""The kinds of team by name: `team=mh.piped(stages=2)`, or `--team "sliced(2)"` on the command line."""

from manyhands.splits.conv_fc import ConvFc
from manyhands.splits.piped import Piped
from manyhands.splits.sliced import Sliced

__all__ = ["ConvFc", "Piped", "Sliced", "conv_fc", "piped", "sliced"]

conv_fc = ConvFc
piped = Piped
sliced = Sliced

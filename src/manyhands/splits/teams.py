"""The kinds of team by name: `team=mh.piped(stages=2)`, or `--team "piped(stages=2)"` on the command line."""

from manyhands.splits.piped import Piped

__all__ = ["Piped", "piped"]

piped = Piped

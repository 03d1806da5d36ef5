"""Which weights does the backward pass of a micro-batch see?"""

from manyhands.splits.versions.latest import Latest
from manyhands.splits.versions.stash import Stash

__all__ = ["Latest", "Stash"]

"""Which weights do the passes of a mini-batch see, and which does an update move?"""

from manyhands.splits.versions.aligned import Aligned
from manyhands.splits.versions.copies import Copies
from manyhands.splits.versions.derived import refuse_autocast, refuse_derived
from manyhands.splits.versions.double import Double
from manyhands.splits.versions.latest import Latest
from manyhands.splits.versions.policy import StageWeights, Versions
from manyhands.splits.versions.predicted import Predicted, PredictedToOwnUpdate
from manyhands.splits.versions.stash import Stash

__all__ = [
    "Aligned",
    "Copies",
    "Double",
    "Latest",
    "Predicted",
    "PredictedToOwnUpdate",
    "StageWeights",
    "Stash",
    "Versions",
    "refuse_autocast",
    "refuse_derived",
]

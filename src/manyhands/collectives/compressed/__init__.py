"""Sums of encoded vectors, which a bulk-synchronous method may use in place of an all-reduce."""

from manyhands.collectives.compressed.exchange import CompressedSum, Untouched
from manyhands.collectives.compressed.gather import Gather
from manyhands.collectives.compressed.hierarchical import Hierarchical
from manyhands.collectives.compressed.low_rank import LowRankSum
from manyhands.collectives.compressed.sparcml import Sparcml
from manyhands.collectives.compressed.streams import check_pairs
from manyhands.collectives.compressed.stripes import Stripes

__all__ = ["CompressedSum", "Gather", "Hierarchical", "LowRankSum", "Sparcml", "Stripes", "Untouched", "check_pairs"]

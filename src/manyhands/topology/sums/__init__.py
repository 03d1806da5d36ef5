"""Sums of what was encoded: what a bulk-synchronous method may use in place of an all-reduce."""

from manyhands.topology.sums.exchange import Sum
from manyhands.topology.sums.gather import Gather
from manyhands.topology.sums.hierarchical import Hierarchical
from manyhands.topology.sums.low_rank import LowRankSum
from manyhands.topology.sums.sparcml import Sparcml
from manyhands.topology.sums.streams import check_pairs
from manyhands.topology.sums.stripes import Stripes

__all__ = ["Gather", "Hierarchical", "LowRankSum", "Sparcml", "Stripes", "Sum", "check_pairs"]

"""When do workers agree? Rules by which a shard applies gradients and serves weights."""

from manyhands.consistency.bulk import Bulk
from manyhands.consistency.free import Free
from manyhands.consistency.quorum import Quorum
from manyhands.consistency.rounds import Rounds
from manyhands.consistency.stale import Stale

__all__ = ["Bulk", "Free", "Quorum", "Rounds", "Stale"]

"""Latest: both passes of a mini-batch use the weights of now (pipelined back-propagation).

F(m) and B(m) see different weights if there are updates in between: B(m) combines the activations of F(m) with newer
weights, since the live weights are updated without changing the version counters of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from manyhands.splits.versions.policy import StageWeights, Versions


class Latest(Versions):
    """The live weights, without copies."""

    rewrites = True


EXAMPLES: Mapping[str, Callable[[StageWeights], Latest]] = {"latest": Latest}

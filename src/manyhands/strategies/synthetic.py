"""Synthetic: a pipeline that streams, with the fourth answer: a stage uses a prediction of the error, and never waits.

F(m)   as in any stream, or with a predicted input
B(m)   with the predicted error, right after F(m);  U(m) right after B(m)
L(m)   the models of errors and inputs learn from what was to be predicted
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from manyhands.core.declared_state import StateParts
from manyhands.core.rule import Rule
from manyhands.core.strategy import Batch
from manyhands.core.worker import Worker
from manyhands.splits.stage_passes import StagePasses
from manyhands.splits.synthetic import Build
from manyhands.splits.synthetic_passes import Interface, SyntheticPasses
from manyhands.strategies.streaming import Streaming


@dataclass(kw_only=True)
class Synthetic(Streaming):
    """Training with decoupled neural interfaces.

    Args:
        build: makes the models of errors and inputs.
        model_rule: how they are updated.
        conditional: whether a model of errors sees the target.
        synthetic_inputs: whether inputs are predicted too.
    """

    build: Build
    model_rule: Rule
    conditional: bool = False
    synthetic_inputs: bool = False

    def setup(self, w: Worker) -> None:
        super().setup(w)
        self.acts["L"] = self._learn

    def _make_passes(self, w: Worker, module: nn.Module, depth: int) -> StagePasses:
        interface = Interface(self.build, self.model_rule, self.conditional, self.synthetic_inputs)
        self.predicting = SyntheticPasses(w, w.transport, module, depth, interface, self.meter)
        return self.predicting

    def step(self, w: Worker, batch: Batch) -> float | None:
        """As in any stream; the loss is None until one is known."""
        loss = super().step(w, batch)
        return None if loss is None or math.isnan(loss) else loss

    def _learn(self, w: Worker, m: int) -> None:
        self.predicting.learn(m, m * w.batch_size)
        self.loss = self.predicting.newest_loss

    def declared_state(self, w: Worker) -> StateParts:
        """Also the models of this stage's cuts."""
        models: StateParts = {"errors": self.predicting.errors}
        if self.synthetic_inputs:
            models = {**models, "inputs": self.predicting.inputs}
        return {**super().declared_state(w), **models}

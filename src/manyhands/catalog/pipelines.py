"""Pipelines: every worker holds some layers, and mini-batches stream through them."""

from __future__ import annotations

from manyhands.core.rule import Rule
from manyhands.rules import Sgd
from manyhands.splits import schedules
from manyhands.splits.piped import Piped
from manyhands.splits.versions import Stash
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.grid import Grid
from manyhands.strategies.pipeline import Pipeline

__all__ = ["gpipe", "pipedream"]


def gpipe(micro_batches: int = 4, stages: int = 0, lr: float = 0.1, rule: Rule | None = None) -> Grid:
    """GPipe: a mini-batch is split into micro-batches that pass through the stages one after another, then one update.

    split: layers. when: a flush after every mini-batch. who: the neighbouring stages. what: activations and
    errors. how: any rule, on the stage's own weights.

        F(0) .. F(M-1), then B(0) .. B(M-1);  w <- w - eta (1/M) sum_m g_m

    Equal to SGD on one machine, for any M. The stages idle (K-1)/(M+K-1) of the time. With fewer stages than
    workers there are several pipelines, whose gradients are averaged as in bsp. A lost worker ends the run.

    Reference: Y. Huang et al., GPipe: efficient training of giant neural networks using pipeline parallelism, 2019,
        arXiv:1811.06965
    Loops: splits/piped.py Piped.gradient; splits/stage_passes.py StagePasses; splits/schedules/gpipe.py gpipe;
        strategies/grid.py Grid.step; strategies/allreduce.py AllReduce.step

    Args:
        micro_batches: M, into how many parts a mini-batch is split; it must divide the batch size.
        stages: K, the stages of a pipeline; 0: all workers form one pipeline.
        lr: eta, the learning rate.
        rule: how a stage applies its gradient, instead of SGD with lr.
    """
    return Grid(AllReduce(rule or Sgd(lr)), Piped(stages, micro_batches))


def pipedream(lr: float = 0.1, rule: Rule | None = None) -> Pipeline:
    """PipeDream: forward and backward passes alternate on every stage, with an update after each and no flush.

    split: layers. when: never flushed. who: the neighbouring stages. what: activations and errors. how: any
    rule, on the stage's own newest weights.

        F(m) with the newest weights, which are stashed; B(m) with the stashed ones
        w_s <- w_s - eta grad f(w_1 of K-1 updates ago, ..., w_K of now)

    All stages are busy once the pipeline is full. A lost worker ends the run.

    Reference: D. Narayanan et al., PipeDream: generalized pipeline parallelism for DNN training, 2019
    Loops: strategies/pipeline.py Pipeline.step; strategies/pipeline.py Pipeline._act;
        splits/schedules/one_f_one_b.py one_f_one_b; splits/versions/stash.py Stash

    Args:
        lr: eta, the learning rate.
        rule: how a stage applies its gradient, instead of SGD with lr.
    """
    return Pipeline(rule or Sgd(lr), schedules.one_f_one_b, Stash)

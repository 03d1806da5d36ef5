"""Pipelines: every worker holds some layers, and mini-batches pass through them, with a flush after each or without."""

from __future__ import annotations

from typing import Any

from manyhands.core.rule import Rule
from manyhands.rules import Sgd
from manyhands.splits import schedules
from manyhands.splits.piped import FlushingSchedule, Piped
from manyhands.splits.versions import Stash
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.grid import Grid
from manyhands.strategies.pipeline import Pipeline

__all__ = ["gpipe", "interleaved", "one_f_one_b", "pipedream", "zero_bubble"]


def gpipe(
    micro_batches: int = 4, stages: int = 0, replay: bool = True, lr: float = 0.1, rule: Rule | None = None
) -> Grid:
    """GPipe: a mini-batch is split into micro-batches that pass through the stages one after another, then one update.

    split: layers. when: a flush after every mini-batch. who: the neighbouring stages. what: activations and
    errors. how: any rule, on the stage's own weights.

        F(0) .. F(M-1), then B(0) .. B(M-1);  w <- w - eta (1/M) sum_m g_m
        idle: (K-1)/(M+K-1) of the time;  a stage keeps M inputs and, during B, the activations of one micro-batch

    Equal to SGD on one machine, for any M. With replay a stage keeps only the input of a micro-batch and computes
    F(m) again before B(m), with the same dropout masks and the same gradient: a third more time, if B takes twice as
    long as F, for less memory. BatchNorm sees micro-batches, once each. With fewer stages than workers there are
    several pipelines, whose gradients are averaged as in bsp. A lost worker ends the run.

    Reference: Y. Huang et al., GPipe: efficient training of giant neural networks using pipeline parallelism, 2019,
        arXiv:1811.06965
    Loops: splits/piped.py Piped.gradient; splits/stage_passes.py StagePasses; splits/schedules/gpipe.py gpipe;
        strategies/grid.py Grid.step; strategies/allreduce.py AllReduce.step

    Args:
        micro_batches: M, into how many parts a mini-batch is split; it must divide the batch size.
        stages: K, the stages of a pipeline; 0: all workers form one pipeline.
        replay: whether forward passes are computed again for the backward passes (re-materialisation).
        lr: eta, the learning rate.
        rule: how a stage applies its gradient, instead of SGD with lr.
    """
    return _flushing("gpipe", micro_batches, stages, lr, rule, keep="inputs" if replay else "graph")


def one_f_one_b(micro_batches: int = 4, stages: int = 0, lr: float = 0.1, rule: Rule | None = None) -> Grid:
    """1F1B with a flush: GPipe's update; every stage goes back as soon as it can, so few activations are kept.

    split: layers. when: a flush after every mini-batch. who: the neighbouring stages. what: activations and
    errors. how: any rule, on the stage's own weights.

        stage s: F(0) .. F(K-2-s), then F and B in turn, then the remaining B;  w <- w - eta (1/M) sum_m g_m
        idle: (K-1)/(M+K-1) of the time;  a stage keeps the activations of min(M, K-s) micro-batches

    As long as GPipe without replay, and equal to SGD on one machine, for any M. PipeDream has the same order without
    the flush; its authors describe this form as PipeDream-Flush. A lost worker ends the run.

    Reference: D. Narayanan et al., Memory-efficient pipeline-parallel DNN training, 2021, arXiv:2006.09503
    Loops: splits/piped.py Piped.gradient; splits/stage_passes.py StagePasses;
        splits/schedules/one_f_one_b.py one_f_one_b; strategies/grid.py Grid.step;
        strategies/allreduce.py AllReduce.step

    Args:
        micro_batches: M, into how many parts a mini-batch is split; it must divide the batch size.
        stages: K, the stages of a pipeline; 0: all workers form one pipeline.
        lr: eta, the learning rate.
        rule: how a stage applies its gradient, instead of SGD with lr.
    """
    return _flushing("one-f-one-b", micro_batches, stages, lr, rule)


def interleaved(
    micro_batches: int = 4, chunks: int = 2, stages: int = 0, lr: float = 0.1, rule: Rule | None = None
) -> Grid:
    """Interleaved 1F1B: every worker has several stages that lie apart, so the pipeline fills and drains sooner.

    split: layers. when: a flush after every mini-batch. who: worker r has the stages r, r + P, ..., r + (v-1) P.
    what: activations and errors, v times as many messages. how: any rule, on the worker's own stages.

        F and B in turn after 2 (P-1-r) + (v-1) P forward passes;  w <- w - eta (1/M) sum_m g_m
        idle: (P-1)/(v M + P-1) of the time

    Equal to SGD on one machine. Micro-batches pass through in groups of P, so P must divide M, and the model must have
    v P layers with parameters. A lost worker ends the run.

    Reference: D. Narayanan et al., Efficient large-scale language model training on GPU clusters using Megatron-LM,
        2021, arXiv:2104.04473
    Loops: splits/piped.py Piped.gradient; splits/stage_passes.py StagePasses;
        splits/schedules/interleaved.py interleaved; strategies/grid.py Grid.step;
        strategies/allreduce.py AllReduce.step

    Args:
        micro_batches: M, into how many parts a mini-batch is split; it must divide the batch size.
        chunks: v, the stages of each worker.
        stages: P, the workers of a pipeline; 0: all workers form one pipeline.
        lr: eta, the learning rate.
        rule: how a worker applies its gradient, instead of SGD with lr.
    """
    return _flushing("interleaved", micro_batches, stages, lr, rule, chunks=chunks)


def zero_bubble(micro_batches: int = 4, stages: int = 0, lr: float = 0.1, rule: Rule | None = None) -> Grid:
    """Zero bubble (H1): 1F1B whose backward passes are split; weights' gradients fill the time of waiting.

    split: layers. when: a flush after every mini-batch. who: the neighbouring stages. what: activations and
    errors. how: any rule, on the stage's own weights.

        I(m): dx = delta W, sent at once;  W(m): dW = delta^T x, after I(m + s) on stage s
        w <- w - eta (1/M) sum_m g_m
        idle: (K-1)(tF + tI - tW) instead of (K-1)(tF + tI + tW);  every stage keeps K micro-batches

    Equal to SGD on one machine. Linear layers and convolutions are split; the gradients of other parameters, such as
    those of normalisation, are computed in I. H2 of the paper, which keeps more micro-batches to wait even less, is
    not offered. A lost worker ends the run.

    Reference: P. Qi et al., Zero bubble pipeline parallelism, 2024, arXiv:2401.10241
    Loops: splits/piped.py Piped.gradient; splits/stage_passes.py StagePasses; core/weight_products.py WeightProducts;
        splits/schedules/zero_bubble.py zero_bubble; strategies/grid.py Grid.step;
        strategies/allreduce.py AllReduce.step

    Args:
        micro_batches: M, into how many parts a mini-batch is split; it must divide the batch size.
        stages: K, the stages of a pipeline; 0: all workers form one pipeline.
        lr: eta, the learning rate.
        rule: how a stage applies its gradient, instead of SGD with lr.
    """
    return _flushing("zero-bubble", micro_batches, stages, lr, rule)


def _flushing(
    schedule: FlushingSchedule, micro_batches: int, stages: int, lr: float, rule: Rule | None, **knobs: Any
) -> Grid:
    """Data-parallel training, as bsp, of as many pipelines as there are workers for."""
    return Grid(AllReduce(rule or Sgd(lr)), Piped(stages, micro_batches, schedule, **knobs))


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

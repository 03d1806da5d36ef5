"""Pipelines: every worker holds some layers, and mini-batches pass through them, with a flush after each or without."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.rule import Rule
from manyhands.core.units import bytes_per_second
from manyhands.rules import Adam, Momentum, Sgd
from manyhands.splits import schedules
from manyhands.splits.cuts import Cuts
from manyhands.splits.piped import FlushingSchedule, Piped
from manyhands.splits.synthetic import perceptron
from manyhands.splits.versions import (
    Aligned,
    Copies,
    Double,
    Latest,
    Predicted,
    PredictedToOwnUpdate,
    Stash,
    Versions,
)
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.grid import Grid
from manyhands.strategies.planned import Planned
from manyhands.strategies.replicated import Replicated
from manyhands.strategies.streaming import Streaming
from manyhands.strategies.synthetic import Synthetic

__all__ = [
    "ddg",
    "dni",
    "features_replay",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "pipedream",
    "pipedream_2bw",
    "pipelined_backprop",
    "small_batch_pipeline",
    "spectrain",
    "weight_copies",
    "zero_bubble",
]

Names = Sequence[str] | str | None
Balance = Literal["work", "time", "parameters"]


def gpipe(
    micro_batches: int = 4,
    stages: int = 0,
    replay: bool = True,
    lr: float = 0.1,
    rule: Rule | None = None,
    cut: Names = None,
    balance: Balance = "work",
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
        cut: the names of the modules with which stages 1, 2, ... begin, as a list or as "h.4 h.8"; None: chosen.
        balance: what the largest stage has little of, if the cuts are chosen: work, time or parameters.
    """
    return _flushing(
        "gpipe", micro_batches, stages, lr, rule, keep=None if replay else "graph", cut=cut, balance=balance
    )


def one_f_one_b(
    micro_batches: int = 4,
    stages: int = 0,
    lr: float = 0.1,
    rule: Rule | None = None,
    cut: Names = None,
    balance: Balance = "work",
) -> Grid:
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
        cut: the names of the modules with which stages 1, 2, ... begin, as a list or as "h.4 h.8"; None: chosen.
        balance: what the largest stage has little of, if the cuts are chosen: work, time or parameters.
    """
    return _flushing("one-f-one-b", micro_batches, stages, lr, rule, cut=cut, balance=balance)


def interleaved(
    micro_batches: int = 4,
    chunks: int = 2,
    stages: int = 0,
    lr: float = 0.1,
    rule: Rule | None = None,
    cut: Names = None,
    balance: Balance = "work",
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
        cut: the names of the modules with which stages 1, 2, ... begin, as a list or as "h.4 h.8"; None: chosen.
        balance: what the largest stage has little of, if the cuts are chosen: work, time or parameters.
    """
    return _flushing("interleaved", micro_batches, stages, lr, rule, chunks=chunks, cut=cut, balance=balance)


def zero_bubble(
    micro_batches: int = 4,
    stages: int = 0,
    lr: float = 0.1,
    rule: Rule | None = None,
    cut: Names = None,
    balance: Balance = "work",
) -> Grid:
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
        cut: the names of the modules with which stages 1, 2, ... begin, as a list or as "h.4 h.8"; None: chosen.
        balance: what the largest stage has little of, if the cuts are chosen: work, time or parameters.
    """
    return _flushing("zero-bubble", micro_batches, stages, lr, rule, cut=cut, balance=balance)


def _flushing(
    schedule: FlushingSchedule, micro_batches: int, stages: int, lr: float, rule: Rule | None, **knobs: Any
) -> Grid:
    """Data-parallel training, as bsp, of as many pipelines as there are workers for."""
    return Grid(AllReduce(rule or Sgd(lr)), Piped(stages, micro_batches, schedule, **knobs))


def pipelined_backprop(
    lr: float = 0.1, rule: Rule | None = None, cut: Names = None, balance: Balance = "work"
) -> Streaming:
    """Pipelined back-propagation: every stage is always busy, and backward passes use the weights of now.

    split: layers. when: never flushed. who: the neighbouring stages. what: activations and errors. how: any
    rule, on the stage's own newest weights.

        F(m) with the newest weights; 2 (K-1-s) updates later at stage s, counted from 0:
        B(m): g = delta_out a(m),  delta_in = W_now^T delta_out;  w_s <- w_s - eta g at once

    The activations a(m) are those of F(m). The survey's wording, that these have been overwritten too, would mix two
    samples in one gradient. At K = 1 it is SGD. Layers whose weights are derived from others in the forward pass
    (weight normalisation) are refused, and so is autocast: part of the old weights would remain in the graph. A lost
    worker ends the run.

    Reference: A. Petrowski, G. Dreyfus, C. Girault, Performance analysis of a pipelined backpropagation parallel
        algorithm, 1993
    Loops: strategies/streaming.py Streaming.step; splits/schedules/figure5.py figure5;
        splits/versions/latest.py Latest

    Args:
        lr: eta, the learning rate.
        rule: how a stage applies its gradient, instead of SGD with lr.
        cut: the names of the modules with which stages 1, 2, ... begin, as a list or as "h.4 h.8"; None: chosen.
        balance: what the largest stage has little of, if the cuts are chosen: work, time or parameters.
    """
    return Streaming(rule or Sgd(lr), schedules.figure5, Latest, cuts=Cuts(cut, balance))


def small_batch_pipeline(
    lr: float = 0.1, rule: Rule | None = None, cut: Names = None, balance: Balance = "work"
) -> Streaming:
    """Pipelined back-propagation on pieces of a mini-batch: no more samples are in flight than one device would have.

    split: layers. when: never flushed. who: the neighbouring stages. what: activations and errors. how: any
    rule, on the stage's own newest weights.

        b' = max(2, b / (2K-1));  the pieces pass as mini-batches of pipelined-backprop do, with an update after each
        eta' = eta b'/b

    The rate per sample stays constant. The paper states the principle; b' and eta' are our reading of it. At K = 1 it
    is SGD. Derived weights and autocast are refused as in pipelined-backprop. A lost worker ends the run.

    Reference: X. Chen et al., Pipelined back-propagation for context-dependent deep neural networks, 2012
    Loops: strategies/streaming.py Streaming.step; strategies/streaming.py Streaming._take_in;
        splits/schedules/figure5.py figure5; splits/versions/latest.py Latest

    Args:
        lr: eta, the learning rate for a whole mini-batch.
        rule: how a stage applies its gradient, instead of SGD with lr.
        cut: the names of the modules with which stages 1, 2, ... begin, as a list or as "h.4 h.8"; None: chosen.
        balance: what the largest stage has little of, if the cuts are chosen: work, time or parameters.
    """
    return Streaming(rule or Sgd(lr), schedules.figure5, Latest, fills=True, cuts=Cuts(cut, balance))


def pipedream(
    lr: float = 0.1,
    vertical_sync: bool = False,
    replicas: Sequence[int] | str = "",
    bandwidth: float | str | None = None,
    rule: Rule | None = None,
    cut: Names = None,
    balance: Balance = "work",
) -> Streaming:
    """PipeDream: forward and backward passes alternate on every stage, with an update after each and no flush.

    split: layers. when: never flushed. who: the neighbouring stages. what: activations and errors. how: any
    rule, on the stage's own newest weights.

        F(m) with the newest weights, which are stashed; B(m) with the stashed ones
        w_s <- w_s - eta grad f(w_1 of K-1 updates ago, ..., w_K of now)

    With vertical_sync every stage uses the version that stage 0 had for m, so that all weights are K-1 updates old.
    Stage s, counted from 0, keeps at most K-s versions; with vertical_sync every stage keeps K, and one more between an
    update and the next forward pass.
    All stages are busy once the pipeline is full.

    replicas: mini-batch m goes to replica m mod r_s of stage s, and its backward pass returns there. An update has the
    sum of the gradients of one round, r_s mini-batches. The authors' code has their mean, and a rate r_s / r_0 times as
    large; the sum with one rate counts every mini-batch alike on all stages. A last round may be smaller. A checkpoint
    can be resumed with other replicas. A lost worker ends the run.

    replicas="planned": the paper's partitioner chooses the stages and the replicas of each for the workers of the run:

        T(i..j, m) = 1/m max(sum t_i..t_j, 2(m-1)/B sum w_i..w_j);  the slowest stage or link is as fast as possible

    with t from counted operations, 50 GFLOP in a second, in place of the paper's measured seconds, so that all ranks
    and both worlds have the same plan. A stage begins at a layer with parameters of an nn.Sequential. If one stage on
    all workers is fastest, it is run, as the paper does with ResNet-50: that is data parallelism with the sum of the
    gradients, not their mean, and without bsp's all-reduce, which sends fewer bytes among more than two workers.

    Reference: D. Narayanan et al., PipeDream: generalized pipeline parallelism for DNN training, 2019
    Loops: strategies/streaming.py Streaming.step; splits/schedules/alternating.py alternating;
        splits/versions/stash.py Stash; splits/versions/aligned.py Aligned; strategies/replicated.py Replicated;
        splits/schedules/round_robin.py round_robin; strategies/planned.py Planned; splits/stage_plan.py stage_plan;
        splits/partition.py partition

    Args:
        lr: eta, the learning rate.
        vertical_sync: whether a mini-batch sees one version on all stages, the one that stage 0 had.
        replicas: r, how many ranks have each stage, such as "2,1" for two of stage 0 and one of stage 1; the sum is the
            number of workers. Empty: one each; "planned": chosen, and so are the cuts.
        bandwidth: B, of each link, such as "1Gbit", for which replicas are planned; None: 10Gbit.
        rule: how a stage applies its gradient, instead of SGD with lr.
        cut: the names of the modules with which stages 1, 2, ... begin, as a list or as "h.4 h.8"; None: chosen.
        balance: what the largest stage has little of, if the cuts are chosen: work, time or parameters.
    """
    if replicas != "planned":
        refuse_unless(bandwidth is None, "bandwidth", bandwidth, "left out, unless replicas is 'planned'")
    if not replicas:
        versions = Aligned if vertical_sync else Stash
        return Streaming(rule or Sgd(lr), schedules.alternating, versions, cuts=Cuts(cut, balance))
    if vertical_sync:
        raise Refused("vertical_sync is True, but versions of replicated stages count rounds of different sizes")
    if replicas == "planned":
        return _planned("10Gbit" if bandwidth is None else bandwidth, rule or Sgd(lr), cut, balance)
    counts = _counts(replicas)
    schedule = partial(schedules.round_robin, replicas=counts)
    return Replicated(rule or Sgd(lr), schedule, Stash, cuts=Cuts(cut, balance), replicas_of=counts)


def _planned(bandwidth: float | str, rule: Rule, cut: Names, balance: Balance) -> Planned:
    """The stages are not known before the run, so its schedule is that of one replica each until then."""
    why = "left out: replicas is 'planned', which chooses the cuts"
    refuse_unless(cut is None, "cut", cut, why)
    refuse_unless(balance == "work", "balance", balance, why)
    rate = bytes_per_second(bandwidth, "bandwidth")
    refuse_unless(rate > 0, "bandwidth", bandwidth, "> 0")
    return Planned(rule, partial(schedules.round_robin, replicas=()), Stash, bandwidth=rate)


def _counts(replicas: Sequence[int] | str) -> tuple[int, ...]:
    words = replicas.replace(",", " ").split() if isinstance(replicas, str) else replicas
    try:
        counts = tuple(int(word) for word in words)
    except ValueError:
        raise Refused(f"replicas is {replicas!r}, but must be whole numbers, such as '2,1', or 'planned'") from None
    refuse_unless(all(count >= 1 for count in counts), "replicas", replicas, "numbers >= 1")
    return counts


def pipedream_2bw(
    micro_batches: int = 4, lr: float = 0.1, rule: Rule | None = None, cut: Names = None, balance: Balance = "work"
) -> Streaming:
    """PipeDream-2BW: gradients of M micro-batches are summed before an update, so that two versions are enough.

    split: layers. when: never flushed. who: the neighbouring stages. what: activations and errors. how: any
    rule, on the stage's own newest weights, once per mini-batch.

        w(t+1) <- w(t) - eta (1/M) sum_m grad f_m(w(t-1))          w(-1) = w(0)

    On every stage the micro-batches of mini-batch t see version t-1, and U follows every M-th backward pass. A stage
    keeps two versions, whatever K is, if M >= K-1; fewer are refused. Pauses do not change the result. The gradient is
    one update old for any number of stages, also for one. A lost worker ends the run.

    Reference: D. Narayanan et al., Memory-efficient pipeline-parallel DNN training, 2021, arXiv:2006.09503
    Loops: strategies/streaming.py Streaming.step; splits/schedules/alternating.py alternating;
        splits/versions/double.py Double

    Args:
        micro_batches: M, into how many parts a mini-batch is split; >= K-1.
        lr: eta, the learning rate.
        rule: how a stage applies its gradient, instead of SGD with lr.
        cut: the names of the modules with which stages 1, 2, ... begin, as a list or as "h.4 h.8"; None: chosen.
        balance: what the largest stage has little of, if the cuts are chosen: work, time or parameters.
    """
    schedule = partial(schedules.alternating, every=micro_batches)
    return Streaming(rule or Sgd(lr), schedule, Double, micro_batches=micro_batches, cuts=Cuts(cut, balance))


def spectrain(
    lr: float = 0.01,
    momentum: float = 0.9,
    prediction: Literal["to the end", "to own update"] = "to the end",
    rule: Rule | None = None,
    cut: Names = None,
    balance: Balance = "work",
) -> Streaming:
    """SpecTrain: both passes of a mini-batch use the weights predicted for the moment in which it is finished.

    split: layers. when: never flushed. who: the neighbouring stages. what: activations and errors. how: any
    rule, on the stage's own newest weights.

        W' = W + s d          d: what the last update added to the weights
        F at stage k, counted from 0: s = floor(k/2) + K - k - 1;  B: s = floor(k/2)

    Both aim at the version in force when stage 0 finishes the mini-batch. The paper predicts with its momentum,
    v <- gamma v + (1 - gamma) g and W' = W - s eta v; the rule's last real step is the same for it, and right for
    Nesterov, Adam and decay too. "to own update" is a later, simpler variant: s = K - k - 1 in F, 0 in B. Our momentum
    is torch's, v <- gamma v + g: multiply the paper's rate by 1 - gamma. Lag counts updates and ignores the
    prediction. Derived weights and autocast are refused as in pipelined-backprop. A lost worker ends the run.

    Reference: C. Chen, C. Yang, H. Cheng, Efficient and robust parallel DNN training through model parallelism on
        multi-GPU platform, 2018, arXiv:1809.02839
    Loops: strategies/streaming.py Streaming.step; splits/schedules/alternating.py alternating;
        splits/versions/predicted.py Predicted

    Args:
        lr: eta, the learning rate.
        momentum: gamma, how much of the last step is kept.
        prediction: up to which moment weights are predicted.
        rule: how a stage applies its gradient, instead of momentum SGD with lr.
        cut: the names of the modules with which stages 1, 2, ... begin, as a list or as "h.4 h.8"; None: chosen.
        balance: what the largest stage has little of, if the cuts are chosen: work, time or parameters.
    """
    known = {"to the end": Predicted, "to own update": PredictedToOwnUpdate}
    if prediction not in known:
        raise Refused(f"prediction is {prediction!r}, but must be one of {', '.join(map(repr, known))}")
    return Streaming(rule or Momentum(lr, momentum), schedules.alternating, known[prediction], cuts=Cuts(cut, balance))


def ddg(
    lr: float = 0.1,
    variant: Literal["paper", "code"] = "paper",
    rule: Rule | None = None,
    cut: Names = None,
    balance: Balance = "work",
) -> Streaming:
    """DDG: forward passes lock all stages in turn, backward passes run side by side with delayed gradients.

    split: layers. when: a mini-batch begins when the last stage has updated with the one before. who: the
    neighbouring stages. what: activations and errors. how: any rule, on the stage's own newest weights.

        forward of mini-batch t through all stages; then at once, at stage s, counted from 0, with d = K-1-s:
        w_s <- w_s - eta grad_s f(w_s of t - d; mini-batch t - d)

    The weights are those of pipedream, update by update; a mini-batch takes K tF + tB instead of tF + tB. The paper
    never drains, so its stage s has made d updates less after n mini-batches; here a run ends with n updates on every
    stage. The paper's equation has the weights of the forward pass in the backward pass; the authors' code uses the
    newest ones with the old activations: variant="code", for which derived weights and autocast are refused. A lost
    worker ends the run.

    Reference: Z. Huo, B. Gu, Q. Yang, H. Huang, Decoupled parallel backpropagation with convergence guarantee, 2018,
        arXiv:1804.10574
    Loops: strategies/streaming.py Streaming.step; splits/schedules/decoupled.py decoupled;
        splits/versions/stash.py Stash

    Args:
        lr: eta, the learning rate.
        variant: the weights of the backward pass: those of the forward pass (paper) or the newest ones (code).
        rule: how a stage applies its gradient, instead of SGD with lr.
        cut: the names of the modules with which stages 1, 2, ... begin, as a list or as "h.4 h.8"; None: chosen.
        balance: what the largest stage has little of, if the cuts are chosen: work, time or parameters.
    """
    if variant not in ("paper", "code"):
        raise Refused(f"variant is {variant!r}, but must be 'paper' or 'code'")
    return Streaming(
        rule or Sgd(lr), schedules.decoupled, Stash if variant == "paper" else Latest, cuts=Cuts(cut, balance)
    )


def features_replay(
    lr: float = 0.1, rule: Rule | None = None, cut: Names = None, balance: Balance = "work"
) -> Streaming:
    """Features Replay: stages keep only their inputs; the backward pass computes them again, with newer weights.

    split: layers. when: a mini-batch begins when the last stage has updated with the one before. who: the
    neighbouring stages. what: activations and errors. how: any rule, on the stage's own newest weights.

        play: forward of mini-batch t through all stages, without a graph; then at once, at stage s, with d = K-1-s:
        replay: h = F_s(input of t - d; w_s now);  w_s <- w_s - eta (dh/dw_s)^T delta;  delta down = (dh/dinput)^T delta

    Memory grows with K^2 inputs instead of with the activations of K mini-batches; a step costs one more forward pass.
    Dropout has the same masks in both, and running statistics are updated by the first only. A linear layer per stage
    gives the weights of 1F1B without stashing. The authors' code trains the first stage at twice the rate; the paper
    and this do not. A lost worker ends the run.

    Reference: Z. Huo, B. Gu, H. Huang, Training neural networks using features replay, 2018, arXiv:1807.04511
    Loops: strategies/streaming.py Streaming.step; core/stage.py Stage.backward;
        splits/schedules/decoupled.py decoupled

    Args:
        lr: eta, the learning rate.
        rule: how a stage applies its gradient, instead of SGD with lr.
        cut: the names of the modules with which stages 1, 2, ... begin, as a list or as "h.4 h.8"; None: chosen.
        balance: what the largest stage has little of, if the cuts are chosen: work, time or parameters.
    """
    return Streaming(rule or Sgd(lr), schedules.decoupled, Latest, keeps="inputs", cuts=Cuts(cut, balance))


def weight_copies(
    lr: float = 0.3, rounds: int = 1, rule: Rule | None = None, cut: Names = None, balance: Balance = "work"
) -> Streaming:
    """Weight copies: 2K-1 copies of the weights, one for each mini-batch in flight, averaged at the end of a round.

    split: layers, and mini-batches over copies. when: after rounds of 2K-1 mini-batches. who: the neighbouring stages;
    copies are averaged within a stage. what: activations and errors. how: any rule, with a memory for each copy.

        mini-batch m uses copy c = m mod (2K-1) on all stages, for F, B and U:  w_c <- w_c - eta grad f_m(w_c)
        after a round:  w_c <- mean of the copies that have moved

    Each copy is trained by plain SGD, with no staleness: data parallelism in time, in which a copy has 1/(2K-1) of the
    mini-batches. With four stages and mini-batches of 32 the accuracy on digits after 400 is 0.94 at a rate of 0.3, and
    that of SGD 0.97 at 0.1; the loss on a text of characters after 600 is 2.89 nats instead of 2.65. With two stages
    both are about as good as with SGD. A round drains the pipeline. Rules keep their memory over an average. A pause
    (checkpoint, evaluation, end) ends a round; the answer is the mean. A checkpoint can be resumed with as many stages
    only. Memory: 2K-1 versions. At K = 1 it is SGD. A lost worker ends the run.

    Reference: H. Lee, K. Lee, I. Yoo, D. Yook, Analysis of parallel training algorithms for deep neural networks, 2018
    Loops: strategies/streaming.py Streaming.step; splits/schedules/rounds.py rounds;
        splits/versions/copies.py Copies

    Args:
        lr: eta, the learning rate.
        rounds: how many times 2K-1 mini-batches there are between two averages.
        rule: how a copy applies its gradient, instead of SGD with lr.
        cut: the names of the modules with which stages 1, 2, ... begin, as a list or as "h.4 h.8"; None: chosen.
        balance: what the largest stage has little of, if the cuts are chosen: work, time or parameters.
    """
    refuse_unless(rounds >= 1, "rounds", rounds, ">= 1")
    return Streaming(rule or Sgd(lr), partial(schedules.rounds, times=rounds), Copies, cuts=Cuts(cut, balance))


def dni(
    lr: float = 0.03,
    conditional: bool = False,
    synthetic_inputs: bool = False,
    lag: int = 1,
    layers: int = 1,
    hidden: int = 128,
    rule: Rule | None = None,
    model_rule: Rule | None = None,
    cut: Names = None,
    balance: Balance = "work",
) -> Synthetic:
    """DNI: every stage updates at once with a predicted error; the prediction learns from the error that comes later.

    split: layers. when: never flushed. who: the neighbouring stages. what: activations and errors. how: any rule, on
    the stage's own weights; a rule of its own for the models of the errors.

        h_i = f_i(h_i-1);  d_i = M_i(h_i [, y]);  theta_i <- theta_i - alpha d_i dh_i/dtheta_i  at once
        target: D_i = d_i+1 dh_i+1/dh_i, of the loss at the top
        phi_i <- phi_i - beta d/dphi_i mean over samples of 1/2 |d_i - D_i|^2

    The target is itself a prediction, except below the top stage, and is computed with the weights before the update of
    stage i+1. M predicts the error of one sample, which has no factor 1/b, so that beta does not depend on the size of
    mini-batches. M and I are perceptrons on flattened activations, with layer normalisation where the paper has that of
    batches; the last layer is 0 at first, so that only the top stage learns in the beginning. conditional: M also sees
    the target, class numbers one-hot. synthetic_inputs: stage i+1 begins with I_i(x), which learns from h_i; only the
    first mini-batch of a run has the real activation. M of a recurrent network, for the time beyond a truncation
    window, is left out.

    Errors of predictions add up over stages. On digits, with mini-batches of 32, SGD has an accuracy of 0.97 after 400;
    conditional dni has 0.93 with two stages and 0.86 with four, after 1800 of them 0.96 and 0.95 (0.96 and 0.88 if not
    conditional). On a text of characters the loss after 600 is 2.96 and 3.00 nats, that of SGD 2.65. More stages need
    smaller rates, or weights and predictions grow without bound. A lost worker ends the run.

    Reference: M. Jaderberg et al., Decoupled neural interfaces using synthetic gradients, 2017, arXiv:1608.05343
    Loops: strategies/synthetic.py Synthetic.step; strategies/streaming.py Streaming.step;
        splits/synthetic_passes.py SyntheticPasses; splits/synthetic.py SyntheticModel;
        splits/schedules/synthetic.py synthetic

    Args:
        lr: alpha, the learning rate.
        conditional: whether M sees the target (cDNI).
        synthetic_inputs: whether the inputs of stages are predicted too.
        lag: after how many further forward passes M learns: 0, and a stage waits for the next one, or 1, and it does
            not.
        layers: the hidden layers of M and I; 0: they are linear.
        hidden: the width of a hidden layer.
        rule: how a stage applies its gradient, instead of SGD with lr.
        model_rule: how M and I apply theirs, instead of Adam with a rate (beta) of 0.001.
        cut: the names of the modules with which stages 1, 2, ... begin, as a list or as "h.4 h.8"; None: chosen.
        balance: what the largest stage has little of, if the cuts are chosen: work or parameters.
    """
    refuse_unless(lag in (0, 1), "lag", lag, "0 or 1")
    refuse_unless(layers >= 0, "layers", layers, ">= 0")
    refuse_unless(hidden >= 1, "hidden", hidden, ">= 1")
    return Synthetic(
        rule or Sgd(lr),
        partial(schedules.synthetic, lag=lag),
        Versions,
        cuts=Cuts(cut, balance),
        build=partial(perceptron, hidden=hidden, layers=layers),
        model_rule=model_rule or Adam(0.001),
        conditional=conditional,
        synthetic_inputs=synthetic_inputs,
    )

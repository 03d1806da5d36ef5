"""Local methods: workers take steps of their own for a round, then combine their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from manyhands.collectives.weighted_average import AveragingWeight, ByFisher, ByLoss, BySamples
from manyhands.consistency import Rounds
from manyhands.core.codec import Codec
from manyhands.core.rule import Rule
from manyhands.rules import Adam, Block, Nesterov, Sgd
from manyhands.strategies.local_steps import LocalSteps

__all__ = ["bmuf", "diloco", "model_averaging", "post_local_sgd", "simuparallel", "weighted_averaging"]

WEIGHTS: dict[str, Callable[[], AveragingWeight]] = {"samples": BySamples, "loss": ByLoss, "fisher": ByFisher}


def simuparallel(lr: float = 0.2, own_share: bool = False, rule: Rule | None = None) -> LocalSteps:
    """SimuParallelSGD: every worker trains alone, and the weights are averaged once, at the end.

    split: data. when: once, at the end. who: a collective. what: weights, raw. how: any rule, on the worker's own
    weights.

        x_k <- x_k - eta g_k(x_k)             from the same start, on worker k's own examples
        w   =  (1/P) sum_k x_k                at the end

    One message per worker in the whole run. All workers start from the same weights. The samples of the run are
    distributed over the workers: of many passes over a data set each worker gets a few. With own_share a worker gets a
    part of the data set instead, and sees nothing else in all passes; its result then contributes less to the mean. The
    paper has one pass over single examples, where both are the same; here they are mini-batches. All workers take the
    same number of steps, so the end waits for the slowest one; a lost worker ends the run.

    Reference: M. Zinkevich, M. Weimer, A. Smola, L. Li, Parallelized stochastic gradient descent, 2010
    Loops: strategies/local_steps.py LocalSteps.step; strategies/local_steps.py LocalSteps.finish

    Args:
        lr: eta, the learning rate; constant.
        own_share: whether a worker sees only its own part of the data set.
        rule: how a worker applies its gradient, instead of SGD with lr.
    """
    return LocalSteps(rule or Sgd(lr), Rounds(None), draws_from_all=not own_share)


def model_averaging(
    lr: float = 0.2,
    period: int = 4,
    phase: Literal["end", "start"] = "end",
    memory: Literal["keep", "average", "reset"] = "keep",
    overhead: float | None = None,
    rule: Rule | None = None,
) -> LocalSteps:
    """Periodic model averaging (local SGD): workers average their weights after every few local steps.

    split: data. when: every period steps. who: a collective. what: weights, raw. how: any rule, on the worker's own
    weights.

        x_k <- x_k - eta g_k(x_k)             tau times
        x_k <- (1/P) sum_j x_j

    With tau = 1 and SGD, also with momentum, it is bsp; with Adam it is not. A round takes as long as its slowest
    worker; a lost worker ends the run.

    Reference: H. Su, H. Chen, H. Xu, Experiments on parallel training of deep neural network using model averaging,
        2015, arXiv:1507.01239
    Loops: strategies/local_steps.py LocalSteps.step; strategies/local_steps.py LocalSteps._combine;
        consistency/rounds.py Rounds

    Args:
        lr: eta, the learning rate of a worker's own steps.
        period: tau, steps between two averages.
        phase: average after every period-th step (end), or after the first and then every period-th (start).
        memory: what happens to the optimizer state (momentum) at an average: keep it, average it too, or reset it.
        overhead: choose the period by measurement, so that averaging takes this share of the time.
        rule: how a worker applies its gradient, instead of SGD with lr.
    """
    return LocalSteps(rule or Sgd(lr), Rounds(period, phase, overhead=overhead), memory=memory)


def post_local_sgd(lr: float = 0.2, period: int = 4, warmup: int = 100, rule: Rule | None = None) -> LocalSteps:
    """Post-local SGD: bulk-synchronous steps at first, while the weights change fast, then model averaging.

    split: data. when: every step until the warm-up is over, then every period steps. who: a collective. what:
    gradients, then weights, raw. how: any rule, on the worker's own weights.

        x <- x - eta (1/P) sum_k g_k(x)       for the first warmup steps
        x_k <- x_k - eta g_k(x_k)             then tau times, and
        x_k <- (1/P) sum_j x_j

    A round takes as long as its slowest worker; a lost worker ends the run.

    Reference: T. Lin, S. Stich, K. Patel, M. Jaggi, Don't use large mini-batches, use local SGD, 2018,
        arXiv:1808.07217
    Loops: strategies/local_steps.py LocalSteps.step; strategies/local_steps.py LocalSteps._warmup_step;
        strategies/local_steps.py LocalSteps._combine

    Args:
        lr: eta, the learning rate.
        period: tau, steps between two averages after the warm-up.
        warmup: steps with averaged gradients.
        rule: how gradients are applied, instead of SGD with lr.
    """
    return LocalSteps(rule or Sgd(lr), Rounds(period), warmup=warmup)


def weighted_averaging(
    lr: float = 0.2,
    period: int = 4,
    by: Literal["samples", "loss", "fisher"] = "fisher",
    rule: Rule | None = None,
) -> LocalSteps:
    """Weighted parameter combination: model averaging with a weight for each worker, or for each coordinate.

    split: data. when: every period steps. who: a collective. what: weights and their coefficients. how: any rule, on
    the worker's own weights.

        x_k <- x_k - eta g_k(x_k)             tau times
        x_k <- sum_j a_j x_j / sum_j a_j      a_j: samples seen, 1 / mean loss, or the sum of g^2 per coordinate

    With equal weights it is model averaging. A round takes as long as its slowest worker; a lost worker ends the run.

    Reference: J. Hermans, On scalable deep learning and parallelizing gradient descent (thesis), 2017
    Loops: strategies/local_steps.py LocalSteps.step; strategies/local_steps.py LocalSteps._combine;
        collectives/weighted_average.py average

    Args:
        lr: eta, the learning rate of a worker's own steps.
        period: tau, steps between two averages.
        by: the coefficient of a worker: the samples it has seen, the inverse of its loss, or the Fisher information.
        rule: how a worker applies its gradient, instead of SGD with lr.
    """
    return LocalSteps(rule or Sgd(lr), Rounds(period), weight=WEIGHTS[by]())


def bmuf(
    lr: float = 0.1,
    period: int = 8,
    block_lr: float = 1.0,
    block_momentum: float | None = None,
    nesterov: bool = True,
    base: Literal["paper", "lookahead"] = "paper",
    memory: Literal["keep", "average", "reset"] = "keep",
    rule: Rule | None = None,
    codec: Codec | None = None,
) -> LocalSteps:
    """Blockwise model-update filtering: the mean change of a round is applied as one large step with momentum.

    split: data. when: every period steps. who: a collective. what: the change of a round, by any codec. how: any rule
    on the worker's own weights; block momentum between rounds.

        x_k from W_g, tau steps of its own;  G = (1/P) sum_k x_k - W_g
        Delta <- eta Delta + zeta G;  W <- W + Delta
        W_g <- W (classical), W + eta Delta (Nesterov)

    W is evaluated and saved. With eta = 0 and zeta = 1 it is model averaging. A round takes as long as its slowest
    worker; a lost worker ends the run.

    Reference: K. Chen, Q. Huo, Scalable training of deep learning machines by incremental block training with
        intra-block parallel optimization and blockwise model-update filtering, 2016
    Loops: strategies/local_steps.py LocalSteps.step; strategies/local_steps.py LocalSteps._step_towards;
        rules/block.py Block

    Args:
        lr: the learning rate of a worker's own steps.
        period: tau, steps of a block.
        block_lr: zeta, the block learning rate.
        block_momentum: eta; 1 - 1/P if not given: with zeta = 1 every mini-batch contributes as much as on one machine.
        nesterov: start a block one step ahead.
        base: what a step is added to: the filtered model (paper), or the point ahead, as some programs do.
        memory: what happens to the optimizer state (momentum) after a block: keep it, average it, or reset it.
        rule: how a worker applies its gradient, instead of SGD with lr.
        codec: how the change of a round is encoded, such as feedback(topk(0.01)); raw if not given.
    """
    outer = Block(block_lr, block_momentum, nesterov, base == "lookahead")
    return LocalSteps(rule or Sgd(lr), Rounds(period), outer, memory=memory, codec=codec)


def diloco(
    lr: float = 0.003,
    period: int | None = None,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    rule: Rule | None = None,
    codec: Codec | None = None,
) -> LocalSteps:
    """DiLoCo: hundreds of AdamW steps on every worker, then one Nesterov step on the mean change of the weights.

    split: data. when: every period steps. who: a collective. what: the change of a round, by any codec. how: AdamW on
    the worker's own weights; Nesterov momentum between rounds.

        theta_k from theta, H steps of AdamW on its own share
        theta <- Nesterov step with the gradient (1/P) sum_k (theta - theta_k)

    It sends H times less than bsp, so it suits slow links. The state of AdamW is local to its worker. A round takes as
    long as its slowest worker; a lost worker ends the run.

    Reference: A. Douillard et al., DiLoCo: distributed low-communication training of language models, 2023,
        arXiv:2311.08105
    Loops: strategies/local_steps.py LocalSteps.step; strategies/local_steps.py LocalSteps._step_towards;
        consistency/rounds.py Rounds

    Args:
        lr: the learning rate of the inner AdamW.
        period: H, steps of a round; if not given 500, but at most a tenth of a run whose length is known.
        outer_lr: the learning rate of the outer step.
        outer_momentum: the momentum of the outer step.
        rule: how a worker applies its gradient, instead of AdamW with lr.
        codec: how the change of a round is encoded, such as feedback(topk(0.01)); raw if not given.
    """
    inner = rule or Adam(lr, weight_decay=0.01, decoupled=True)
    rounds = Rounds(500, capped=True) if period is None else Rounds(period)
    return LocalSteps(inner, rounds, Nesterov(outer_lr, outer_momentum), codec=codec)

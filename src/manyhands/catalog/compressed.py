"""Compressed methods: bulk-synchronous training in which gradients are made smaller before they travel."""

from __future__ import annotations

from typing import Literal

from manyhands.codecs import ByLayer, Dgc, Feedback, Half, OneBit, Qsgd, Strom, TernGrad, TopK, WarmUp
from manyhands.core.errors import refuse_unless
from manyhands.core.protocols import Codec, Rule
from manyhands.rules import Sgd
from manyhands.strategies.compressed import Compressed, Encoded, LowRank
from manyhands.strategies.factors import Factors

__all__ = [
    "dgc",
    "fp16_sgd",
    "onebit_sgd",
    "powersgd",
    "qsgd",
    "sparcml",
    "strom",
    "sufficient_factors",
    "terngrad",
    "topk_sgd",
]


def fp16_sgd(
    lr: float = 0.3,
    kind: Literal["fp16", "bf16"] = "fp16",
    feedback: bool = False,
    by_host: bool = False,
    rule: Rule | None = None,
) -> Compressed:
    """SGD with gradients in half precision: two bytes for every number.

    split: data. when: bulk. who: owners of stripes, who tell the sum. what: fp16 or bf16. how: any rule, the same on
    every worker.

        worker k: tells the owner of stripe j  r(g_k)_j                  r rounds to 16 bits, and never to infinity
        owner j:  tells everyone               r(sum_k r(g_k)_j)         the sum is made in full precision

    fp16 knows nothing below 6e-8 and nothing above 65504; bf16 has the range of float32 and fewer digits. A step takes
    as long as the slowest worker; a lost worker ends the run.

    Reference: P. Micikevicius et al., Mixed precision training, 2018, arXiv:1710.03740
    Loops: strategies/compressed.py Compressed.step; topology/sums/stripes.py Stripes.add_up; codecs/half.py Half

    Args:
        lr: eta, the learning rate.
        kind: more digits (fp16) or more range (bf16).
        feedback: whether what rounding has lost is sent later.
        by_host: whether those of one host first add up what they have, as it is, and then come as one.
        rule: how the mean gradient is applied, instead of SGD with lr.
    """
    codec: Codec = Feedback(Half(kind)) if feedback else Half(kind)
    return Compressed(rule or Sgd(lr), Encoded(codec, "stripes", by_host))


def onebit_sgd(
    lr: float = 0.3,
    dense: int = 0,
    feedback: bool = True,
    by_host: bool = False,
    rule: Rule | None = None,
) -> Compressed:
    """1-bit SGD: the sign of every number, and two numbers for each column of a matrix.

    split: data. when: bulk. who: owners of stripes, who tell the sum. what: one bit with feedback. how: any rule, the
    same on every worker.

        a = g_k + e_k;  column j: u1 = mean of a >= 0, u0 = mean of a < 0;  Q(a) = u1 where a >= 0, else u0
        e_k <- a - Q(a)
        the owner of a stripe sums what comes, and tells Q of the sum in the same way, with a memory of its own

    Nothing is lost: what was sent and what is remembered make up all gradients. Without feedback it loses. A step takes
    as long as the slowest worker; a lost worker ends the run, and what it had not sent is gone.

    Reference: F. Seide et al., 1-bit stochastic gradient descent and its application to data-parallel distributed
        training of speech DNNs, 2014
    Loops: strategies/compressed.py Compressed.step; topology/sums/stripes.py Stripes.add_up; codecs/onebit.py OneBit

    Args:
        lr: eta, the learning rate.
        dense: steps at the beginning in which gradients are sent as they are.
        feedback: whether what is lost is sent later.
        by_host: whether those of one host first add up what they have, as it is, and then come as one.
        rule: how the mean gradient is applied, instead of SGD with lr.
    """
    codec: Codec = Feedback(OneBit()) if feedback else OneBit()
    return Compressed(rule or Sgd(lr), Encoded(codec, "stripes", by_host), dense)


def terngrad(
    lr: float = 0.3,
    clip: float = 2.5,
    shared_scale: bool = False,
    dense: int = 0,
    by_host: bool = False,
    rule: Rule | None = None,
) -> Compressed:
    """TernGrad: every number becomes -s, 0 or s at random, so that it is right on average.

    split: data. when: bulk. who: everyone tells everyone. what: two bits for a number, one s for each parameter. how:
    any rule, the same on every worker.

        g_i <- g_i within c sigma;  s = max |g_i|;  t_i = s sign(g_i) with probability |g_i| / s, else 0

    With clipping off (c = 0) the mean of t is g; its variance s |g_i| - g_i^2 is why one clips. Biases and the like,
    fewer than 64 numbers, travel as they are. A step takes as long as the slowest worker; a lost worker ends the run.

    In the paper all workers have one s, the largest of theirs, so that P of them add up to one of 2P + 1 levels. That
    takes a small message before each large one. As nobody here adds whole numbers it saves nothing, and it learns
    neither better nor worse: so everyone has an s of its own unless shared_scale says otherwise.

    Reference: W. Wen et al., TernGrad: ternary gradients to reduce communication in distributed deep learning, 2017,
        arXiv:1705.07878
    Loops: strategies/compressed.py Compressed.step; topology/sums/gather.py Gather.add_up; codecs/terngrad.py TernGrad

    Args:
        lr: eta, the learning rate.
        clip: c, how many standard deviations a number may have; 0: any.
        shared_scale: whether s is the largest of all workers'.
        dense: steps at the beginning in which gradients are sent as they are.
        by_host: whether those of one host first add up what they have, as it is, and then come as one.
        rule: how the mean gradient is applied, instead of SGD with lr.
    """
    codec = ByLayer(TernGrad(clip, shared_scale), least=64)
    return Compressed(rule or Sgd(lr), Encoded(codec, by_host=by_host), dense)


def qsgd(
    lr: float = 0.3,
    levels: int = 7,
    bucket: int = 512,
    norm: Literal["l2", "max"] = "l2",
    by_host: bool = False,
    rule: Rule | None = None,
) -> Compressed:
    """QSGD: every number is rounded at random to one of a few levels, so that it is right on average.

    split: data. when: bulk. who: everyone tells everyone. what: 4 bits for a number, one norm for each bucket. how: any
    rule, the same on every worker.

        in a bucket v of d numbers:  n = ||v||;  r = s |v_i| / n;  l = floor(r), or one more with probability r - l
        Q_i = n sign(v_i) l / s

    The mean of Q is v, and E ||Q - v||^2 <= min(d / s^2, sqrt(d) / s) ||v||^2. Every worker rounds with random numbers
    of its own. A step takes as long as the slowest worker; a lost worker ends the run.

    Reference: D. Alistarh et al., QSGD: communication-efficient SGD via gradient quantization and encoding, 2017,
        arXiv:1610.02132
    Loops: strategies/compressed.py Compressed.step; topology/sums/gather.py Gather.add_up; codecs/qsgd.py Qsgd

    Args:
        lr: eta, the learning rate.
        levels: s, how many levels there are on either side of 0: 1 takes 2 bits, up to 7 4 bits, up to 127 8 bits.
        bucket: d, how many numbers have one norm.
        norm: the Euclidean one of the paper, or the largest number.
        by_host: whether those of one host first add up what they have, as it is, and then come as one.
        rule: how the mean gradient is applied, instead of SGD with lr.
    """
    return Compressed(rule or Sgd(lr), Encoded(Qsgd(levels, bucket, norm), by_host=by_host))


def topk_sgd(
    lr: float = 0.3,
    fraction: float = 0.01,
    feedback: bool = True,
    by_host: bool = False,
    rule: Rule | None = None,
) -> Compressed:
    """Top-k SGD: only the largest numbers travel; all others wait until they have grown.

    split: data. when: bulk. who: everyone tells everyone. what: the k largest numbers and their places, with feedback.
    how: any rule, the same on every worker.

        a = g_k + e_k;  s_k = the k numbers of a with the largest |a_i|;  e_k <- a - s_k

    With all numbers it is bsp. Without feedback most weights never move. A step takes as long as the slowest worker; a
    lost worker ends the run, and what it had not sent is gone.

    Reference: A. Aji, K. Heafield, Sparse communication for distributed gradient descent, 2017, arXiv:1704.05021
    Loops: strategies/compressed.py Compressed.step; topology/sums/gather.py Gather.add_up; codecs/topk.py TopK;
        codecs/feedback.py Feedback

    Args:
        lr: eta, the learning rate.
        fraction: k / n, how many of the numbers travel.
        feedback: whether what is left out is sent later.
        by_host: whether those of one host first add up what they have, as it is, and then come as one.
        rule: how the mean gradient is applied, instead of SGD with lr.
    """
    codec: Codec = Feedback(TopK(fraction)) if feedback else TopK(fraction)
    return Compressed(rule or Sgd(lr), Encoded(codec, by_host=by_host))


def dgc(
    lr: float = 0.1,
    fraction: float = 0.01,
    momentum: float = 0.5,
    masking: bool = True,
    clip: float = 0.0,
    warmup: int = 40,
    by_host: bool = False,
    rule: Rule | None = None,
) -> Compressed:
    """Deep gradient compression: top-k in which every number has the momentum that it would have had.

    split: data. when: bulk. who: everyone tells everyone. what: the k largest numbers of an accumulated velocity. how:
    plain SGD, for momentum is in what is sent.

        u <- mu u + g_k;  v <- v + u;  s_k = the k numbers of v with the largest |v_i|
        where something was sent: v_i <- 0, and with masking u_i <- 0

    In the first `warmup` steps more travels: a quarter of all numbers, then a quarter of that, and so on. With all
    numbers and without masking it is SGD with momentum; with masking it is plain SGD. A step takes as long as the
    slowest worker; a lost worker ends the run, and what it had not sent is gone.

    Reference: Y. Lin et al., Deep gradient compression: reducing the communication bandwidth for distributed training,
        2018, arXiv:1712.01887
    Loops: strategies/compressed.py Compressed.step; topology/sums/gather.py Gather.add_up; codecs/dgc.py Dgc;
        codecs/warmup.py WarmUp

    Args:
        lr: eta, the learning rate.
        fraction: k / n, how many of the numbers travel in the end.
        momentum: mu, what remains of a velocity.
        masking: whether what was sent loses its velocity.
        clip: the largest norm of a worker's gradient; 0: any.
        warmup: steps in which more travels.
        by_host: whether those of one host first add up what they have, as it is, and then come as one.
        rule: how the mean is applied, instead of SGD with lr.
    """
    refuse_unless(warmup >= 0, "warmup", warmup, ">= 0")
    codec: Codec = Dgc(TopK(fraction), momentum, masking=masking, clip=clip)
    codec = WarmUp(codec, warmup) if warmup else codec
    return Compressed(rule or Sgd(lr), Encoded(codec, by_host=by_host))


def strom(
    lr: float = 0.3,
    threshold: float = 0.01,
    by_host: bool = False,
    rule: Rule | None = None,
) -> Compressed:
    """Strom's threshold: whatever has grown beyond tau is told, as tau, in one word.

    split: data. when: bulk. who: everyone tells everyone. what: place and sign of some numbers, 32 bits each. how: any
    rule, the same on every worker.

        r <- r + g_k;  where r_i > tau: tell (i, +), r_i <- r_i - tau;  where r_i < -tau: tell (i, -), r_i <- r_i + tau

    At most one tau for a number and step, so tau should be larger than most gradients; with a small tau only signs are
    left. It is in the units of a gradient. Nothing is lost. A step takes as long as the slowest worker; a lost worker
    ends the run, and what it had not sent is gone.

    Reference: N. Strom, Scalable distributed DNN training using commodity GPU cloud computing, 2015
    Loops: strategies/compressed.py Compressed.step; topology/sums/gather.py Gather.add_up; codecs/strom.py Strom

    Args:
        lr: eta, the learning rate.
        threshold: tau, how much is told at once.
        by_host: whether those of one host first add up what they have, as it is, and then come as one.
        rule: how the mean gradient is applied, instead of SGD with lr.
    """
    return Compressed(rule or Sgd(lr), Encoded(Strom(threshold), by_host=by_host))


def sparcml(
    lr: float = 0.3,
    fraction: float = 0.01,
    algorithm: Literal["auto", "double", "split", "dense"] = "auto",
    levels: int = 0,
    by_host: bool = False,
    rule: Rule | None = None,
) -> Compressed:
    """SparCML: sparse vectors are summed on their way, and become dense when that is shorter.

    split: data. when: bulk. who: partners, by one of three sparse all-reduces. what: top-k with feedback; sums that
    have become dense may be told with few bits. how: any rule, the same on every worker.

        double   as in a butterfly: partners swap their sums and merge them
        split    everyone owns a stretch of the indices: tell each owner its entries, owners tell their sums
        dense    the same, but owners tell dense sums
        a sum is dense from N v / (c + v) entries on: then its numbers alone are shorter than indices and numbers

    By itself it takes `double` if few entries are to be expected in the sum, `dense` if more than that, else `split`. A
    step takes as long as the slowest worker; a lost worker ends the run, and what it had not sent is gone.

    Reference: C. Renggli et al., SparCML: high-performance sparse communication for machine learning, 2019,
        arXiv:1802.08021
    Loops: strategies/compressed.py Compressed.step; topology/sums/sparcml.py Sparcml.add_up; codecs/topk.py TopK

    Args:
        lr: eta, the learning rate.
        fraction: k / n, how many of the numbers travel.
        algorithm: which of the three.
        levels: of QSGD, for sums that are told densely; 0: as they are.
        by_host: whether those of one host first add up what they have, as it is, and then come as one.
        rule: how the mean gradient is applied, instead of SGD with lr.
    """
    values = Qsgd(levels) if levels else None
    exchange = Encoded(Feedback(TopK(fraction)), "sparcml", by_host, algorithm, values)
    return Compressed(rule or Sgd(lr), exchange)


def powersgd(
    lr: float = 0.3,
    rank: int = 2,
    dense: int = 10,
    least_rate: float = 2.0,
    rule: Rule | None = None,
) -> Compressed:
    """PowerSGD: of every large matrix two thin ones are summed, found by a step of the power method.

    split: data. when: bulk. who: a collective. what: P and Q of rank r instead of a matrix, with feedback. how: any
    rule, the same on every worker.

        M_k = G_k + E_k;  P = orthonormal(sum_k M_k Q);  Q = mean_k M_k^T P;  E_k <- M_k - P Q^T
        the mean gradient is taken to be P Q^T; the next step begins with this Q

    In the mean over workers nothing is lost. Vectors, and matrices that would not become `least_rate` times smaller,
    are summed as they are. A step takes as long as the slowest worker; a lost worker ends the run.

    Reference: T. Vogels, S. Karimireddy, M. Jaggi, PowerSGD: practical low-rank gradient compression for distributed
        optimization, 2019, arXiv:1905.13727
    Loops: strategies/compressed.py Compressed.step; topology/sums/low_rank.py LowRankSum.add_up

    Args:
        lr: eta, the learning rate.
        rank: r, how thin the two matrices are.
        dense: steps at the beginning in which gradients are sent as they are.
        least_rate: by how much they must be smaller at least.
        rule: how the mean gradient is applied, instead of SGD with lr.
    """
    return Compressed(rule or Sgd(lr), LowRank(rank, least_rate), dense)


def sufficient_factors(lr: float = 0.3, rule: Rule | None = None, collective: str = "auto") -> Factors:
    """Sufficient factors: a linear layer's gradient is rebuilt from what went in and what came back.

    split: data. when: bulk. who: everyone tells everyone the factors; a collective for all others. what: two thin
    matrices for a linear layer, where they are smaller. how: any rule, the same on every worker.

        the gradient of a layer with N inputs and M outputs over K samples is  sum_i d_i h_i^T = D^T H
        tell D (K x M) and H (K x N);  G = sum_k D_k^T H_k;  the bias: the sum of all rows of D
        if 2 K (P - 1) (M + N) <= 2 M N (P + P - 2) / P, else the gradient itself is summed

    Nothing is lost: the result is that of bsp, but for rounding. It pays for large layers and small mini-batches. A
    step takes as long as the slowest worker; a lost worker ends the run.

    Reference: P. Xie et al., Distributed machine learning via sufficient factor broadcasting, 2015, arXiv:1511.08486;
        T. Chilimbi et al., Project Adam: building an efficient and scalable deep learning training system, 2014
    Loops: strategies/factors.py Factors.step

    Args:
        lr: eta, the learning rate.
        rule: how the mean gradient is applied, instead of SGD with lr.
        collective: how all other gradients are summed: auto, native, shared, ring, tree, butterfly or rabenseifner.
    """
    return Factors(rule or Sgd(lr), collective)

"""Compressed methods: bulk-synchronous training in which gradients are compressed before they are sent."""

from __future__ import annotations

from typing import Literal

from manyhands.codecs import ByLayer, Dgc, Feedback, Half, OneBit, Qsgd, Strom, TernGrad, TopK, WarmUp
from manyhands.core.codec import Codec
from manyhands.core.errors import refuse_unless
from manyhands.core.rule import Rule
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
    """SGD with gradients in half precision: every number is sent as two bytes.

    split: data. when: bulk. who: owners of stripes, by an encoded reduce-scatter and all-gather. what: fp16 or bf16.
    how: any rule, the same on every worker.

        worker k: sends to the owner of stripe j  r(g_k)_j               r rounds to 16 bits, and never to infinity
        owner j:  sends to all workers            r(sum_k r(g_k)_j)      the sum is computed in full precision

    fp16 represents nothing below 6e-8 and nothing above 65504; bf16 has the range of float32 and fewer digits. A step
    takes as long as the slowest worker; a lost worker ends the run.

    Reference: P. Micikevicius et al., Mixed precision training, 2018, arXiv:1710.03740
    Loops: strategies/compressed.py Compressed.step; collectives/compressed/stripes.py Stripes.all_reduce;
        codecs/half.py Half

    Args:
        lr: eta, the learning rate.
        kind: more digits (fp16) or more range (bf16).
        feedback: whether rounding errors are added to the next gradient.
        by_host: whether the workers of one host first sum their raw gradients and then take part as one.
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
    """1-bit SGD: the sign of every number is sent, and two means per column of a matrix, with error feedback.

    split: data. when: bulk. who: owners of stripes, by an encoded reduce-scatter and all-gather. what: one bit with
    error feedback. how: any rule, the same on every worker.

        a = g_k + e_k;  column j: u1 = mean of a >= 0, u0 = mean of a < 0;  Q(a) = u1 where a >= 0, else u0
        e_k <- a - Q(a)
        the owner of a stripe sums all Q, and sends Q of the sum in the same way, with an error memory of its own

    With feedback nothing is lost: what was sent and the error memories add up to all gradients. A step takes as long as
    the slowest worker; a lost worker ends the run, and its error memory is lost.

    Reference: F. Seide et al., 1-bit stochastic gradient descent and its application to data-parallel distributed
        training of speech DNNs, 2014
    Loops: strategies/compressed.py Compressed.step; collectives/compressed/stripes.py Stripes.all_reduce;
        codecs/onebit.py OneBit

    Args:
        lr: eta, the learning rate.
        dense: steps at the beginning in which gradients are sent uncompressed.
        feedback: whether quantization errors are added to the next gradient.
        by_host: whether the workers of one host first sum their raw gradients and then take part as one.
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
    """TernGrad: every number is rounded at random to -s, 0 or s, without bias.

    split: data. when: bulk. who: all workers, by an all-gather of encoded gradients. what: two bits per number, one s
    per parameter. how: any rule, the same on every worker.

        g_i <- g_i within c sigma;  s = max |g_i|;  t_i = s sign(g_i) with probability |g_i| / s, else 0

    Without clipping (c = 0) the mean of t is g; its variance s |g_i| - g_i^2 is the reason for clipping. Small
    parameters such as biases, with fewer than 64 numbers, are sent uncompressed. A step takes as long as the slowest
    worker; a lost worker ends the run.

    In the paper all workers use one s, the largest of theirs, so that P ternary gradients add up to one of 2P + 1
    levels. That takes a small message before each large one. Since integers are not summed here, a shared s saves no
    bytes, and in our runs it trains neither better nor worse: so every worker has an s of its own unless shared_scale
    is set.

    Reference: W. Wen et al., TernGrad: ternary gradients to reduce communication in distributed deep learning, 2017,
        arXiv:1705.07878
    Loops: strategies/compressed.py Compressed.step; collectives/compressed/gather.py Gather.all_reduce;
        codecs/terngrad.py TernGrad

    Args:
        lr: eta, the learning rate.
        clip: c, the largest absolute value in standard deviations; 0: no clipping.
        shared_scale: whether s is the largest over all workers.
        dense: steps at the beginning in which gradients are sent uncompressed.
        by_host: whether the workers of one host first sum their raw gradients and then take part as one.
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
    """QSGD: every number is rounded at random to one of a few levels, without bias.

    split: data. when: bulk. who: all workers, by an all-gather of encoded gradients. what: 4 bits per number, one norm
    per bucket. how: any rule, the same on every worker.

        in a bucket v of d numbers:  n = ||v||;  r = s |v_i| / n;  l = floor(r), or one more with probability r - l
        Q_i = n sign(v_i) l / s

    The mean of Q is v, and E ||Q - v||^2 <= min(d / s^2, sqrt(d) / s) ||v||^2. Every worker rounds with its own random
    numbers. A step takes as long as the slowest worker; a lost worker ends the run.

    Reference: D. Alistarh et al., QSGD: communication-efficient SGD via gradient quantization and encoding, 2017,
        arXiv:1610.02132
    Loops: strategies/compressed.py Compressed.step; collectives/compressed/gather.py Gather.all_reduce;
        codecs/qsgd.py Qsgd

    Args:
        lr: eta, the learning rate.
        levels: s, the number of levels on either side of 0: 1 takes 2 bits, up to 7 takes 4 bits, up to 127 takes 8
            bits.
        bucket: d, how many numbers share one norm.
        norm: the Euclidean norm, as in the paper, or the largest absolute value.
        by_host: whether the workers of one host first sum their raw gradients and then take part as one.
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
    """Top-k SGD: only the largest entries are sent; the others accumulate in an error memory.

    split: data. when: bulk. who: all workers, by an all-gather of encoded gradients. what: the k largest entries and
    their indices, with error feedback. how: any rule, the same on every worker.

        a = g_k + e_k;  s_k = the k entries of a with the largest |a_i|;  e_k <- a - s_k

    With all entries it is bsp. Without feedback most weights never move. A step takes as long as the slowest worker; a
    lost worker ends the run, and its error memory is lost.

    Reference: A. Aji, K. Heafield, Sparse communication for distributed gradient descent, 2017, arXiv:1704.05021
    Loops: strategies/compressed.py Compressed.step; collectives/compressed/gather.py Gather.all_reduce;
        codecs/topk.py TopK; codecs/feedback.py Feedback

    Args:
        lr: eta, the learning rate.
        fraction: k / n, the fraction of entries that are sent.
        feedback: whether entries that were not sent are added to the next gradient.
        by_host: whether the workers of one host first sum their raw gradients and then take part as one.
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
    """Deep gradient compression: top-k of a velocity, with momentum corrected for the delay of unsent entries.

    split: data. when: bulk. who: all workers, by an all-gather of encoded gradients. what: the k largest entries of an
    accumulated velocity. how: plain SGD, because the momentum is part of what is sent.

        u <- mu u + g_k;  v <- v + u;  s_k = the k entries of v with the largest |v_i|
        for the entries that were sent: v_i <- 0, and with masking u_i <- 0

    In the first `warmup` steps more is sent: a quarter of all entries, then a quarter of that, and so on. With all
    entries and without masking it is SGD with momentum; with masking it is plain SGD. A step takes as long as the
    slowest worker; a lost worker ends the run, and its error memory is lost.

    Reference: Y. Lin et al., Deep gradient compression: reducing the communication bandwidth for distributed training,
        2018, arXiv:1712.01887
    Loops: strategies/compressed.py Compressed.step; collectives/compressed/gather.py Gather.all_reduce;
        codecs/dgc.py Dgc; codecs/warmup.py WarmUp

    Args:
        lr: eta, the learning rate.
        fraction: k / n, the fraction of entries that are sent after the warm-up.
        momentum: mu, the momentum of the velocity.
        masking: whether the velocity of a sent entry is reset to 0.
        clip: the largest norm of a worker's gradient; 0: no clipping.
        warmup: steps in which more entries are sent.
        by_host: whether the workers of one host first sum their raw gradients and then take part as one.
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
    """Strom's threshold: every accumulated entry beyond tau is sent as +tau or -tau, in one 32-bit word.

    split: data. when: bulk. who: all workers, by an all-gather of encoded gradients. what: index and sign of some
    entries, 32 bits each. how: any rule, the same on every worker.

        r <- r + g_k;  where r_i > tau: send (i, +), r_i <- r_i - tau;  where r_i < -tau: send (i, -), r_i <- r_i + tau

    At most one tau is sent per entry and step, so tau should be larger than most gradients; with a small tau only signs
    are left. tau is in the units of a gradient. Nothing is lost: the remainder r stays on the worker. A step takes as
    long as the slowest worker; a lost worker ends the run, and its error memory is lost.

    Reference: N. Strom, Scalable distributed DNN training using commodity GPU cloud computing, 2015
    Loops: strategies/compressed.py Compressed.step; collectives/compressed/gather.py Gather.all_reduce;
        codecs/strom.py Strom

    Args:
        lr: eta, the learning rate.
        threshold: tau, the absolute value that is sent.
        by_host: whether the workers of one host first sum their raw gradients and then take part as one.
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
    """SparCML: a sparse all-reduce that merges sparse vectors and switches to dense ones when these are shorter.

    split: data. when: bulk. who: all workers, by one of three sparse all-reduces. what: top-k with error feedback; sums
    that have become dense may be quantized. how: any rule, the same on every worker.

        double   as in a butterfly: partners exchange their sums and merge them
        split    each worker owns a range of the indices: send each owner its entries, owners send their sums
        dense    the same, but owners send dense sums
        a sum is dense from N v / (c + v) entries on: then its values alone are shorter than indices and values

    `auto` takes `double` if few entries are expected in the sum, `dense` if the sum is expected to be dense, else
    `split`. A step takes as long as the slowest worker; a lost worker ends the run, and its error memory is lost.

    Reference: C. Renggli et al., SparCML: high-performance sparse communication for machine learning, 2019,
        arXiv:1802.08021
    Loops: strategies/compressed.py Compressed.step; collectives/compressed/sparcml.py Sparcml.all_reduce;
        codecs/topk.py TopK

    Args:
        lr: eta, the learning rate.
        fraction: k / n, the fraction of entries that are sent.
        algorithm: one of the three, or auto.
        levels: levels of QSGD for dense sums; 0: not quantized.
        by_host: whether the workers of one host first sum their raw gradients and then take part as one.
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
    """PowerSGD: every large matrix is approximated by two thin factors, from one step of the power method.

    split: data. when: bulk. who: a collective. what: P and Q of rank r instead of a matrix, with error feedback. how:
    any rule, the same on every worker.

        M_k = G_k + E_k;  P = orthonormal(sum_k M_k Q);  Q = mean_k M_k^T P;  E_k <- M_k - P Q^T
        the mean gradient is approximated by P Q^T; the next step begins with this Q

    With error feedback nothing is lost in the mean over workers. Vectors, and matrices that would not become
    `least_rate` times smaller, are summed uncompressed. A step takes as long as the slowest worker; a lost worker ends
    the run.

    Reference: T. Vogels, S. Karimireddy, M. Jaggi, PowerSGD: practical low-rank gradient compression for distributed
        optimization, 2019, arXiv:1905.13727
    Loops: strategies/compressed.py Compressed.step; collectives/compressed/low_rank.py LowRankSum.all_reduce

    Args:
        lr: eta, the learning rate.
        rank: r, the rank of the two factors.
        dense: steps at the beginning in which gradients are sent uncompressed.
        least_rate: the least compression rate at which a matrix is compressed.
        rule: how the mean gradient is applied, instead of SGD with lr.
    """
    return Compressed(rule or Sgd(lr), LowRank(rank, least_rate), dense)


def sufficient_factors(lr: float = 0.3, rule: Rule | None = None, collective: str = "auto") -> Factors:
    """Sufficient factors: a linear layer's gradient is recomputed from its inputs and output gradients, which are sent.

    split: data. when: bulk. who: all workers, by an all-gather of the factors; a collective for all other gradients.
    what: two thin matrices per linear layer, where they are smaller. how: any rule, the same on every worker.

        the gradient of a layer with N inputs and M outputs over K samples is  sum_i d_i h_i^T = D^T H
        send D (K x M) and H (K x N);  G = sum_k D_k^T H_k;  the bias: the sum of all rows of D
        if 2 K (P - 1) (M + N) <= 2 M N (P + P - 2) / P, else the gradient itself is summed

    The result is that of bsp except for rounding. It saves bytes for large layers and small mini-batches. A step takes
    as long as the slowest worker; a lost worker ends the run.

    Reference: P. Xie et al., Distributed machine learning via sufficient factor broadcasting, 2015, arXiv:1511.08486;
        T. Chilimbi et al., Project Adam: building an efficient and scalable deep learning training system, 2014
    Loops: strategies/factors/factors.py Factors.step

    Args:
        lr: eta, the learning rate.
        rule: how the mean gradient is applied, instead of SGD with lr.
        collective: how all other gradients are summed: auto, native, shared, ring, tree, butterfly or rabenseifner.
    """
    return Factors(rule or Sgd(lr), collective)

"""Slices: every worker has a part of each layer; what it computes is joined inside the forward and backward passes."""

from __future__ import annotations

from typing import Literal

from manyhands.core.errors import refuse_unless
from manyhands.core.rule import Rule
from manyhands.core.team import Team
from manyhands.rules import Sgd
from manyhands.splits.conv_fc import ConvFc
from manyhands.splits.piped import Piped
from manyhands.splits.sliced import Sliced
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.grid import Grid

__all__ = ["channel_split", "filter_split", "mesh", "neuron_split", "one_weird_trick", "tensor_parallel"]


def neuron_split(ranks: int = 0, lr: float = 0.1, rule: Rule | None = None) -> Grid:
    """Neuron partitioning: every worker has some neurons of each linear layer, as one model replica of DistBelief.

    split: neurons. when: inside each layer, both ways. who: all workers of a team. what: activations, and errors of
    activations; never a weight of a divided layer. how: any rule, on the worker's own neurons.

        forward    h_p = f(W_p h + b_p), rows p of W;  every worker gets all of h
        backward   dW_p = delta_p h^T,  the errors W_p^T delta_p are summed where their neuron is

    Equal to SGD on one machine. Works in any module: the output of a layer is whole again. Where a linear layer follows
    another with only elementwise ones between, going back a worker gets the sums of its own neurons only: (P-1)/P of a
    layer's width per sample each way, as in the paper for a fully connected network. Elsewhere, all sums, twice as
    much. Other layers are computed by every worker. The paper sends only what is read: sparse connections between
    neurons are not offered. A lost worker ends the run. Downpour over such replicas is `downpour` with
    `--team 'sliced(2, "neurons")'`.

    Reference: J. Dean et al., Large scale distributed deep networks, 2012
    Loops: splits/sliced.py Sliced.gradient; splits/slice_layers.py SliceLayers; splits/slice_exchange.py SliceExchange;
        strategies/grid.py Grid.step; strategies/allreduce.py AllReduce.step

    Args:
        ranks: P, the workers of a team; 0: all workers form one team.
        lr: eta, the learning rate.
        rule: how a worker applies its gradient, instead of SGD with lr.
    """
    return _over(Sliced(ranks, "neurons"), lr, rule)


def filter_split(ranks: int = 0, lr: float = 0.1, rule: Rule | None = None) -> Grid:
    """Filter-parallel convolutions: every worker has some filters of each layer, and all of its input.

    split: output channels. when: inside each layer, both ways. who: all workers of a team. what: feature maps and their
    errors. how: any rule, on the worker's own filters.

        forward    y_p = conv(x, W_p), W_p the filters p;  y = all y_p, joined
        backward   dx = sum_p conv^T(dy_p, W_p);  dW_p from x and dy_p

    Equal to SGD on one machine. The two GPUs of AlexNet are another network, in which some layers see half of the
    channels (`groups=2`); such layers are not divided here. A lost worker ends the run.

    Reference: O. Yadan et al., Multi-GPU training of ConvNets, 2013, arXiv:1312.5853
    Loops: splits/sliced.py Sliced.gradient; splits/slice_layers.py SliceLayers; splits/slice_exchange.py SliceExchange;
        strategies/grid.py Grid.step; strategies/allreduce.py AllReduce.step

    Args:
        ranks: P, the workers of a team; 0: all workers form one team.
        lr: eta, the learning rate.
        rule: how a worker applies its gradient, instead of SGD with lr.
    """
    return _over(Sliced(ranks, "filters"), lr, rule)


def channel_split(ranks: int = 0, lr: float = 0.1, rule: Rule | None = None) -> Grid:
    """Channel-parallel convolutions: every worker has the weights of some input channels; outputs are summed.

    split: input channels. when: inside each layer, both ways. who: all workers of a team. what: partial sums of feature
    maps, and errors. how: any rule, on the worker's own weights.

        forward    y = sum_p conv(x_p, W_p) + b, x_p the channels p of x
        backward   dx_p = conv^T(dy, W_p), joined;  dW_p from x_p and dy

    Equal to SGD on one machine. For layers with more input than output channels. A layer by output channels followed by
    one by input channels needs one sum for both: that is `tensor-parallel`. A lost worker ends the run.

    Reference: the conv form of M. Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053
    Loops: splits/sliced.py Sliced.gradient; splits/slice_layers.py SliceLayers; splits/slice_exchange.py SliceExchange;
        strategies/grid.py Grid.step; strategies/allreduce.py AllReduce.step

    Args:
        ranks: P, the workers of a team; 0: all workers form one team.
        lr: eta, the learning rate.
        rule: how a worker applies its gradient, instead of SGD with lr.
    """
    return _over(Sliced(ranks, "channels"), lr, rule)


def tensor_parallel(ranks: int = 0, plan: str = "", lr: float = 0.1, rule: Rule | None = None) -> Grid:
    """Tensor parallelism: pairs of layers, the first by columns and the second by rows, with one sum for both.

    split: hidden units, attention heads, embedding columns. when: once per pair, both ways. who: all workers of a team.
    what: activations and errors, summed. how: any rule, on the worker's own slices.

        forward    Z = g(sigma(f(X) A_p + a_p) B_p) + b      g sums over p, going back it does nothing
        backward   f sums the errors over p, going forward it does nothing

    Equal to SGD on one machine. A and B are the transposed weights of nn.Linear. The bias b is added once. Pairs are
    found in each nn.Sequential and in torch's transformer blocks: layers of one kind with only elementwise ones
    between. nn.MultiheadAttention is divided by heads. Layers without a partner are divided by outputs, which are
    joined. Dropout draws other masks on each worker between the layers of a pair, and the same ones elsewhere. A plan
    says it by module names, for models whose attention has separate projections. A lost worker ends the run.

    Reference: M. Shoeybi et al., Megatron-LM: training multi-billion parameter language models using model parallelism,
        2019, arXiv:1909.08053
    Loops: splits/sliced.py Sliced.gradient; splits/slice_plan.py slice_plan; splits/slice_layers.py SliceLayers;
        splits/slice_exchange.py SliceExchange; strategies/grid.py Grid.step; strategies/allreduce.py AllReduce.step

    Args:
        ranks: P, the workers of a team; 0: all workers form one team.
        plan: which layers, by patterns of module names, "*.q=column *.o=row"; empty: they are found.
        lr: eta, the learning rate.
        rule: how a worker applies its gradient, instead of SGD with lr.
    """
    return _over(Sliced(ranks, plan=plan), lr, rule)


def one_weird_trick(
    scheme: Literal["a", "b", "c"] = "a",
    update: Literal["once", "each"] = "once",
    ranks: int = 0,
    lr: float = 0.1,
    rule: Rule | None = None,
) -> Grid:
    """One weird trick: convolutions data-parallel, fully connected layers model-parallel.

    split: samples before the first linear layer, neurons from there on. when: between the two halves, inside each
    linear layer, and for the convolutions' gradients at the end. who: all workers of a team. what: the
    convolutions' outputs and their errors, activations, gradients of convolutions only. how: any rule.

        each of K workers computes the convolutions on b samples, and 1/K of the neurons for all K b samples
        a   all outputs go to all workers, then the linear layers run once on K b samples
        b   K sub-steps on b samples each, those of one worker after another
        c   K sub-steps on b samples each, of which every worker gives b/K
        update = each   the linear layers move after every sub-step, by the mean over b samples

    With one update a, b and c equal SGD on one machine with K b samples. With an update for each sub-step b and c do
    not: the linear layers then have batches of b, the convolutions of K b. Transfers do not overlap with computing
    here. The model must be an nn.Sequential. BatchNorm before the first linear layer sees b samples, as in bsp. A lost
    worker ends the run.

    Reference: A. Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014, arXiv:1404.5997
    Loops: splits/conv_fc.py ConvFc.gradient; splits/slice_layers.py SliceLayers; splits/owned_parameters.py
        OwnedParameters; strategies/grid.py Grid.step; strategies/allreduce.py AllReduce.step

    Args:
        scheme: how the outputs of the convolutions reach the linear layers: a, b or c.
        update: whether the linear layers are updated once for a mini-batch, or after each sub-step by SGD with lr.
        ranks: K, the workers of a team; 0: all workers form one team, which update = each needs.
        lr: eta, the learning rate.
        rule: how a worker applies its gradient, instead of SGD with lr.
    """
    refuse_unless(update in ("once", "each"), "update", update, "one of once, each")
    each = update == "each"
    refuse_unless(not each or rule is None, "rule", rule, "none: after each sub-step the update is SGD with lr")
    refuse_unless(not each or scheme != "a", "scheme", scheme, "b or c: a has one sub-step, so update must be once")
    return _over(ConvFc(ranks, scheme, lr if each else None), lr, rule)


def mesh(
    pipeline: int = 1,
    tensor: int = 1,
    micro_batches: int = 1,
    schedule: Literal["gpipe", "one-f-one-b", "interleaved", "zero-bubble"] = "one-f-one-b",
    lr: float = 0.1,
    rule: Rule | None = None,
) -> Grid:
    """A device mesh: data x pipeline x tensor parallelism; each stage of each pipeline is a team of slices.

    split: samples, layers and hidden units. when: gradients at the end of a mini-batch, activations per micro-batch,
    sums per layer pair. who: the ranks along one axis of the mesh. what: gradients, activations, errors. how: any rule.

        rank = (d PP + p) TP + t      tensor axis inside, so that its ranks are next to each other
        g = mean over d of the sum over M micro-batches of their shares

    The data axis has what is left: workers / (pipeline x tensor). Equal to SGD on one machine with the mini-batches of
    all pipelines together. Any axis may be 1: (d, 1, 1) is bsp, (1, p, 1) one-f-one-b, (1, 1, t) tensor-parallel. With
    a pipeline the model must be an nn.Sequential if tensor > 1. Other data-parallel methods have the same team by
    `--team 'piped(2, of=sliced(2))'`. A lost worker ends the run.

    Reference: D. Narayanan et al., Efficient large-scale language model training on GPU clusters using Megatron-LM,
        2021, arXiv:2104.04473
    Loops: splits/piped.py Piped.gradient; splits/sliced.py Sliced.gradient; splits/stage_passes.py StagePasses;
        splits/slice_layers.py SliceLayers; strategies/grid.py Grid.step; strategies/allreduce.py AllReduce.step

    Args:
        pipeline: PP, the stages of a pipeline.
        tensor: TP, the ranks that have slices of a stage.
        micro_batches: M, into how many parts a mini-batch is split, if there is a pipeline; it must divide the batch
            size.
        schedule: the order of the passes.
        lr: eta, the learning rate.
        rule: how a rank applies its gradient, instead of SGD with lr.
    """
    for name, ranks in (("pipeline", pipeline), ("tensor", tensor)):
        refuse_unless(ranks >= 1, name, ranks, ">= 1")
    slices = Sliced(tensor) if tensor > 1 else None
    if pipeline == micro_batches == 1:
        return _over(slices or Sliced(1), lr, rule)
    return _over(Piped(pipeline, micro_batches, schedule, of=slices), lr, rule)


def _over(team: Team, lr: float, rule: Rule | None) -> Grid:
    """Data-parallel training, as bsp, of as many teams as there are workers for."""
    return Grid(AllReduce(rule or Sgd(lr)), team)

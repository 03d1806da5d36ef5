"""Work and depth of layers, by the formulas of the literature.

    work W             operations; of products: multiplications, each with its addition
    depth D            operations that depend on each other, if there are as many processors as operations
    W / D              average parallelism: how many processors can be busy

N samples with C_in input channels (or features) and C_out output channels; a convolution has K_y x K_x kernels, its
input H x W pixels and its output H' x W'.

Reference: T. Ben-Nun, T. Hoefler, "Demystifying parallel and distributed deep learning: an in-depth concurrency
analysis", 2019, https://arxiv.org/abs/1802.09941, and the slides on it.

Where we differ: the slides print alpha = m - r + 1 for Winograd, which is 0 for F(2 x 2, 3 x 3); the size of a tile is
alpha = m + r - 1. Depths are given there up to a constant; here each sum of n terms has depth ceil(lg n).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2, prod
from typing import NamedTuple


class WorkDepth(NamedTuple):
    """W and D of a computation."""

    work: float
    depth: int

    @property
    def parallelism(self) -> float:
        """W / D; operations that depend on no other, D = 0, take one step."""
        return self.work / max(self.depth, 1)


class Passes(NamedTuple):
    """The three computations of a layer in a training step."""

    forward: WorkDepth
    to_weights: WorkDepth
    to_input: WorkDepth


class ImageShape(NamedTuple):
    """N samples of C channels with H x W pixels."""

    samples: int
    channels: int
    height: int
    width: int


def lg(n: int) -> int:
    """ceil(lg n), the depth of a sum of n terms."""
    return (n - 1).bit_length()


def fully_connected(samples: int, inputs: int, outputs: int) -> Passes:
    """W = C_out C_in N for each; D = lg C_in forward, lg N to the weights, lg C_out to the input."""
    work = outputs * inputs * samples
    return Passes(WorkDepth(work, lg(inputs)), WorkDepth(work, lg(samples)), WorkDepth(work, lg(outputs)))


def convolution(inputs: int, output: Sequence[int], kernel: Sequence[int], groups: int = 1) -> WorkDepth:
    """The direct method: W = N C_out H' W' C_in K_y K_x, D = lg C_in + lg K_y + lg K_x.

    Args:
        inputs: C_in.
        output: N, C_out, H', W'.
        kernel: K_y, K_x.
        groups: g; each output channel depends on C_in / g input channels.
    """
    seen = inputs // groups
    return WorkDepth(prod(output) * seen * prod(kernel), lg(seen) + sum(map(lg, kernel)))


def im2col(inputs: int, output: Sequence[int], kernel: Sequence[int], groups: int = 1) -> WorkDepth:
    """One product of C_out x (C_in K_y K_x) and (C_in K_y K_x) x (N H' W') matrices: W and D of the direct method."""
    return convolution(inputs, output, kernel, groups)


def fft_convolution(image: ImageShape, outputs: int, per_point: float = 1.0) -> WorkDepth:
    """By Fourier transforms of H x W points, of the kernels too.

    W = c HW lg(HW) (C_out C_in + N C_in + N C_out) + HW N C_in C_out
    D = 2 lg HW + lg C_in

    Args:
        image: the input.
        outputs: C_out.
        per_point: c, the operations of a transform per point and level; the reference leaves it open.
    """
    n, inputs, *sides = image
    points = prod(sides)
    transforms = outputs * inputs + n * inputs + n * outputs
    work = per_point * points * log2(points) * transforms + points * n * inputs * outputs
    return WorkDepth(work, 2 * lg(points) + lg(inputs))


def winograd_convolution(image: ImageShape, outputs: int, tile: int, kernel: int) -> WorkDepth:
    """By minimal filtering, F(m x m, r x r): tiles of m x m outputs for kernels of r x r.

    alpha = m + r - 1,  P = N ceil(H/m) ceil(W/m)
    W = alpha (r^2 + alpha r + 2 alpha^2 + alpha m + m^2) + C_out C_in P
    D = 2 lg r + 4 lg alpha + lg C_in

    W is as printed: it counts each transform once, and of a pair of tiles only one of its alpha^2 multiplications.
    `winograd_products` has all of them, to compare with `convolution`.
    """
    alpha, m, r = tile + kernel - 1, tile, kernel
    transforms = alpha * (r**2 + alpha * r + 2 * alpha**2 + alpha * m + m**2)
    pairs = outputs * image.channels * _tiles(image, tile)
    return WorkDepth(transforms + pairs, 2 * lg(r) + 4 * lg(alpha) + lg(image.channels))


def winograd_products(image: ImageShape, outputs: int, tile: int, kernel: int) -> int:
    """alpha^2 C_out C_in P, the multiplications of all pairs of tiles without the transforms."""
    return (tile + kernel - 1) ** 2 * outputs * image.channels * _tiles(image, tile)


def _tiles(image: ImageShape, tile: int) -> int:
    return image.samples * ceil(image.height / tile) * ceil(image.width / tile)


def pooling(output: Sequence[int], kernel: Sequence[int]) -> WorkDepth:
    """W = N C H' W' K_y K_x, D = lg K_y + lg K_x, for an output of N, C, H', W'."""
    return WorkDepth(prod(output) * prod(kernel), sum(map(lg, kernel)))


def activation(numbers: int) -> WorkDepth:
    """W = N C H W, D = 1: each number by itself."""
    return WorkDepth(numbers, 1)


def batch_norm(samples: int, numbers: int) -> WorkDepth:
    """W = N C H W, D = lg N: the mean and the variance are sums over the samples."""
    return WorkDepth(numbers, lg(samples))


def layer_storage(weights: int, inputs: int, outputs: int) -> int:
    """|w| + |f(o)| + |grad w| + |grad o|: what a layer keeps in a training step, in numbers or in bytes.

    Args:
        weights: |w|, its parameters.
        inputs: |o|, its inputs for all samples; their gradient is as large.
        outputs: |f(o)|, its outputs for all samples.
    """
    return 2 * weights + outputs + inputs

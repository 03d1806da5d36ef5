"""Slices by hand: volumes, parameter counts, the one weird trick, and what torch's DTensor computes."""

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.core.param_cut import keep_slices
from manyhands.core.worker import Worker
from manyhands.splits.conv_fc import ConvFc, halves, sub_steps
from manyhands.splits.sliced import Sliced
from manyhands.tasks import load
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.world import simulate


@torch.no_grad()
def step(made, team, transport):
    """The gradient of the first mini-batch: the loss, the gradients, the numbers that this rank has sent."""
    w = Worker(transport, made, made.build(0), seed=1, steps=1, batch_size=made.batch_size)
    team, index, size = copy.deepcopy(team), transport.rank, transport.size
    w.trained, cuts = team.part(w.model, index, size), team.cuts(w.model, size)
    keep_slices(w.model, cuts, index)
    team.begin(w, transport)
    loss = w.gradient(tuple(field[: made.batch_size] for field in made.data.tensors), origin=(0, 0, 0))
    gradients = {slot.name: w.flat.gradient_of(slot).clone() for slot in w.flat.slots}
    return loss, gradients, transport.bytes_sent // 8


def computed(made, team, size):
    return simulate(Cluster(workers=size), partial(step, made, team)).results


def dense(widths, rows, bias=True):
    """A task of linear layers of these widths."""
    layers = [nn.Sequential(nn.Linear(a, b, bias=bias), nn.Tanh()) for a, b in pairwise(widths)]
    model = nn.Sequential(*layers).double()
    x, y = (torch.randn(rows, n, dtype=torch.float64) for n in (widths[0], widths[-1]))
    return mh.Task(lambda: copy.deepcopy(model), TensorDataset(x, y), mse_loss, batch_size=rows)


@pytest.mark.parametrize("size", [2, 4])
def test_a_layer_of_neurons_sends_a_share_of_its_width_each_way(size):
    """T N (P-1)/P received going forward, as much sent going back, by each rank and layer of width N."""
    T, N, layers = 6, 8, 3
    made = dense([N] * (layers + 1), T)
    for _, _, sent in computed(made, Sliced(kind="neurons"), size):
        forward, backward = layers * T * N * (size - 1) // size, (layers - 1) * T * N * (size - 1) // size
        assert sent == forward + backward


@pytest.mark.parametrize("size", [2, 4])
def test_a_pair_sends_less_than_two_layers_of_neurons(size):
    """With hidden width 4 d: the pair sums d each way; joined neurons are 4 d + d."""
    T, d = 4, 8
    made = dense([d, 4 * d, d, 4 * d, d], T, bias=False)
    pairs = sum(sent for *_, sent in computed(made, Sliced(), size))
    neurons = sum(sent for *_, sent in computed(made, Sliced(kind="neurons"), size))
    assert pairs == (size - 1) * T * d * 2 * (2 + 1)
    assert neurons == (size - 1) * T * d * (2 * 5 + (2 * 5 - 1))


def test_the_parameters_of_alexnet():
    model = load("alexnet").build(0)
    layers = [layer for layer in model if isinstance(layer, nn.Conv2d | nn.Linear)]
    counts = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    assert counts == [34_944, 307_456, 885_120, 663_936, 442_624, 37_752_832, 16_781_312, 4_097_000]
    assert sum(counts) == 60_965_224
    front, back, sliced = halves(model, 8)
    assert sum(p.numel() for p in front.parameters()) == sum(counts[:5])
    assert sum(p.numel() for p in back.parameters()) == sum(counts[5:])
    assert [layer.total for layer in sliced] == [4096, 4096, 1000]
    K, b, F = 8, 128, sliced[0].layer.in_features
    assert K * b * F == 9_437_184, "of 117 million that all-reducing the gradients of the linear layers would take"


def test_one_weird_trick_sends_every_output_of_the_front_once_each_way():
    made, K = maps(), 2
    front, back, _ = halves(made.build(0), K)
    own = sum(p.numel() for p in front.parameters())
    widths = [layer.out_features for layer in back if isinstance(layer, nn.Linear)]
    rows = made.batch_size
    expected = (K - 1) * (2 * own + 2 * rows * 18 + rows * sum(widths) + rows * sum(widths[:-1]))
    for scheme in "abc":
        assert sum(sent for *_, sent in computed(made, ConvFc(scheme=scheme), K)) == expected


def maps():
    torch.manual_seed(3)
    model = nn.Sequential(
        *(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 6), nn.Tanh(), nn.Linear(6, 4))
    ).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 1, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (24,), generator=generator)
    return mh.Task(lambda: copy.deepcopy(model), TensorDataset(x, y), cross_entropy, batch_size=8)


@pytest.mark.parametrize("scheme", ["b", "c"])
def test_an_update_after_each_sub_step_is_another_method(scheme):
    """The linear layers see mini-batches of b samples, the convolutions one of K b."""
    made, K, lr, steps = maps(), 2, 0.5, 3
    found = mh.train(made, mh.one_weird_trick(scheme, "each", lr=lr), cluster=mh.Cluster(workers=K), steps=steps)
    plain = mh.train(made, mh.bsp(lr=lr), cluster=mh.Cluster(workers=1), steps=steps)
    drawn = []
    mh.train(noting(made, drawn), mh.bsp(lr=lr), cluster=mh.Cluster(workers=1), steps=steps)
    model = made.build(0)
    front, back, _ = halves(model, K)
    for x, y in [pair for pair in drawn if len(pair) == 2 and len(pair[0]) == 8]:
        out = front(x)
        leaf = out.detach().requires_grad_()
        for rows in sub_steps(scheme, [slice(0, 4), slice(4, 8)]):
            chosen = [number for one in rows for number in range(one.start, one.stop)]
            back.zero_grad()
            (cross_entropy(back(leaf[chosen]), y[chosen]) * len(chosen) / 8).backward()
            with torch.no_grad():
                for p in back.parameters():
                    p -= lr * p.grad * 8 / len(chosen)
        front.zero_grad()
        out.backward(leaf.grad)
        with torch.no_grad():
            for p in front.parameters():
                p -= lr * p.grad
    for name, p in model.named_parameters():
        assert torch.allclose(found.weights[name], p, rtol=0, atol=1e-12)
    assert max(float((found.weights[name] - plain.weights[name]).abs().max()) for name in found.weights) > 1e-3


def noting(made, drawn):
    """The same task, whose loss notes what was drawn."""

    class Noting(nn.Sequential):
        def forward(self, x):
            drawn.append([x.detach().clone()])
            return super().forward(x)

    def loss(out, y):
        drawn[-1].append(y.clone())
        return cross_entropy(out, y)

    return mh.Task(lambda: Noting(*made.build(0)), made.data, loss, batch_size=made.batch_size)


DTENSOR_LOSS = 2.516219916141232
DTENSOR = {
    "0.weight": [
        -0.09653270441427311,
        -0.09946801379119383,
        -0.09801102725374966,
        -0.09222608222833316,
        -0.05793651537049289,
        -0.057255402955469804,
        -0.0540460137317377,
        -0.048450067500846024,
        0.1855326398451543,
        0.20014441534125685,
        0.20591823917551394,
        0.20259915156868738,
        0.6128938100918803,
        0.6489926585939542,
        0.6564333717402843,
        0.6348873834651886,
        0.9084296624291504,
        0.9580617161292669,
        0.9653878023019961,
        0.9300844165649912,
        0.9876205417451763,
        1.0401584050519646,
        1.0467650856733048,
        1.0071488466457788,
    ],
    "0.bias": [
        -0.051416094501854546,
        0.06193657692331748,
        0.46943791480345476,
        1.1210011786950094,
        1.5931256510585579,
        1.7560671442936817,
    ],
    "2.weight": [
        0.12916581762650786,
        0.15106766954889903,
        0.0968008422041425,
        -0.15414825701995916,
        -0.5665543011876321,
        -0.9545870018270214,
        -0.03409406269228108,
        -0.042464133287971904,
        -0.028418348465441716,
        0.046098155396781526,
        0.17075887609780377,
        0.288343201990962,
        -0.18105967180252774,
        -0.21570143175101955,
        -0.14005581139040005,
        0.22431328767456876,
        0.8264627871741579,
        1.3934681117674133,
    ],
    "2.bias": [-1.0078054890783583, 0.2733044849204776, 1.4237964847576876],
}
"""What `parallelize_module` with ColwiseParallel and RowwiseParallel computes on two gloo processes (torch 2.13)."""


def test_a_pair_computes_what_dtensor_does():
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for number, p in enumerate(model.parameters(), start=1):
            p.copy_(torch.linspace(-1, 1, p.numel(), dtype=torch.float64).view(p.shape).sin() * number / 3)
    x = torch.linspace(-2, 2, 20, dtype=torch.float64).view(5, 4).cos()
    data = TensorDataset(x, torch.zeros(5, 3, dtype=torch.float64))
    made = mh.Task(lambda: copy.deepcopy(model), data, mse_loss, batch_size=5)
    found, cuts = computed(made, Sliced(plan="0=column 2=row"), 2), Sliced(plan="0=column 2=row").cuts(model, 2)
    assert cuts.keys() == {"0.weight", "0.bias", "2.weight"}
    for index, (loss, gradients, _) in enumerate(found):
        assert loss == pytest.approx(DTENSOR_LOSS, abs=1e-14)
        for name, gradient in gradients.items():
            whole = torch.tensor(DTENSOR[name], dtype=torch.float64).view(model.get_parameter(name).shape)
            expected = cuts[name].take(whole, index) if name in cuts else whole
            assert torch.allclose(gradient, expected, rtol=0, atol=1e-13)

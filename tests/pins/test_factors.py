"""Card 4.9, sufficient factors: the pinned costs, it is bsp, and its bytes are those of the closed forms."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from toys import probed

import manyhands as mh
from manyhands.collectives.cost import factors_pay, layer_elements
from manyhands.core.flat import Flat
from manyhands.core.vector_ops import UNCHARGED
from manyhands.rules import Adam, Momentum, Sgd
from manyhands.splits.data import Share
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.factors import Factors
from manyhands.strategies.factors.linear_layer import find_layers
from manyhands.tasks import load

FC6 = 4096, 25088


def train(strategy, task, workers=3, steps=6, **where):
    return mh.train(task, strategy, cluster=mh.Cluster(workers=workers, **where), steps=steps, seed=1)


def assert_close(one, other):
    assert one.weights.keys() == other.weights.keys()
    for name, w in one.weights.items():
        torch.testing.assert_close(w, other.weights[name], rtol=0, atol=1e-12)


# -- costs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("K", "elements"), [(32, 13_074_432), (256, 104_595_456)])
def test_the_factors_of_fc6_are_smaller(K, elements):
    assert layer_elements("factors", *FC6, K=K, P=8) == elements
    assert layer_elements("server beside it", *FC6, K=K, P=8, S=8) == 359_661_568
    assert factors_pay(*FC6, K=K, P=8)


def test_other_ways_for_fc6():
    assert layer_elements("server", *FC6, K=32, P=8) == 205_520_896
    assert layer_elements("adam", *FC6, K=32, P=8) == 103_694_336
    assert layer_elements("adam, the server", *FC6, K=32, P=8) == 8 * 103_694_336
    assert layer_elements("factors", *FC6, K=32, P=2) == 1_867_776


def test_a_server_beside_each_worker_has_what_a_dense_sum_has():
    """4 w (N - 1) / N, whatever the layer."""
    assert layer_elements("server beside it", 6, 10, K=1, P=4, S=4) == 4 * 60 * 3 / 4


@pytest.mark.parametrize(("K", "pays"), [(1, True), (2, True), (3, False), (float("inf"), False)])
def test_factors_pay_up_to_two_m_n_by_p(K, pays):
    """With M = N = 4 and P = 2: 8 K <= 16."""
    assert factors_pay(4, 4, K=K, P=2) is pays


@pytest.mark.parametrize("setting", [{"P": 0}, {"S": 0}, {"how": "by mail"}], ids=str)
def test_what_cannot_be_counted_is_refused(setting):
    with pytest.raises(mh.Refused, match="but must be"):
        layer_elements(**{"how": "factors", "M": 4, "N": 4, "K": 1, "P": 2, "S": 1} | setting)


# -- it is bsp ----------------------------------------------------------------------------------------


def test_the_product_of_all_factors_is_the_sum_of_all_gradients():
    draw = torch.Generator().manual_seed(0)
    model = nn.Linear(7, 5, dtype=torch.float64)
    flat = Flat(dict(model.named_parameters()))
    (layer,) = find_layers(model, flat)
    hook, pairs, total = layer.watch(), [], torch.zeros(5, 7, dtype=torch.float64)
    for _ in range(3):
        layer.open()
        flat.open()
        model(torch.randn(4, 7, generator=draw, dtype=torch.float64)).pow(3).sum().backward()
        flat.close()
        total += flat.gradient_of(layer.weight)
        pairs.append(layer.take(UNCHARGED, flat, samples=4))
    layer.rebuild(UNCHARGED, flat, *(torch.cat(column) for column in zip(*pairs, strict=True)))
    torch.testing.assert_close(flat.gradient_of(layer.weight), total, rtol=0, atol=1e-12)
    hook.remove()


@pytest.mark.parametrize("where", [{}, {"hosts": 1}, {"jitter": 0.5}], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_the_result_is_that_of_bsp(digits64, workers, where):
    assert_close(*(train(one, digits64, workers, **where) for one in (Factors(Sgd(0.1)), AllReduce(Sgd(0.1)))))


@pytest.mark.parametrize("rule", [Momentum(0.1, weight_decay=0.01), Adam(0.01)], ids=str)
def test_whatever_the_rule(digits64, rule):
    assert_close(*(train(one, digits64) for one in (Factors(rule), AllReduce(rule))))


@pytest.mark.parametrize("collective", ["ring", "tree", "butterfly", "rabenseifner", "native"])
def test_whatever_sums_the_rest(digits64, collective):
    assert_close(*(train(one, digits64) for one in (Factors(Sgd(0.1), collective), AllReduce(Sgd(0.1)))))


def test_it_equals_one_process_with_the_union_of_the_batches(digits64, plain_sgd):
    shares = [Share(digits64.data, rank, 3, 32, seed=1) for rank in range(3)]
    unions = []
    for _ in range(6):
        batches = [share.next_batch() for share in shares]
        unions.append(tuple(torch.cat(fields) for fields in zip(*batches, strict=True)))
    reference = plain_sgd(digits64, unions, lr=0.1, seed=1)
    result = train(Factors(Sgd(0.1)), digits64)
    for name, w in reference.items():
        torch.testing.assert_close(result.weights[name], w.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("where", [{}, {"hosts": 1}], ids=str)
def test_all_replicas_end_with_the_same_bits(where):
    ends = {}
    strategy = probed(Factors(Sgd(0.1)), finish=lambda s, w: ends.setdefault(w.rank, w.flat.groups[0].weights.clone()))
    train(strategy, load("digits"), workers=3, **where)
    assert len(ends) == 3
    assert all(torch.equal(ends[0], end) for end in ends.values())


def test_one_worker_sends_nothing_and_is_plain_to_the_last_bit(digits64):
    factors, bsp = (train(one, digits64, workers=1) for one in (Factors(Sgd(0.1)), AllReduce(Sgd(0.1))))
    assert factors.weights_sha256 == bsp.weights_sha256
    assert factors.bytes_sent == 0


# -- bytes --------------------------------------------------------------------------------------------


def layer(M, N, K, bias=False):
    """One linear layer with K rows on every worker."""
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8 * K, size, generator=draw, dtype=torch.float64) for size in (N, M))
    return mh.Task(
        lambda: nn.Linear(N, M, bias=bias, dtype=torch.float64), TensorDataset(x, y), nn.functional.mse_loss, K
    )


def bytes_of_a_step(strategy, task, workers):
    """What goes in and out of a worker in one step, on average: the last of four."""
    three, four = (train(strategy, task, workers, steps=steps).bytes_sent for steps in (3, 4))
    return 2 * (four - three) / workers


@pytest.mark.parametrize("P", [2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_measured_bytes_are_those_of_the_closed_form(P, bias):
    """And a mark for each parameter, which is summed; a bias costs nothing else."""
    marks = 4 * (P - 1) / P * (1 + bias)
    measured = bytes_of_a_step(Factors(Sgd(0.1), "ring"), layer(30, 50, 3, bias), P)
    assert measured == 8 * (layer_elements("factors", 30, 50, K=3, P=P) + marks)


def chosen(result):
    """What the record says, rank by rank: rows by layer for factors, for the collective, and who has no factors."""
    lines = [line for line in result.records if "by_factors" in line]
    keys = "by_factors", "by_all_reduce", "without_factors"
    return [tuple(line[key] for key in keys) for line in sorted(lines, key=lambda line: (line["step"], line["rank"]))]


def test_one_row_too_many_and_the_sum_is_dense():
    factors, dense = (train(Factors(Sgd(0.1)), layer(4, 4, K), workers=2) for K in (2, 3))
    assert chosen(factors) == [({"weight": 2}, {}, [])] * 2
    assert chosen(dense) == [({}, {"weight": 3}, [])] * 2
    task = layer(4, 4, 3)
    assert bytes_of_a_step(Factors(Sgd(0.1)), task, 2) == bytes_of_a_step(AllReduce(Sgd(0.1)), task, 2)


@pytest.mark.parametrize("P", [2, 4])
def test_on_the_sizes_of_vgg16_three_layers_go_by_factors(P):
    """The rest: what is convolution, a mark per parameter, and, as doubles and once, the rows of three layers."""
    result = train(Factors(Sgd(0.1), "ring"), load("vgg16"), workers=P, steps=1)
    by_factors, by_all_reduce, without = chosen(result)[0]
    assert (set(by_factors.values()), by_all_reduce, without) == ({32}, {}, [])
    factors = 32 * (4096 + 25088 + 4096 + 4096 + 1000 + 4096)
    rest = 138_357_544 - (4096 * 25089 + 4096 * 4097 + 1000 * 4097) + 32
    assert result.bytes_sent == 4 * (P * (P - 1) * factors + 2 * (P - 1) * rest) + 8 * 2 * (P - 1) * 3 * P

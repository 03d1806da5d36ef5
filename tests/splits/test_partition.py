"""PipeDream's partitioner against pinned costs and against all possible partitions."""

import random
from itertools import combinations, pairwise, product

import pytest

import manyhands as mh
from manyhands.splits.partition import partition

COMPUTE, ACTIVATIONS, PARAMETERS, BANDWIDTH = [4, 4, 2, 2], [8, 4, 1, 1], [1, 1, 10, 20], 4.0


@pytest.mark.parametrize(
    ("machines", "cost", "stages"),
    [
        (1, 12.0, [(0, 3, 1)]),
        (2, 8.0, [(0, 3, 2)]),
        (3, 4.0, [(0, 1, 2), (2, 3, 1)]),
    ],
)
def test_pinned_partitions(machines, cost, stages):
    assert partition(COMPUTE, ACTIVATIONS, PARAMETERS, BANDWIDTH, machines) == (cost, stages)


def test_a_fourth_machine_does_not_help():
    cost, stages = partition(COMPUTE, ACTIVATIONS, PARAMETERS, BANDWIDTH, 4)
    assert cost == 4.0
    assert sum(stage.replicas for stage in stages) == 4


def test_convolutions_are_replicated_and_fully_connected_layers_are_not():
    cost, stages = partition([10, 10, 10, 1], [50, 20, 2, 1], [1, 2, 3, 120], 10.0, 4)
    assert (cost, stages) == (10.0, [(0, 2, 3), (3, 3, 1)])


def seconds(stages, compute, activations, parameters, bandwidth):
    """Of the slowest stage or link, by the definition."""
    found = [2 * activations[last] / bandwidth for _, last, _ in stages[:-1]]
    for first, last, replicas in stages:
        shared = 2 * (replicas - 1) * sum(parameters[first : last + 1]) / bandwidth
        found.append(max(sum(compute[first : last + 1]), shared) / replicas)
    return max(found)


def all_partitions(layers, machines):
    for count in range(1, min(layers, machines) + 1):
        for cuts in combinations(range(1, layers), count - 1):
            for replicas in product(range(1, machines + 1), repeat=count):
                if sum(replicas) == machines:
                    spans = pairwise([0, *cuts, layers])
                    yield [(first, stop - 1, r) for (first, stop), r in zip(spans, replicas, strict=True)]


@pytest.mark.parametrize("case", range(100))
def test_no_other_partition_is_faster(case):
    draw = random.Random(case)
    layers, machines = draw.randint(2, 5), draw.randint(1, 4)
    costs = [[draw.randint(1, top) for _ in range(layers)] for top in (9, 9, 30)]
    bandwidth = draw.choice([1.0, 4.0, 16.0])
    cost, stages = partition(*costs, bandwidth, machines)
    assert cost == pytest.approx(seconds(stages, *costs, bandwidth), rel=1e-12)
    assert cost == pytest.approx(min(seconds(one, *costs, bandwidth) for one in all_partitions(layers, machines)))
    assert [stage.first for stage in stages] == [0, *(stage.last + 1 for stage in stages[:-1])]
    assert (stages[-1].last, sum(stage.replicas for stage in stages)) == (layers - 1, machines)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (([], [], [], 1.0, 1), "the number of layers is 0, but must be >= 1"),
        (([1], [1, 2], [1], 1.0, 1), "the number of activations is 2, but must be 1, one for each layer"),
        (([1], [1], [], 1.0, 1), "the number of parameters is 0, but must be 1, one for each layer"),
        (([1], [1], [1], 0.0, 1), "bandwidth is 0.0, but must be > 0"),
        (([1], [1], [1], 1.0, 0), "machines is 0, but must be >= 1"),
    ],
)
def test_what_cannot_be_divided_is_refused(settings, why):
    with pytest.raises(mh.Refused, match=why):
        partition(*settings)

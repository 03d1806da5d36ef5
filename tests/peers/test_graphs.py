"""Peer graphs are symmetric, connected and as drawn; mixing weights are those of Metropolis and Hastings."""

from __future__ import annotations

import pytest
import torch

from manyhands.core.errors import Refused
from manyhands.peers import mixing, neighbours, sides
from manyhands.peers.graphs import GRAPHS, rows

every_graph = pytest.mark.parametrize("graph", GRAPHS)
every_size = pytest.mark.parametrize("P", [*range(1, 14), 16, 24, 49])


@every_size
@every_graph
def test_symmetric_in_order_and_without_loops(graph, P):
    of = [neighbours(graph, rank, P) for rank in range(P)]
    for rank, others in enumerate(of):
        assert others == sorted(set(others) - {rank})
        assert all(rank in of[other] for other in others)


@every_size
@every_graph
def test_connected(graph, P):
    assert walk(0, [neighbours(graph, rank, P) for rank in range(P)]) == set(range(P))


def walk(start, of):
    """The ranks that can be reached."""
    reached, new = set(), {start}
    while new:
        reached |= new
        new = {other for rank in new for other in of[rank]} - reached
    return reached


@every_graph
def test_one_rank_has_no_neighbour_and_two_have_one(graph):
    assert neighbours(graph, 0, 1) == []
    assert [neighbours(graph, rank, 2) for rank in (0, 1)] == [[1], [0]]


def test_the_pictures():
    assert [neighbours("ring", rank, 6) for rank in (0, 3)] == [[1, 5], [2, 4]]
    assert neighbours("exponential", 0, 8) == [1, 2, 4, 6, 7]
    assert neighbours("complete", 2, 5) == [0, 1, 3, 4]
    assert neighbours("torus", 0, 12) == [1, 3, 4, 8]
    assert neighbours("torus", 6, 12) == [2, 5, 7, 10]
    assert neighbours("torus", 11, 12) == [3, 7, 8, 10]


def test_a_torus_is_as_square_as_it_can_be():
    assert [rows(P) for P in (1, 2, 4, 6, 7, 9, 12, 16, 24)] == [1, 1, 2, 2, 1, 3, 3, 4, 4]
    assert neighbours("torus", 2, 7) == neighbours("ring", 2, 7)


@every_size
@pytest.mark.parametrize("graph", [graph for graph in GRAPHS if graph != "random"])
def test_two_sides_separate_all_neighbours_or_are_refused(graph, P):
    columns = P // rows(P)
    even = {
        "ring": P <= 2 or P % 2 == 0,
        "torus": all(n <= 2 or n % 2 == 0 for n in (rows(P), columns)),
        "exponential": P <= 2,
        "complete": P <= 2,
    }
    if not even[graph]:
        with pytest.raises(Refused, match=f"a {graph} of {P} ranks is not bipartite"):
            sides(graph, P)
        return
    first, second = sides(graph, P)
    assert sorted(first + second) == list(range(P)) and 0 in first
    for side, other in ((first, second), (second, first)):
        assert all(set(neighbours(graph, rank, P)) <= set(other) for rank in side)


# -- random graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@every_size
def test_a_random_graph_is_two_rings(seed, P):
    of = [neighbours("random", rank, P, seed) for rank in range(P)]
    assert all(min(P - 1, 2) <= len(others) <= min(P - 1, 4) for others in of)
    assert all(rank in of[other] for rank, others in enumerate(of) for other in others)
    assert walk(0, of) == set(range(P))


def test_the_seed_alone_makes_a_random_graph():
    def graph(seed):
        return tuple(tuple(neighbours("random", rank, 16, seed)) for rank in range(16))

    assert graph(3) == graph(3)
    assert len({graph(seed) for seed in range(20)}) == 20


# -- mixing weights -----------------------------------------------------------------------------------


def matrix(graph, P, seed=0):
    rows = [mixing(graph, rank, P, seed) for rank in range(P)]
    return torch.tensor([[row.get(rank, 0.0) for rank in range(P)] for row in rows], dtype=torch.float64)


@pytest.mark.parametrize("P", range(1, 18))
@every_graph
def test_mixing_weights_are_symmetric_and_sum_to_one(graph, P):
    for seed in range(5) if graph == "random" else (0,):
        W = matrix(graph, P, seed)
        assert torch.equal(W, W.T)
        assert torch.allclose(W.sum(0), torch.ones(P, dtype=W.dtype), rtol=0, atol=1e-15)
        assert torch.allclose(W.sum(1), torch.ones(P, dtype=W.dtype), rtol=0, atol=1e-15)
        for rank in range(P):
            others = neighbours(graph, rank, P, seed)
            assert sorted(mixing(graph, rank, P, seed)) == sorted([rank, *others])
            assert bool((W[rank] >= 0).all()) and W[rank, rank] > 0


@pytest.mark.parametrize("P", range(2, 18))
@every_graph
def test_repeated_mixing_ends_in_the_mean(graph, P):
    """The second largest eigenvalue is below one, and the smallest above minus one."""
    values = torch.linalg.eigvalsh(matrix(graph, P))
    assert values[-1].item() == pytest.approx(1, abs=1e-12)
    assert values[-2] < 1 - 1e-3 and values[0] > -1 + 1e-3


def test_the_weights_of_the_literature():
    third, fifth = pytest.approx(1 / 3, abs=1e-15), pytest.approx(1 / 5, abs=1e-15)
    assert mixing("ring", 0, 4) == {0: third, 1: third, 3: third}
    assert mixing("torus", 6, 12) == {2: fifth, 5: fifth, 6: fifth, 7: fifth, 10: fifth}
    assert mixing("complete", 2, 5) == dict.fromkeys(range(5), 1 / 5)
    assert set(mixing("exponential", 0, 8).values()) == {1 / 6}
    assert mixing("ring", 0, 1) == {0: 1.0} and mixing("ring", 1, 2) == {0: 0.5, 1: 0.5}


def test_unequal_numbers_of_neighbours_weigh_as_metropolis_and_hastings_say():
    """Rank 3 has two neighbours; the others have three, so a link between them weighs a quarter."""
    assert [neighbours("random", rank, 5, 1) for rank in range(5)] == [
        [1, 2, 4],
        [0, 2, 4],
        [0, 1, 3],
        [2, 4],
        [0, 1, 3],
    ]
    assert mixing("random", 3, 5, 1) == {2: 0.25, 3: 0.5, 4: 0.25}
    assert mixing("random", 0, 5, 1) == {0: 0.25, 1: 0.25, 2: 0.25, 4: 0.25}


def test_what_cannot_work_is_refused():
    with pytest.raises(Refused, match="ring, complete, exponential, torus, random"):
        neighbours("star", 0, 4)
    with pytest.raises(Refused, match="rank is 4, but must be 0 to 3"):
        neighbours("ring", 4, 4)
    with pytest.raises(Refused, match="graph is star"):
        sides("star", 4)

"""Graphs of peers: symmetric, connected, and drawn as they are."""

from __future__ import annotations

import pytest

from manyhands.core.errors import Refused
from manyhands.topology.peers import neighbours, sides
from manyhands.topology.peers.graphs import GRAPHS, rows

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
    reached, new = set(), {0}
    while new:
        reached |= new
        new = {other for rank in new for other in neighbours(graph, rank, P)} - reached
    assert reached == set(range(P))


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
@every_graph
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


def test_what_cannot_work_is_refused():
    with pytest.raises(Refused, match="ring, complete, exponential, torus"):
        neighbours("star", 0, 4)
    with pytest.raises(Refused, match="rank is 4, but must be 0 to 3"):
        neighbours("ring", 4, 4)
    with pytest.raises(Refused, match="graph is star"):
        sides("star", 4)

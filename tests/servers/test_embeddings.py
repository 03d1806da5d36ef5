"""Embedding tables: how rows are cut over servers, and how a server averages their gradients."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from manyhands.core.vector_ops import UNCHARGED
from manyhands.servers.embeddings import EmbeddingTable, find_tables
from manyhands.servers.embeddings.server import _mean


@pytest.mark.parametrize(
    ("rows", "server_ranks", "bounds"), [(10, 3, [0, 3, 6, 10]), (2, 4, [0, 0, 1, 1, 2]), (5, 1, [0, 5])]
)
def test_rows_are_cut_evenly_and_never_inside(rows, server_ranks, bounds):
    table = EmbeddingTable("table", nn.Embedding(rows, 3, sparse=True), server_ranks)
    assert table.bounds.tolist() == bounds
    spans = [table.span(k) for k in range(server_ranks)]
    assert [(span.start // 3, span.stop // 3) for span in spans] == [*pairwise(bounds)]
    assert all(span.start % 3 == span.stop % 3 == 0 for span in spans)


def test_every_row_goes_to_the_server_that_has_it():
    table = EmbeddingTable("table", nn.Embedding(10, 1, sparse=True), 4)
    rows = torch.tensor([1, 2, 4, 7, 9])
    cuts = {k: rows[cut].tolist() for k, cut in table.cuts(rows)}
    assert table.bounds.tolist() == [0, 2, 5, 7, 10]
    assert cuts == {0: [1], 1: [2, 4], 3: [7, 9]}


def test_the_mean_counts_workers_and_not_those_who_touched_a_row():
    touched = [
        (torch.tensor([0, 3]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
        (torch.tensor([3, 7]), torch.tensor([[10.0, 20.0], [30.0, 40.0]])),
    ]
    mean = _mean(UNCHARGED, touched, workers=4)
    assert mean.indices().tolist() == [[0, 3, 7]]
    assert mean.values().tolist() == [[0.25, 0.5], [3.25, 6.0], [7.5, 10.0]]


def test_a_table_turns_dense_with_the_gradient_it_has():
    from manyhands.rules import Sgd

    module = nn.Embedding(4, 2, sparse=True)
    table = EmbeddingTable("table", module, 2)
    table.flat.open()
    module(torch.tensor([1, 3, 1])).sum().backward()
    table.flat.close()
    rows, values = table.gradient()
    assert rows.tolist() == [1, 3] and values.tolist() == [[2, 2], [1, 1]]
    table.flat.groups[0].grad.fill_(7)
    table.make_dense(UNCHARGED, Sgd(0.1))
    assert table.flat.groups[0].outgoing.tolist() == [0, 0, 2, 2, 0, 0, 1, 1, 1]
    table.flat.open()
    module(torch.tensor([2])).sum().backward()
    table.flat.close()
    assert table.flat.groups[0].outgoing.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 1]


def test_only_trained_embeddings_with_sparse_gradients_are_tables():
    model = nn.ModuleDict(
        {
            "sparse": nn.Embedding(3, 2, sparse=True),
            "bag": nn.EmbeddingBag(3, 2, sparse=True),
            "dense": nn.Embedding(3, 2),
            "frozen": nn.Embedding(3, 2, sparse=True).requires_grad_(False),
            "layer": nn.Linear(2, 2),
        }
    )
    model["again"] = model["sparse"]
    assert list(find_tables(model)) == ["sparse.weight", "bag.weight"]

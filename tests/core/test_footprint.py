"""What a rank keeps: each piece of memory once, wherever it is held, and nothing that is not its own."""

import torch
from torch import nn

import manyhands as mh
from manyhands.codecs import Feedback, TopK
from manyhands.core.footprint import footprint
from manyhands.report.reading import of_lines


def held(method, workers=2, **run):
    result = mh.train("digits", method, cluster=mh.Cluster(workers=workers, **run), steps=3)
    return of_lines(result.records).held


def test_views_of_one_memory_count_once():
    x = torch.zeros(100)
    assert footprint([x, x[10:20], {"again": x.view(10, 10)}], (x,)) == 400


def test_models_and_gradients_count():
    layer = nn.Linear(3, 2)
    layer.weight.grad = torch.zeros(2, 3)
    assert footprint(layer) == 4 * (6 + 2 + 6)


def test_numbers_without_memory_count_as_if_they_had_it():
    assert footprint(torch.empty(1000, device="meta")) == 4000


def test_of_sparse_numbers_places_and_values_count():
    assert footprint(torch.sparse_coo_tensor([[0, 5]], [1.0, 2.0], (1000,), check_invariants=True)) == 2 * 8 + 2 * 4


def test_rules_and_codecs_that_remember_take_more():
    parameters = sum(p.numel() for p in mh.train("digits", mh.bsp(), steps=1).weights.values())
    plain = held(mh.bsp())[0]
    assert plain >= 2 * 4 * parameters, "weights and gradient"
    momentum = held(mh.bsp(rule=mh.rules.Momentum(0.1)))[0]
    assert momentum - plain == 4 * parameters
    remembers = held(mh.bsp(codec=Feedback(TopK(0.1))))[0]
    assert remembers - plain > 0.9 * 4 * parameters


def test_a_stage_of_a_pipeline_holds_its_own_part():
    whole = held(mh.bsp(), workers=4)[0]
    assert all(part < whole for part in held(mh.gpipe(), workers=4).values())

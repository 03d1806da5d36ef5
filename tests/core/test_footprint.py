"""The bytes a rank keeps: each storage once, however many tensors share it, and nothing of other ranks."""

import re

import torch
from torch import nn

import manyhands as mh
from manyhands.codecs import Feedback, TopK
from manyhands.core.footprint import footprint
from manyhands.report.reading import of_lines


def footprints(method, workers=2, **run):
    result = mh.train("digits", method, cluster=mh.Cluster(workers=workers, **run), steps=3)
    return of_lines(result.records).memory


def test_views_of_one_memory_count_once():
    x = torch.zeros(100)
    assert footprint([x, x[10:20], {"again": x.view(10, 10)}], (x,)) == 400


def test_models_and_gradients_count():
    layer = nn.Linear(3, 2)
    layer.weight.grad = torch.zeros(2, 3)
    assert footprint(layer) == 4 * (6 + 2 + 6)


def test_meta_tensors_count_as_if_they_were_allocated():
    assert footprint(torch.empty(1000, device="meta")) == 4000


def test_indices_and_values_of_sparse_tensors_count():
    assert footprint(torch.sparse_coo_tensor([[0, 5]], [1.0, 2.0], (1000,), check_invariants=True)) == 2 * 8 + 2 * 4


def test_rules_and_codecs_with_state_take_more():
    parameters = sum(p.numel() for p in mh.train("digits", mh.bsp(), steps=1).weights.values())
    plain = footprints(mh.bsp())[0]
    assert plain >= 2 * 4 * parameters, "weights and gradient"
    momentum = footprints(mh.bsp(rule=mh.rules.Momentum(0.1)))[0]
    assert momentum - plain == 4 * parameters
    with_memory = footprints(mh.bsp(codec=Feedback(TopK(0.1))))[0]
    assert with_memory - plain > 0.9 * 4 * parameters


def test_a_stage_of_a_pipeline_keeps_its_own_part():
    whole = footprints(mh.bsp(), workers=4)[0]
    assert all(stage < whole for stage in footprints(mh.gpipe(), workers=4).values())


def test_the_record_says_what_the_memory_of_a_rank_is_for():
    def lines(method):
        return mh.train("digits", method, cluster=mh.Cluster(workers=4), steps=16).memory

    momentum = mh.rules.Momentum(0.1)
    for method in (mh.bsp(rule=momentum), mh.gpipe(rule=momentum), mh.pipedream(rule=momentum)):
        for line in lines(method):
            weights, parameters = line["weights"], line["gradient"] - line["weights"]
            assert line["optimizer"] == weights and 0 < parameters <= 4 * 8, "and a touch count for each"
            assert line["bytes"] >= 3 * weights
    copies = lines(mh.weight_copies(rule=momentum))
    assert all(line["optimizer"] == line["version_bytes"] == 7 * line["weights"] for line in copies), "one of each"
    assert all(line["bytes"] - 16 * line["weights"] < 100 for line in copies), "and the live weights, the gradient"
    assert [line["versions"] for line in copies] == [7] * 4
    result = mh.train("digits", mh.pipedream(), cluster=mh.Cluster(workers=4), steps=16)
    stashed = result.memory
    assert [line["held"] for line in stashed] == list(range(4))
    assert re.search(
        r"132 kB of a rank, in flight 198 kB of other versions of the weights and 147 kB", result._repr_html_()
    )
    assert [line["version_bytes"] // line["weights"] for line in stashed] == [4, 3, 2, 0], "the live weights are apart"
    assert all(line["activations"] > 0 for line in [*copies, *stashed])


def test_the_record_has_the_activations_of_a_pipeline_and_unknown_for_other_methods():
    def activations(method):
        records = mh.train("digits", method, cluster=mh.Cluster(workers=2), steps=2).records
        return [line["activations"] for line in records if line["kind"] == "memory"]

    inputs, graphs = activations(mh.gpipe()), activations(mh.gpipe(replay=False))
    assert all(0 < few < many for few, many in zip(inputs, graphs, strict=True))
    assert activations(mh.bsp()) == [None, None]

"""Both sides of the tensor benchmark train the same network on the same samples; its lines say what was measured."""

from itertools import islice

import pytest
import tensor
import torch
from torch import nn

from manyhands.core.task import Task
from manyhands.cost.layers import model_cost
from manyhands.cost.placement import placement


def numel(modules):
    return sum(p.numel() for module in modules for p in module.parameters())


def test_networks_have_the_sizes_they_are_said_to_have():
    layers = list(tensor.alexnet_like())
    assert numel(one for one in layers if isinstance(one, nn.Conv2d)) == 2_432 + 51_264
    assert numel(one for one in layers if isinstance(one, nn.Linear)) == 12_607_498
    assert numel([tensor.pairs(512)]) == 2 * tensor.PAIRS * (512 + 1) * 512


def test_ranks_of_tensor_parallel_see_the_same_rows_and_begin_again():
    walked, again = (list(islice(tensor.same_batches((5,), 4, 3), tensor.BATCHES + 1)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(walked[3], again[3], strict=True))
    assert walked[0][0].shape == (4, 5) and walked[tensor.BATCHES][0] is walked[0][0]


def test_a_team_has_the_samples_of_all_workers_of_bsp():
    team = next(tensor.of_rank("one-weird-trick", 1))
    parts = [next(tensor.of_rank("bsp", rank)) for rank in range(tensor.RANKS)]
    for whole, fields in zip(team, zip(*parts, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(fields))


def test_the_cheapest_plan_of_that_network_is_one_weird_trick():
    task = Task(tensor.alexnet_like, tensor.images(), nn.functional.cross_entropy, batch_size=tensor.SAMPLES)
    found = placement(model_cost(task), tensor.RANKS)
    assert [layer.way for layer in found.layers] == ["data", "data", "out", "out", "in"]
    assert found.cheapest < 0.06 * found.data


def test_every_case_is_ours_over_torch(monkeypatch):
    asked = []

    def measured(title, sides, steps, rounds=30):
        asked.append((title, [side.name for side in sides], [side.words for side in sides]))
        return {side.name: [2.0 if side.name in ("ours", "one-weird-trick") else 4.0] * 3 for side in sides}

    monkeypatch.setattr(tensor, "measure", measured)
    found = [*(tensor.tensor(case) for case in tensor.CASES), tensor.sharded()]
    assert [(one["name"], one["value"], one["goal"]) for one in found] == [
        ("tensor-over-torch", 0.5, "<= 0.80"),
        ("tensor-large-over-torch", 0.5, "<= 0.97"),
        ("sharded-over-fsdp2", 0.5, "<= 0.80"),
    ]
    assert asked[1] == ("tensor-large", ["torch", "ours"], [("1024", "256")] * 2)


def test_memory_is_counted_without_that_of_a_model_without_a_size(monkeypatch):
    peaks = {("bsp", 1024): 500e6, ("bsp", 8): 100e6, ("sharded", 1024): 300e6, ("sharded", 8): 100e6}
    monkeypatch.setattr(tensor, "peak", lambda name, width: peaks[name, width])
    assert tensor.memory() == {
        "name": "sharded-memory-over-bsp",
        "value": 0.5,
        "goal": "<= 0.65",
        "ours_mb": 200.0,
        "peer_mb": 400.0,
    }


class Once:
    """The coordinator asks for two steps, then for no more."""

    def __init__(self):
        self.asked, self.reported = [2, None], []

    def wait(self):
        return self.asked.pop(0)

    def report(self, value):
        self.reported.append(value)


def test_the_peak_of_the_resident_memory_is_reported():
    commands, sizes = Once(), iter([1, 50_000_000])
    tensor.PeakMemory(commands).repeat(lambda: torch.ones(next(sizes)))
    small, more = Once(), iter([1, 1])
    tensor.PeakMemory(small).repeat(lambda: torch.ones(next(more)))
    assert commands.reported[0] - small.reported[0] == pytest.approx(200e6, rel=0.2)

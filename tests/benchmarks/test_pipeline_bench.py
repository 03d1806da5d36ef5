"""The sides of `bench pipeline` compute the same, and every line of the issue is there, with its floor."""

from itertools import islice

import _predicted
import pipeline
import pytest
import torch
from _ranks import Commands

import manyhands as mh
from manyhands.cli.bench import met


class Once(Commands):
    """Asks a side for one step."""

    def __init__(self):
        self.steps = 0

    def repeat(self, step):
        step()
        self.steps += 1


def test_every_line_has_a_goal_and_its_floor(monkeypatch):
    asked = []

    def measured(title, sides, *, steps):
        asked.append([side.name for side in sides])
        return {side.name: [1.0 + number] * 3 for number, side in enumerate(sides)}

    monkeypatch.setattr(pipeline, "measure", measured)
    monkeypatch.setattr(pipeline, "bubble_error", lambda: {"name": "bubble-error", "value": 0.0, "goal": "<= 0.10"})
    monkeypatch.setattr(pipeline, "memory_error", lambda: {"name": "memory-error", "value": 0.2, "goal": "<= 0.10"})
    found = {line["name"]: line for line in pipeline.run(None)}
    cases = [case.name for case in pipeline.CASES]
    expected = [name for case in cases for name in (f"{case}-over-torch", f"{case}-no-communication")]
    more = ["pipedream-over-1f1b-m4", "pipedream-no-communication", "cut-over-chain", "bubble-error", "memory-error"]
    assert list(found) == [*expected, *more]
    assert all(("goal" in line) == ("no-communication" not in name) for name, line in found.items())
    assert found["gpipe-m8-over-torch"]["value"] == 2.0 and found["gpipe-m8-no-communication"]["value"] == 3.0
    assert found["pipedream-over-1f1b-m4"]["value"] == 1 / (4 * 2), "four steps have the samples of one"
    assert not met(found["memory-error"]) and met(found["bubble-error"])
    assert asked[0] == ["torch", "ours", "floor"] and asked[-1] == ["chain", "cut"]


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
@pytest.mark.parametrize("rank", range(2))
def test_the_floor_computes_the_stages_of_its_rank(schedule, rank, monkeypatch):
    """As many layers as the peer has, each forward and backward once per micro-batch."""
    monkeypatch.setenv("RANK", str(rank))
    calls, commands = [], Once()
    linear = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda layer, x: calls.append(len(x)) or linear(layer, x))
    pipeline.alone(schedule, "16", "12", "4", commands)
    assert commands.steps == 1 and calls == [3] * (4 * pipeline.LAYERS // 2)


def test_the_parts_of_both_ranks_are_all_layers():
    for schedule, chunks in (("gpipe", 1), ("interleaved", 2)):
        parts = {s: part for rank in range(2) for s, part in pipeline.own_parts(schedule, 16, rank).items()}
        whole, x = pipeline.network(16), torch.randn(3, 16)
        assert sorted(parts) == list(range(2 * chunks))
        out = x
        for s in sorted(parts):
            out = parts[s](out)
        assert torch.equal(out, whole(x)) and torch.equal(out, pipeline.Plain(16)(x))


def test_samples_are_those_of_the_case():
    (x, y), *_ = islice(pipeline.batches(16, 12), 1)
    assert x.shape == (12, 16) and y.shape == (12,)


@pytest.mark.timeout(120)
def test_predictions_are_held_against_real_runs(monkeypatch):
    monkeypatch.setattr(_predicted, "WIDTH", 64)
    monkeypatch.setattr(_predicted, "MEMORIES", {"pipedream": mh.pipedream})
    monkeypatch.setattr(_predicted, "BUBBLES", {"gpipe": mh.gpipe})
    memory, bubble = _predicted.memory_error(steps=9), _predicted.bubble_error(steps=4)
    assert memory["value"] <= 0.1 and met(memory)
    assert 0 <= bubble["value"] <= 1 and set(bubble["errors"]) == {"gpipe"}, "how large depends on the machine"

"""Pipelines that stream, as a user sees them: they learn, are resumed, run in loops of one's own, or are refused."""

from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.core.stage import Stage
from manyhands.rules import Momentum

from .small import chain, task
from .test_own_loop import Joined, looped, same

EVERY = {
    "pipelined-backprop": mh.pipelined_backprop,
    "small-batch-pipeline": mh.small_batch_pipeline,
    "pipedream": mh.pipedream,
    "vertical sync": lambda **knobs: mh.pipedream(vertical_sync=True, **knobs),
    "2bw": mh.pipedream_2bw,
    "spectrain": mh.spectrain,
    "ddg": mh.ddg,
    "features-replay": mh.features_replay,
    "weight-copies": mh.weight_copies,
    "dni": mh.dni,
    "dni with predicted inputs": lambda **knobs: mh.dni(synthetic_inputs=True, conditional=True, **knobs),
}
every = pytest.mark.parametrize("method", EVERY)
REWRITES = ["pipelined-backprop", "small-batch-pipeline", "spectrain"]


def equal(one, other):
    return all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


def run(method, steps=11, workers=3, data=None, **settings):
    data = data or task(samples=80, batch_size=8)
    rule = Momentum(0.02, 0.5)
    return mh.train(data, EVERY[method](rule=rule), cluster=mh.Cluster(workers), steps=steps, **settings)


@every
def test_a_run_that_is_resumed_equals_one_that_was_saved_at_the_same_steps(method, tmp_path):
    whole = run(method, out=tmp_path, checkpoint_every=5)
    run(method, steps=5, out=tmp_path / "part", checkpoint_every=5)
    assert equal(whole, run(method, resume=tmp_path / "part", checkpoint_every=5, out=tmp_path / "again"))


def test_a_pause_does_not_change_2bw(tmp_path):
    """Both versions outlive it, so that the recursion continues."""
    assert equal(run("2bw"), run("2bw", out=tmp_path, checkpoint_every=3))


@pytest.mark.parametrize("method", [name for name in EVERY if name != "weight-copies"])
def test_a_run_is_resumed_with_another_number_of_stages(method, tmp_path):
    run(method, steps=5, out=tmp_path, checkpoint_every=5)
    again = run(method, steps=30, workers=2, resume=tmp_path)
    assert again.final_loss < run(method, steps=5, workers=2).final_loss


def test_copies_are_resumed_with_as_many_stages_only(tmp_path):
    run("weight-copies", steps=5, out=tmp_path, checkpoint_every=5)
    with pytest.raises(
        mh.Refused, match="the number of copies is 3, but must be 5, as in the checkpoint: 2K - 1 for K"
    ):
        run("weight-copies", workers=2, resume=tmp_path)


def test_a_checkpoint_is_not_resumed_with_other_versions(tmp_path):
    run("pipedream", steps=5, out=tmp_path, checkpoint_every=5)
    with pytest.raises(mh.Refused):
        run("weight-copies", resume=tmp_path)


@every
def test_every_method_trains_in_a_loop_of_ones_own_without_announced_steps(method):
    def program(hands, losses):
        x, y = task(samples=80).data.tensors
        for start in range(0, 80, 8):
            losses.append(hands.step(x[start : start + 8], y[start : start + 8]))

    joined = Joined(EVERY[method](), program, mh.Cluster(workers=4))
    assert same(joined.models) and [len(one["losses"]) for one in joined.ranks] == [10] * 4


def test_replicas_train_in_a_loop_with_a_collective_after_each_step():
    """No replica waits in a step for what another one does in a later step. Seven steps: a round is not full."""

    def program(hands, losses):
        x, y = task(samples=56).data.tensors
        for start in range(0, 56, 8):
            losses.append(hands.step(x[start : start + 8], y[start : start + 8]))
            assert hands.reduce(1.0) == 1

    for replicas in ((2, 1), (1, 2)):
        joined = Joined(mh.pipedream(replicas=replicas), program, mh.Cluster(workers=3))
        assert same(joined.models) and [len(one["losses"]) for one in joined.ranks] == [7] * 3


def test_an_evaluation_drains_and_fills_again(tmp_path):
    """It is the same as a checkpoint at that step, and differs from no pause."""
    looks = {"test": task().data, "metric": lambda out, y: -float((out - y).abs().mean())}
    data = task(samples=80, batch_size=8, **looks)
    evaluated, saved = run("pipedream", data=data, evaluate_every=5), run("pipedream", checkpoint_every=5, out=tmp_path)
    assert equal(evaluated, saved) and not equal(evaluated, run("pipedream"))


# -- what is refused -----------------------------------------------------------------------------------


def normed():
    net = chain(4, 8, 8, 2)
    parametrizations.weight_norm(net[2])
    return net


@pytest.mark.parametrize("method", EVERY)
def test_derived_weights_are_refused_where_the_weights_of_a_graph_are_written(method):
    if method in REWRITES:
        with pytest.raises(mh.Refused, match="the weights of layer 2 are derived from other parameters"):
            run(method, data=task(model=normed, batch_size=8))
    else:
        assert run(method, data=task(model=normed, batch_size=8)).final_loss < 5


def test_other_ways_to_derive_weights_are_refused_too():
    def spectral():
        net = chain(4, 8, 8, 2)
        parametrizations.spectral_norm(net[0])
        return net

    with pytest.raises(mh.Refused, match="the weights of layer 0 are derived"):
        run("pipelined-backprop", data=task(model=spectral, batch_size=8))
    with pytest.raises(mh.Refused, match="the weights of layer 2 are derived"):
        mh.train(task(model=normed, batch_size=8), mh.ddg(variant="code"), cluster=mh.Cluster(2), steps=3)
    with pytest.raises(mh.Refused, match="autocast makes copies"), torch.autocast("cpu"):
        run("pipelined-backprop")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda: mh.pipedream_2bw(2),
            "micro_batches is 2, but must be >= 3, or more than two versions would be in use",
        ),
        (lambda: mh.pipedream_2bw(0), "micro_batches is 0, but must be >= 1"),
        (lambda: mh.pipedream_2bw(16), "batch_size is 8, but must be >= 16, the number of micro-batches"),
        (lambda: mh.weight_copies(rounds=0), "rounds is 0, but must be >= 1"),
        (lambda: mh.ddg(variant="coded"), "variant is 'coded', but must be 'paper' or 'code'"),
        (lambda: mh.spectrain(prediction="far"), "prediction is 'far', but must be one of 'to the end'"),
    ],
    ids=range(6),
)
def test_settings_that_cannot_work_are_refused(make, why):
    with pytest.raises(mh.Refused, match=why):
        mh.train(task(batch_size=8), make(), cluster=mh.Cluster(4), steps=3)


# -- replay --------------------------------------------------------------------------------------------


class Layered(nn.Sequential):
    """Keeps what its BatchNorm saw."""

    made: ClassVar = []

    def __init__(self):
        super().__init__(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2)
        )
        self.made.append(self)


def test_a_replay_counts_a_mini_batch_once_in_running_statistics():
    Layered.made = []
    result = mh.train(task(model=Layered, batch_size=8), mh.features_replay(), cluster=mh.Cluster(3), steps=6)
    assert max(int(one[1].num_batches_tracked) for one in Layered.made) == 6
    assert result.buffers["1.num_batches_tracked"] == 6


@pytest.mark.parametrize("keeps", ["graph", "inputs"])
def test_a_replay_has_the_masks_and_statistics_of_the_first_pass(keeps, monkeypatch):
    """One stage, where no update lies between the passes: the same bits with a graph and without."""
    forward = Stage.forward
    monkeypatch.setattr(Stage, "forward", lambda self, *rest, **more: forward(self, *rest, **{**more, "keep": keeps}))
    result = mh.train(task(model=Layered, batch_size=8), mh.pipedream(), cluster=mh.Cluster(1), steps=6)
    monkeypatch.undo()
    plain = mh.train(task(model=Layered, batch_size=8), mh.pipedream(), cluster=mh.Cluster(1), steps=6)
    assert equal(result, plain)
    assert all(torch.equal(result.buffers[name], plain.buffers[name]) for name in plain.buffers)


def test_two_stages_of_equal_shape_have_different_masks():
    masks = {}

    class Noted(nn.Dropout):
        def forward(self, x):
            y = super().forward(x)
            masks.setdefault(id(self), (y == 0) & (x != 0))
            return y

    def model():
        return nn.Sequential(nn.Linear(4, 16), Noted(0.5), nn.Linear(16, 16), Noted(0.5), nn.Linear(16, 2))

    x = torch.randn(16, 4) + 3
    data = mh.Task(model, TensorDataset(x, torch.zeros(16, 2)), nn.functional.mse_loss, batch_size=8)
    mh.train(data, mh.features_replay(), cluster=mh.Cluster(3), steps=1)
    one, other = list(masks.values())[:2]
    assert one.shape == other.shape and not torch.equal(one, other)


def test_an_own_loop_has_the_steps_of_a_managed_run():
    joined = Joined(mh.weight_copies(), looped(steps=6))
    assert same(joined.models)


# -- predicted errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1])
def test_a_pause_does_not_change_predicted_errors(lag, tmp_path):
    """No weights change between the passes of a mini-batch, and M has learned all that it can before it predicts."""
    data, paused = task(samples=80, batch_size=8), tmp_path / "paused"
    found = [
        mh.train(data, mh.dni(lag=lag), cluster=mh.Cluster(3), steps=11, **settings)
        for settings in ({}, {"out": paused, "checkpoint_every": 3})
    ]
    assert equal(*found)


def test_the_models_of_errors_and_inputs_are_in_a_checkpoint(tmp_path):
    """A stage of a resumed run that begins or ends elsewhere has a new model; other layers are refused."""
    data = task(samples=80, batch_size=8)
    run = partial(mh.train, data, cluster=mh.Cluster(3), steps=8)
    run(mh.dni(synthetic_inputs=True), out=tmp_path, checkpoint_every=4)
    with pytest.raises(mh.Refused, match=r"the synthetic model at the cut .* resume with the layers that it was saved"):
        run(mh.dni(synthetic_inputs=True, layers=2), resume=tmp_path, steps=12)
    with pytest.raises(mh.Refused, match=r"the shape of what is kept of 0\.weight"):
        run(mh.dni(synthetic_inputs=True, hidden=32), resume=tmp_path, steps=12)
    with pytest.raises(mh.Refused, match=r"inputs/.* would be lost: resume with the knobs that it was saved with"):
        run(mh.dni(), resume=tmp_path, steps=12)
    with pytest.raises(mh.Refused, match=r"the size of a sample at the cut .* is 10, but must be 8, as it was"):
        run(mh.dni(synthetic_inputs=True, conditional=True), resume=tmp_path, steps=12)
    again = mh.train(data, mh.dni(synthetic_inputs=True), cluster=mh.Cluster(2), steps=12, resume=tmp_path)
    assert again.final_loss < 5


def classified(labels, classes=2):
    x, y = torch.randn(16, 4), torch.tensor(labels * 8)
    return mh.Task(lambda: chain(4, 8, 8, classes), TensorDataset(x, y), nn.functional.cross_entropy, batch_size=8)


def test_a_conditional_model_sees_class_numbers_one_hot_or_the_target_itself():
    run = partial(mh.train, cluster=mh.Cluster(2), steps=8)
    for data in (classified([0, 1]), task(samples=80, batch_size=8)):
        plain, conditional = run(data, mh.dni()), run(data, mh.dni(conditional=True))
        assert not equal(plain, conditional)


@pytest.mark.parametrize(
    ("data", "knobs", "why"),
    [
        (
            lambda: classified([0, -100]),
            {"conditional": True},
            "a target is -100, but must be >= 0 and < 2",
        ),
        (lambda: task(batch_size=8), {"lag": 2}, "lag is 2, but must be 0 or 1"),
        (lambda: task(batch_size=8), {"layers": -1}, "layers is -1, but must be >= 0"),
        (lambda: task(batch_size=8), {"hidden": 0}, "hidden is 0, but must be >= 1"),
        (lambda: words(), {"synthetic_inputs": True}, "synthetic_inputs is True: the data are torch.int64"),
    ],
    ids=range(5),
)
def test_what_cannot_be_predicted_is_refused(data, knobs, why):
    with pytest.raises(mh.Refused, match=why):
        mh.train(data(), mh.dni(**knobs), cluster=mh.Cluster(2), steps=3)


def words():
    def model():
        return nn.Sequential(nn.Embedding(5, 8), nn.Flatten(), nn.Linear(24, 8), nn.Linear(8, 2))

    data = TensorDataset(torch.randint(5, (16, 3)), torch.randn(16, 2))
    return mh.Task(model, data, nn.functional.mse_loss, batch_size=8)


def test_memory_of_the_models_is_counted():
    """M of the first stage: 8 inputs, 128 hidden units with a bias and two numbers to normalise, 8 outputs."""
    data = task(samples=80, batch_size=8)
    kept = [memory(mh.train(data, make(), cluster=mh.Cluster(2), steps=4)) for make in (mh.dni, mh.pipelined_backprop)]
    model = 8 * 128 + 3 * 128 + 128 * 8 + 8
    assert kept[0][0] - kept[1][0] >= 4 * 4 * model  # weights, gradient, and Adam's two
    assert kept[0][1] == kept[1][1]


def memory(result):
    return {line["held"]: line["bytes"] for line in result.records if line.get("kind") == "memory"}

"""Methods for late gradients: all learn the digits, and all can be saved and resumed."""

import pytest
import torch

import manyhands as mh
from manyhands.rules import Adam, Momentum, Sgd, Torch
from manyhands.runtime.checkpoint import load_checkpoint
from manyhands.splits.data import Share

from .small import steps_of, task

METHODS = {
    "dc_asgd": mh.dc_asgd,
    "dc_asgd adaptive": lambda **knobs: mh.dc_asgd(adaptive=True, mean_squares=2, **knobs),
    "staleness_aware": mh.staleness_aware,
    "dyn_sgd": mh.dyn_sgd,
    "agn": lambda **knobs: mh.agn(period=3, **knobs),
    "adag": lambda **knobs: mh.adag(period=3, **knobs),
    "asgd_momentum": mh.asgd_momentum,
}
METHOD = pytest.mark.parametrize("method", METHODS)
PLACES = {"apart": {}, "one host": {"hosts": 1}, "servers": {"servers": 2}}
PLACE = pytest.mark.parametrize("place", PLACES)


@METHOD
def test_the_digits_are_learned_in_part(method):
    """By workers that are not alike; tests/matrix/ has whole runs."""
    cluster = mh.Cluster(workers=4, speeds=[1, 0.5, 2, 1], jitter=0.3)
    result = mh.train("digits", METHODS[method](), cluster=cluster, epochs=8)
    assert result.test_accuracy >= 0.8
    assert result.lag.max > 1, "some gradients were late"


def run(method, place="apart", workers=1, steps=9, data=None, strategy=None, **train):
    cluster = mh.Cluster(workers=workers, **PLACES[place])
    strategy = strategy or METHODS[method](lr=0.02)
    return mh.train(data or task(batch_size=8), strategy, cluster=cluster, steps=steps, seed=5, **train)


@METHOD
@PLACE
def test_a_lone_worker_that_is_resumed_equals_one_that_continued(method, place, tmp_path):
    whole = run(method, place, out=tmp_path, checkpoint_every=4)
    again = run(method, place, resume=tmp_path / "checkpoints" / "step-00000008")
    assert whole.weights_sha256 == again.weights_sha256
    assert {line["step"] for line in steps_of(again)} == {9}


@METHOD
@pytest.mark.parametrize("workers", [2, 5])
def test_several_workers_continue_from_what_was_saved_and_keep_learning(method, workers, tmp_path):
    data = task(samples=64, batch_size=8)
    first = run(method, "one host", workers=4, steps=20, data=data, out=tmp_path, checkpoint_every=20)
    start, steps = 4 * 20 // workers, 320 // workers
    result = run(method, "servers", workers=workers, steps=steps, data=data, resume=tmp_path)
    assert result.samples == 8 * workers * (steps - start)
    assert result.final_loss < 0.8 * first.final_loss


@pytest.mark.parametrize(
    "rule", [Momentum(0.01), Adam(0.01), Torch("AdamW", lr=0.01)], ids=lambda one: type(one).__name__
)
@pytest.mark.parametrize("method", ["dc_asgd adaptive", "staleness_aware", "adag"])
def test_whatever_makes_the_step_of_the_corrected_gradient(method, rule, tmp_path):
    def make():
        return METHODS[method](rule=rule)

    whole = run(method, strategy=make(), out=tmp_path, checkpoint_every=4)
    again = run(method, strategy=make(), resume=tmp_path / "checkpoints" / "step-00000008")
    assert whole.weights_sha256 == again.weights_sha256


def test_the_mean_of_steps_that_were_saved_halfway_is_the_mean_of_all_of_them(tmp_path):
    """Four steps are saved of a period of five; whoever goes on divides by five and not by one."""
    strategy = mh.agn(lr=0.02, period=5)
    run("agn", steps=4, strategy=strategy, out=tmp_path, checkpoint_every=4)
    saved = load_checkpoint(tmp_path / "checkpoints")
    assert int(saved.state["worker0/accruals"]) == 4 and int(saved.state["rule/:samples"]) == 0
    after = run("agn", steps=5, strategy=strategy, resume=tmp_path).weights
    data = task(batch_size=8)
    share = Share(data.data, 0, 1, 8, seed=5)
    share.position = 4
    model = data.build(5)
    model.load_state_dict(saved.weights)
    data.loss_of(model, share.next_batch()).backward()
    for name, p in model.named_parameters():
        total = saved.state[f"worker0/accrued/{name}"].view(p.shape) + p.grad
        assert torch.allclose(after[name], saved.weights[name] - 0.02 * total / 5, rtol=0, atol=1e-6)


def test_a_schedule_counts_every_mini_batch_of_a_push():
    seen = []

    def rate(samples):
        seen.append(samples)
        return 0.01

    run("agn", steps=7, strategy=mh.agn(period=3, rule=Sgd(rate)))
    assert seen == [0, 24, 48], "8 samples per step, 3 steps per push; the last push is what is left"


# -- Downpour's warm start ----------------------------------------------------------------------------------


def test_one_client_alone_first_then_many(tmp_path):
    """The warm start of the paper: the weights and what Adagrad remembers are handed on."""
    digits = {"out": tmp_path, "checkpoint_every": 100}
    mh.train("digits", mh.downpour(), cluster=mh.Cluster(workers=1), steps=100, **digits)
    saved = load_checkpoint(tmp_path / "checkpoints")
    assert all(saved.state[f"rule/{name}/h"].any() for name in saved.weights)
    many = mh.train("digits", mh.downpour(), cluster=mh.Cluster(workers=8), epochs=10, resume=tmp_path)
    assert {line["rank"] for line in steps_of(many)} == set(range(8))
    assert many.test_accuracy >= 0.93

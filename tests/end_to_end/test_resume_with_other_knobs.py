"""A run may be resumed with other knobs: what was saved has a place in it, or it is refused with the way out."""

import pytest
import torch

import manyhands as mh
from manyhands.codecs import Dgc, Feedback, Half, TopK
from manyhands.rules import Sgd
from manyhands.runtime.checkpoint import load_checkpoint

from .small import task

STEPS = 6
CODEC = "which would be lost: resume with the codec that it was saved with"


def saved(strategy, folder, steps=STEPS, workers=2):
    data, cluster = task(batch_size=8), mh.Cluster(workers=workers)
    mh.train(data, strategy, cluster=cluster, steps=steps, seed=5, out=folder, checkpoint_every=steps)
    return load_checkpoint(folder / "checkpoints")


def resumed(strategy, folder, steps=2 * STEPS, workers=2):
    return mh.train(
        task(batch_size=8), strategy, cluster=mh.Cluster(workers=workers), steps=steps, seed=5, resume=folder
    )


def seen_at_the_start(strategy, folder, look, workers):
    """What `look(strategy, w)` gives on every worker before its first step."""
    kind, found = type(strategy), {}

    def restored(self, w):
        kind.restored(self, w)
        found[w.rank] = look(self, w)

    strategy.__class__ = type(kind.__name__, (kind,), {"restored": restored})
    resumed(strategy, folder, workers=workers)
    return found


# -- block momentum -----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [6, 7], ids=["between two blocks", "within a block"])
def test_a_new_worker_begins_its_block_at_the_look_ahead_point(steps, tmp_path):
    nesterov = lambda: mh.bmuf(lr=0.05, period=3, nesterov=True)  # noqa: E731
    state = saved(nesterov(), tmp_path, steps=steps).state

    def look(self, w):
        return {name: x.reshape(-1).clone() for name, x in w.flat.named().items()}

    weights = seen_at_the_start(nesterov(), tmp_path, look, workers=3)
    ahead = {name.removeprefix("start/"): x for name, x in state.items() if name.startswith("start/")}
    assert sorted(weights) == [0, 1, 2] and ahead
    assert all(torch.equal(weights[2][name], x) for name, x in ahead.items()), "W_g, where the block began"
    answer = load_checkpoint(tmp_path / "checkpoints").weights
    assert not any(torch.equal(ahead[name], x.reshape(-1)) for name, x in answer.items()), "W is another point"
    for rank in (0, 1):
        assert all(torch.equal(weights[rank][name], state[f"worker{rank}/x/{name}"]) for name in ahead)


def test_the_length_of_rounds_is_the_one_that_was_set_last(tmp_path):
    saved(mh.model_averaging(lr=0.05, period=6), tmp_path, steps=5)
    lengths = seen_at_the_start(
        mh.model_averaging(lr=0.05, period=2), tmp_path, lambda self, w: (self.rounds.taken, self.rounds.length), 2
    )
    assert set(lengths.values()) == {(5, 2)}


def test_a_measured_length_of_rounds_comes_back(tmp_path):
    averaging = lambda: mh.model_averaging(lr=0.05, overhead=0.5)  # noqa: E731
    _, length = saved(averaging(), tmp_path).state["round"].tolist()
    lengths = seen_at_the_start(averaging(), tmp_path, lambda self, w: self.rounds.length, 2)
    assert set(lengths.values()) == {length}


def test_an_outer_rule_cannot_be_left_out(tmp_path):
    saved(mh.bmuf(lr=0.05, period=3), tmp_path)
    lost = r"^the checkpoint holds state without a place here \(outer/.* and 23 more\), which would be lost"
    with pytest.raises(mh.Refused, match=lost):
        resumed(mh.model_averaging(lr=0.05, period=3), tmp_path)


def test_a_weight_of_the_average_may_begin_in_the_middle_of_a_round(tmp_path):
    saved(mh.model_averaging(lr=0.05, period=4), tmp_path)
    result = resumed(mh.weighted_averaging(lr=0.05, period=4), tmp_path)
    assert all(x.isfinite().all() for x in result.weights.values())


# -- elastic averaging --------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_momentum_may_end_or_begin_with_a_resume(asynchronous, tmp_path):
    def method(momentum):
        return mh.eamsgd(lr=0.02, momentum=momentum, period=2, asynchronous=asynchronous)

    saved(method(0.9), tmp_path / "with")
    ended = resumed(method(0.0), tmp_path / "with")
    saved(method(0.0), tmp_path / "without")
    begun = resumed(method(0.9), tmp_path / "without")
    again = resumed(method(0.9), tmp_path / "with")
    hashes = [result.weights_sha256 for result in (ended, begun, again)]
    assert len(set(hashes)) == 3


def test_without_momentum_the_last_step_of_a_worker_has_no_effect(tmp_path):
    """v <- 0 v - eta g: a run that is resumed without momentum is one whose v was 0."""
    saved(mh.eamsgd(lr=0.02, momentum=0.9), tmp_path)
    ended = resumed(mh.eamsgd(lr=0.02, momentum=0.0), tmp_path)
    plain = resumed(mh.easgd(lr=0.02, center_rate=mh.eamsgd().center_rate, period=mh.eamsgd().period), tmp_path)
    assert ended.weights_sha256 == plain.weights_sha256


# -- codecs -------------------------------------------------------------------------------------------

FEEDBACK = Feedback(TopK(0.1))


@pytest.mark.parametrize(
    ("before", "after", "holds"),
    [
        (mh.bsp_server(codec=FEEDBACK), mh.bsp_server(), "memory/"),
        (mh.ssp(codec=FEEDBACK), mh.ssp(codec=Half()), "memory/"),
        (mh.diloco(period=3, codec=FEEDBACK), mh.diloco(period=3), "worker0/sum/memory/"),
        (mh.diloco(period=3, codec=FEEDBACK), mh.diloco(period=3, codec=Half()), "memory/"),
        (mh.topk_sgd(), mh.fp16_sgd(), "memory/"),
    ],
    ids=["no codec", "a codec that rounds", "no codec between rounds", "another between rounds", "another method"],
)
def test_what_a_codec_has_not_sent_yet_is_never_dropped_silently(before, after, holds, tmp_path):
    saved(before, tmp_path)
    with pytest.raises(
        mh.Refused, match=rf"^the checkpoint holds what a codec has not sent yet \({holds}.* more\), {CODEC}"
    ):
        resumed(after, tmp_path)
    resumed(before, tmp_path)


def test_a_memory_of_another_shape_is_refused(tmp_path):
    saved(mh.bsp_server(codec=FEEDBACK), tmp_path / "one")
    saved(mh.bsp_server(codec=Dgc(TopK(0.1))), tmp_path / "two")
    for folder, codec in (("one", Dgc(TopK(0.1))), ("two", FEEDBACK)):
        with pytest.raises(
            mh.Refused, match=r"^the shape of what is kept of .* is \(.*\), but must be \(.*\), as in the"
        ):
            resumed(mh.bsp_server(codec=codec), tmp_path / folder)


def test_a_memory_that_is_empty_is_not_missed(tmp_path):
    saved(mh.bsp_server(codec=Feedback(TopK(1.0))), tmp_path)
    resumed(mh.bsp_server(), tmp_path)


def test_another_codec_with_a_memory_sends_what_was_left(tmp_path):
    saved(mh.bsp_server(rule=Sgd(0.05), codec=FEEDBACK), tmp_path)
    result = resumed(mh.bsp_server(rule=Sgd(0.05), codec=Feedback(TopK(0.5))), tmp_path)
    assert all(x.isfinite().all() for x in result.weights.values())


def test_what_the_owner_of_a_stripe_has_not_sent_goes_to_a_sum_without_owners(tmp_path):
    state = saved(mh.onebit_sgd(), tmp_path).state
    assert any("/sum/owner/" in name and x.any() for name, x in state.items())

    def look(self, w):
        return {name: x.clone() for name, x in self.sum.state().items()}

    for rank, found in seen_at_the_start(mh.topk_sgd(), tmp_path, look, workers=2).items():
        for name, x in found.items():
            left = [state[f"worker{rank}/sum/{kind}/{name.removeprefix('memory/')}"] for kind in ("memory", "owner")]
            assert torch.equal(x, left[0] + left[1])


# -- any knobs ----------------------------------------------------------------------------------------

WAYS = {
    "local steps": [
        *[mh.model_averaging(), mh.simuparallel(), mh.weighted_averaging(period=4), mh.bmuf(period=2)],
        *[mh.diloco(period=2), mh.diloco(period=2, codec=FEEDBACK), mh.post_local_sgd(warmup=3)],
    ],
    "elastic": [mh.easgd(), mh.eamsgd(), mh.easgd(asynchronous=True), mh.easgd(codec=Half())],
    "servers": [mh.ssp(), mh.downpour(n_push=3, phase="end"), mh.dc_asgd(), mh.ssp(codec=FEEDBACK)],
    "compressed": [mh.fp16_sgd(), mh.onebit_sgd(), mh.dgc(), mh.powersgd(), mh.sparcml()],
}


@pytest.mark.parametrize("kind", WAYS)
def test_any_other_knobs_are_in_force_or_refused_with_a_reason(kind, tmp_path):
    ends = {"resumed": 0, "refused": 0}
    for number, before in enumerate(WAYS[kind]):
        saved(before, tmp_path / str(number), steps=5)
        for after in WAYS[kind]:
            try:
                resumed(after, tmp_path / str(number), steps=9, workers=3)
                ends["resumed"] += 1
            except mh.Refused as error:
                assert before is not after, str(error)
                assert "checkpoint" in str(error) or "saved" in str(error)
                ends["refused"] += 1
    assert ends["resumed"] >= len(WAYS[kind]) and ends["refused"] >= (kind != "elastic")

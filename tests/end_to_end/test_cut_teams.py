"""Teams of stages of models that are no chains: equal to the run without a team."""

from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import manyhands as mh
from branched_models import LENGTH, WORDS, Branching, Gpt, UNet
from manyhands.core.work import work_of
from manyhands.rules import Momentum
from manyhands.splits.piped import SCHEDULES
from manyhands.strategies.grid import Grid
from manyhands.tasks import load


def words(count=48):
    x = torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.roll(-1, 1))


def images(count=48):
    x = torch.randn(count, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.arange(count) % 10)


def numbers(count=48):
    x = torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    return TensorDataset(x, torch.arange(count) % 3)


def task(model, data, loss=cross_entropy):
    return mh.Task(lambda: model().double(), data, loss, batch_size=8)


TASKS = {
    "gpt": task(Gpt, words(), None),
    "tied gpt": task(lambda: Gpt(tied=True), words(), None),
    "u-net": task(UNet, images()),
    "branching": task(Branching, numbers()),
}


def train(task, team=None, strategy=None, workers=None, **knobs):
    workers = workers or (1 if team is None else team.size)
    cluster = mh.Cluster(workers=workers)
    return mh.train(task, strategy or mh.bsp(), team=team, cluster=cluster, **{"steps": 5, "seed": 1, **knobs})


def difference(one, other):
    return max((w - other.weights[name]).abs().max().item() for name, w in one.weights.items())


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", TASKS)
def test_over_stages_a_model_is_trained_as_by_one_worker(name, stages):
    """Of one micro-batch: BatchNorm and branches see whole mini-batches."""
    alone, teams = train(TASKS[name]), train(TASKS[name], mh.piped(stages, micro_batches=1))
    assert difference(alone, teams) < 1e-12
    assert alone.final_loss == pytest.approx(teams.final_loss, abs=1e-12)


@pytest.mark.parametrize("keep", ["graph", "inputs"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["gpt", "tied gpt"])
def test_micro_batches_are_summed(name, schedule, keep):
    """Also with two stages on each rank; tied weights are then on one of them or on two."""
    alone = train(TASKS[name])
    teams = train(TASKS[name], mh.piped(2, micro_batches=4, schedule=schedule, keep=keep))
    assert difference(alone, teams) < 1e-12


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_replay_of_a_segment_has_the_same_masks_and_moves_statistics_once(schedule):
    gpt, net = task(lambda: Gpt(rate=0.3), words(), None), task(UNet, images())
    for model in (gpt, net):
        runs = [train(model, mh.piped(2, 4, schedule=schedule, keep=keep, chunks=2)) for keep in ("graph", "inputs")]
        assert runs[0].weights_sha256 == runs[1].weights_sha256
        assert all(torch.equal(x, runs[1].buffers[name]) for name, x in runs[0].buffers.items())
    assert runs[1].buffers["norm.num_batches_tracked"] == 5 * 4


def test_the_halves_of_a_backward_pass_of_a_segment():
    """Linear layers and convolutions of a U-Net are divided, its transposed convolution is not."""
    team = partial(mh.piped, 3, 4)
    whole, split = (train(TASKS["u-net"], team(schedule=one)) for one in ("one-f-one-b", "zero-bubble"))
    assert difference(whole, split) < 1e-12


@pytest.mark.parametrize(
    "strategy",
    [mh.bsp, mh.diloco, mh.easgd, partial(mh.bsp, rule=Momentum(0.1))],
    ids=["bsp", "diloco", "easgd", "momentum"],
)
def test_tied_weights_under_methods_in_lock_step(strategy):
    """Two teams, each with both holders; Adam in diloco divides by small numbers, which magnifies rounding."""
    alone = train(TASKS["tied gpt"], None, strategy(), workers=2, batch_size=4)
    teams = train(TASKS["tied gpt"], mh.piped(2, micro_batches=2), strategy(), workers=4, batch_size=4)
    assert difference(alone, teams) < 1e-10


def test_holders_of_tied_weights_have_the_same_bits():
    held = {}

    class Watched(Grid):
        def finish(self, w):
            super().finish(w)
            held[w.rank] = {name: p.clone() for name, p in self.me.flat.named().items()}

    mh.train(TASKS["tied gpt"], Watched(mh.bsp(), mh.piped(3)), cluster=mh.Cluster(workers=3), steps=5, batch_size=8)
    assert "words.weight" not in held[1]
    assert torch.equal(held[0]["words.weight"], held[2]["words.weight"])


class Shared(torch.nn.Module):
    """Two parameters, each of which all stages use; one is not used by every mini-batch in the last one."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        for layer in self.layers[1:]:
            layer.weight, layer.bias = self.layers[0].weight, self.layers[0].bias

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x).tanh()
        return self.layers[2](x) if x.mean() > 0 else x @ self.layers[2].weight.t()


def test_three_stages_may_share_all_weights():
    shared = task(Shared, numbers())
    assert difference(train(shared), train(shared, mh.piped(3, micro_batches=1))) < 1e-12


def test_ties_over_stages_are_refused_where_they_would_drift():
    with pytest.raises(mh.Refused, match=r"words\.weight and head\.weight are one parameter of several stages"):
        train(TASKS["tied gpt"], mh.piped(2), mh.ssp(), workers=4)
    topk = mh.bsp(codec=mh.codecs.TopK(0.1))
    with pytest.raises(mh.ManyhandsError, match=r"words\.weight belongs to several stages and differs between them"):
        train(TASKS["tied gpt"], mh.piped(2, micro_batches=2), topk, workers=4)


def test_asynchronous_methods_train_untied_models():
    result = train(TASKS["gpt"], mh.piped(2), mh.ssp(lr=0.3), workers=4, steps=40)
    assert result.final_loss < train(TASKS["gpt"], steps=1).final_loss


def test_a_residual_network_with_running_statistics():
    """Whole mini-batches, so that BatchNorm sees the same as one process."""
    task = load("resnet-small")
    alone, teams = train(task, steps=4), train(task, mh.piped(2, micro_batches=1), steps=4)
    assert difference(alone, teams) < 1e-5
    assert alone.final_loss == pytest.approx(teams.final_loss, rel=1e-4)


@pytest.mark.parametrize("stages", [None, 2, 3])
def test_a_run_is_resumed_with_other_stages(stages, tmp_path):
    """Tied weights, and a rule with a memory."""
    whole = train(TASKS["tied gpt"], mh.piped(2), mh.bsp(rule=Momentum(0.1)), steps=6)
    train(TASKS["tied gpt"], mh.piped(2), mh.bsp(rule=Momentum(0.1)), steps=3, out=tmp_path, checkpoint_every=3)
    team = None if stages is None else mh.piped(stages)
    resumed = train(TASKS["tied gpt"], team, mh.bsp(rule=Momentum(0.1)), steps=6, resume=tmp_path)
    assert difference(whole, resumed) < 1e-12


def test_names_choose_the_cuts():
    text = "piped(stages=2, cut='h.1')"
    named, chosen = train(TASKS["gpt"], text, workers=2), train(TASKS["gpt"], mh.piped(2, cut=["h.1"]))
    assert named.weights_sha256 == chosen.weights_sha256
    with pytest.raises(mh.Refused, match=r"there is no module to cut at 'h\.9'"):
        train(TASKS["gpt"], mh.piped(2, cut=["h.9"]))


def test_a_chain_with_named_cuts_is_trained_as_its_layers_are():
    digits = load("digits")
    first = next(stage for stage in range(1, 9) if isinstance(digits.build(0)[stage], torch.nn.Linear))
    alone = train("digits", batch_size=32)
    teams = train("digits", mh.piped(2, micro_batches=1, cut=[str(first)]), batch_size=32)
    assert difference(alone, teams) < 1e-6


def test_virtual_seconds_follow_the_work_of_the_stages():
    result = train(TASKS["u-net"], mh.piped(2, micro_batches=1, keep="graph"))
    seconds = [
        sum(line["compute"] for line in result.records if line["kind"] == "step" and line["rank"] == rank)
        for rank in (0, 1)
    ]
    total = work_of(TASKS["u-net"].build(0)).total * 8 * 5 / 50e9
    assert sum(seconds) == pytest.approx(total)
    assert max(seconds) < 0.8 * total


def test_a_loop_of_ones_own_needs_an_example():
    with pytest.raises(mh.Refused, match=r"the model is a UNet, which is cut by running it: give inputs"):
        mh.piped(2).part(UNet(), 0, 2)
    part = mh.piped(2, example=(torch.randn(2, 1, 8, 8),)).part(UNet(), 0, 2)
    assert 0 < sum(p.numel() for p in part.parameters()) < sum(p.numel() for p in UNet().parameters())

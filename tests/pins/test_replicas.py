"""Card 2.8, replicated stages: sums of gradients, uneven rounds, and the time of a balanced pipeline."""

from functools import partial

import pytest
import torch
from test_streams import apart, deep, same, trained
from torch import nn
from torch.utils.data import TensorDataset
from toys import SECOND, chain, probed

import manyhands as mh
from manyhands.core.work import Work
from manyhands.rules import Momentum, Sgd
from manyhands.splits.data import Share
from manyhands.splits.layers import stages
from manyhands.splits.schedules import finite, round_robin, timeline

SHAPES = [(2, 1), (1, 2), (2, 2), (3, 2, 1)]


def by_hand(task, replicas, steps, lr):
    """Every action in the order of its picture: F(m) sees the weights of now, B(m) the same, and U sums a round."""
    share, model = Share(task.data, 0, 1, task.batch_size, seed=0), task.build(0)
    parts = stages(model, len(replicas))
    weights = [[p.detach().clone() for p in part.parameters()] for part in parts]
    batches, rows = [share.next_batch() for _ in range(steps)], finite(round_robin(sum(replicas), replicas), steps)
    graphs, errors, sums, updated = {}, {}, {}, set()
    for _, _, (op, m, s) in timeline(rows):
        if op == "F":
            leaves = [w.clone().requires_grad_() for w in weights[s]]
            x = batches[m][0] if s == 0 else graphs[m, s - 1][2].detach().requires_grad_()
            names = [name for name, _ in parts[s].named_parameters()]
            out = torch.func.functional_call(parts[s], dict(zip(names, leaves, strict=True)), (x,))
            graphs[m, s] = leaves, x, out
        elif op == "B":
            leaves, x, out = graphs[m, s]
            is_last = s == len(replicas) - 1
            end, error = (task.loss(out, batches[m][1]), None) if is_last else (out, errors[m, s + 1])
            inputs = [*leaves, x] if s else leaves
            grads = torch.autograd.grad(end, inputs, error)
            errors[m, s] = grads[-1]
            sums[m, s] = grads[: len(leaves)]
        elif op == "U" and (m, s) not in updated:
            updated.add((m, s))
            for one in range(m, min(m + replicas[s], steps)):
                weights[s] = [w - lr * g for w, g in zip(weights[s], sums[one, s], strict=True)]
    return [w for part in weights for w in part]


@pytest.mark.parametrize("steps", [6, 7, 11])
@pytest.mark.parametrize("replicas", SHAPES)
def test_weights_are_those_of_the_schedule_by_hand(replicas, steps):
    """Also with a last round that is not full: 7 mini-batches over 2 replicas."""
    task = deep()
    result = trained(mh.pipedream(lr=0.1, replicas=replicas), task, sum(replicas), steps)
    for found, expected in zip(result.weights.values(), by_hand(task, replicas, steps, 0.1), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-13)
    assert result.samples == steps * task.batch_size


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return x + self.w


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (1, 3), (4, 2)])
def test_a_mini_batch_moves_the_weights_as_far_on_every_stage(replicas):
    """A gradient of 1 for every mini-batch: the mean of a round would move a replicated stage less."""
    data = TensorDataset(torch.zeros(16, 1, dtype=torch.float64), torch.zeros(16, 1, dtype=torch.float64))
    task = mh.Task(lambda: nn.Sequential(Shift(), Shift()), data, lambda out, y: out.mean(), batch_size=2)
    result = trained(mh.pipedream(lr=0.1, replicas=replicas), task, sum(replicas), 7)
    assert [x.item() for x in result.weights.values()] == pytest.approx([-0.7, -0.7])


def test_one_replica_each_is_pipedream():
    assert same(trained(mh.pipedream(), deep(), 3, 9), trained(mh.pipedream(replicas="1,1,1"), deep(), 3, 9))


def test_one_stage_with_replicas_is_data_parallel():
    """Two workers of bsp with twice the rate: the sum of their gradients."""
    task, share = deep(), Share(deep().data, 0, 1, 3, seed=0)
    model, velocity = task.build(0), None
    for _ in range(5):
        pair = [torch.autograd.grad(task.loss_of(model, share.next_batch()), list(model.parameters())) for _ in "ab"]
        total = [a + b for a, b in zip(*pair, strict=True)]
        velocity = total if velocity is None else [0.9 * v + g for v, g in zip(velocity, total, strict=True)]
        for p, v in zip(model.parameters(), velocity, strict=True):
            p.data -= 0.01 * v
    result = trained(mh.pipedream(rule=Momentum(0.01, 0.9), replicas=(2,)), task, 2, 10)
    for found, expected in zip(result.weights.values(), model.parameters(), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("replicas", "expected"), [((2, 1), 2), ((3, 1), 2), ((1, 2), 2.5)])
def test_replicas_make_unequal_stages_equally_fast(replicas, expected):
    """A stage with r replicas has r times the work: a mini-batch takes as long as on a stage with one.

    The last stage has no forward pass to do while its replicas wait for one another.
    """
    plain = chain(2)

    seconds = []
    for steps in (72, 36):
        strategy = probed(mh.pipedream(lr=0.01, replicas=replicas), setup=lambda s, w: slow(s, w, replicas))
        task = mh.Task(plain.model, plain.data, plain.loss, batch_size=1, work=2 * SECOND)
        cluster = mh.Cluster(workers=sum(replicas), latency=0, bandwidth="inf")
        seconds.append(mh.train(task, strategy, cluster=cluster, steps=steps).seconds)
    assert (seconds[0] - seconds[1]) / 36 == pytest.approx(expected, rel=0.05)


def slow(strategy, w, replicas):
    """The passes of a stage take as many seconds as it has replicas, one forward and one backward."""
    share = replicas[strategy.index] / 2
    strategy.passes.stage._share = Work(share, 0.0, share)


def test_versions_and_activations_of_replicas(digits64):
    """A stage with warm-up w keeps w + 1 versions: (5 - 1) // 3 = 1 for stage 0, (5 - 1 - 3) // 1 = 1, 0."""
    kept, flying = {}, {}

    def note(s, w):
        kept[w.rank] = max(kept.get(w.rank, 0), s.weights.kept)
        flying[w.rank] = max(flying.get(w.rank, 0), len(s.passes.stage._saved))

    strategy = probed(mh.pipedream(replicas=(3, 1, 1)), forward=note)
    result = mh.train(digits64, strategy, cluster=mh.Cluster(workers=5), steps=20)
    assert [kept[rank] for rank in range(5)] == [flying[rank] for rank in range(5)] == [2, 2, 2, 2, 1]
    steps = [line for line in result.records if line["kind"] == "step"]
    assert {line["rank"] for line in steps if "versions" in line} == set(range(5))


def test_a_rate_schedule_sees_the_samples_before_a_round_on_every_replica():
    asked = {}

    class Noted(Sgd):
        def __call__(self, g, at):
            asked.setdefault(len(at.weights), []).append(at.samples)
            return super().__call__(g, at)

        def can_move(self, weights):
            return False

    def model():
        return nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 2))

    task = mh.Task(model, TensorDataset(torch.randn(30, 3), torch.randn(30, 2)), nn.functional.mse_loss, batch_size=6)
    trained(mh.pipedream(rule=Noted(0.01), replicas=(2, 1)), task, 3, 5)
    assert asked == {28: [0, 0, 12, 12, 24, 24], 16: [0, 6, 12, 18, 24]}


def test_apart_from_rounding_other_replicas_give_other_weights():
    """Rounds of two mini-batches are older by one update."""
    assert apart(trained(mh.pipedream(replicas=(2, 1)), deep(), 3, 12), trained(mh.pipedream(), deep(), 2, 12)) > 1e-6


# -- runs ----------------------------------------------------------------------------------------------


def test_a_run_with_replicas_is_resumed_exactly_also_with_others(tmp_path):
    run = partial(mh.train, deep(), cluster=mh.Cluster(3), checkpoint_every=5)
    strategy = partial(mh.pipedream, rule=Momentum(0.05, 0.5), replicas=(2, 1))
    whole = run(strategy(), steps=11, out=tmp_path / "whole")
    run(strategy(), steps=5, out=tmp_path / "part")
    assert same(whole, run(strategy(), steps=11, resume=tmp_path / "part", out=tmp_path / "again"))
    other = mh.pipedream(rule=Momentum(0.05, 0.5))
    assert run(other, steps=11, resume=tmp_path / "part", out=tmp_path / "other").steps == 11


def test_running_statistics_of_replicas_count_every_mini_batch():
    def model():
        return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 5)).double()

    plain = deep()
    task = mh.Task(model, plain.data, plain.loss, batch_size=3)
    result = trained(mh.pipedream(replicas=(2, 1)), task, 3, 7)
    assert all(bool(x.isfinite().all()) for x in result.buffers.values())
    assert not torch.equal(result.buffers["1.running_mean"], torch.zeros(5, dtype=torch.float64))


def test_a_lost_replica_ends_the_run():
    with pytest.raises(mh.PeerLost, match="rank 1 is lost"):
        cluster = mh.Cluster(workers=3, faults=[mh.Die(1, at=1e-4)])
        mh.train(deep(), mh.pipedream(replicas=(2, 1)), cluster=cluster, steps=4000)


@pytest.mark.parametrize(
    ("replicas", "why"),
    [
        ((2, 2), "the number of workers is 3, but must be 4, the sum of replicas"),
        ((3, 0), r"replicas is \(3, 0\), but must be numbers >= 1"),
        ("two", "replicas is 'two', but must be whole numbers, such as '2,1'"),
    ],
)
def test_replicas_that_do_not_fit_are_refused(replicas, why):
    with pytest.raises(mh.Refused, match=why):
        trained(mh.pipedream(replicas=replicas), deep(), 3, 2)


def test_versions_of_all_stages_are_not_aligned_with_replicas():
    with pytest.raises(mh.Refused, match="vertical_sync is True, but versions of replicated stages count rounds"):
        mh.pipedream(vertical_sync=True, replicas="2,1")

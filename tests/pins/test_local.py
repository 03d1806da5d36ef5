"""Cards 1, 3, 4a, 6 and 20c: local training in rounds, pinned on toy T, and its identities."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from toys import number, probed, toy_t

import manyhands as mh
from manyhands.collectives.weighted_average import ByFisher, ByLoss, BySamples, FixedWeights
from manyhands.consistency import Rounds
from manyhands.core.rule import UpdateContext
from manyhands.rules import Adam, Block, Momentum, Sgd
from manyhands.strategies.local_steps import LocalSteps

TWO = mh.Cluster(workers=2)


def final(strategy, steps, cluster=TWO, task=None):
    return number(mh.train(task or toy_t(), strategy, cluster=cluster, steps=steps))


def same(a, b, **within):
    return all(
        torch.allclose(a.weights[name], x, **{"rtol": 0, "atol": 1e-12, **within}) for name, x in b.weights.items()
    )


# -- one average, at the end --------------------------------------------------------------------------


def test_simuparallel_on_toy_t():
    xs = {}
    strategy = mh.simuparallel(lr=0.1, own_share=True)
    probed(strategy, step=lambda s, w: xs.update({w.rank: w.flat.groups[0].weights.item()}))
    assert final(strategy, 2) == pytest.approx(0.635, abs=1e-9)
    assert (xs[0], xs[1]) == pytest.approx((0.19, 1.08), abs=1e-9)


def test_simuparallel_sends_once(digits64):
    few, many = (mh.train(digits64, mh.simuparallel(), cluster=TWO, steps=n).bytes_sent for n in (2, 6))
    assert few == many


def test_one_round_as_long_as_the_run_is_simuparallel(digits64):
    once = mh.train(digits64, mh.simuparallel(lr=0.1, own_share=True), cluster=TWO, steps=6)
    assert same(mh.train(digits64, mh.model_averaging(lr=0.1, period=6), cluster=TWO, steps=6), once, atol=0)


# -- averages every few steps -------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "w"), [(2, 0.635), (4, 1.095375)])
def test_model_averaging_on_toy_t(steps, w):
    assert final(mh.model_averaging(lr=0.1, period=2), steps) == pytest.approx(w, abs=1e-9)


@pytest.mark.parametrize(("steps", "w"), [(1, 0.35), (2, 0.6475), (3, 0.900375)])
def test_averaging_after_every_step_is_bsp(steps, w):
    assert final(mh.model_averaging(lr=0.1, period=1), steps) == pytest.approx(w, abs=1e-9)


@pytest.mark.parametrize("memory", ["keep", "average"])
def test_also_with_momentum_wherever_it_is_kept(memory):
    rule = Momentum(0.1, 0.9)
    assert final(mh.bsp(rule=rule), 3) == pytest.approx(1.719375, abs=1e-9)
    assert final(mh.model_averaging(period=1, rule=rule, memory=memory), 3) == pytest.approx(1.719375, abs=1e-9)


def test_momentum_that_is_reset_is_no_momentum():
    assert final(mh.model_averaging(period=1, rule=Momentum(0.1, 0.9), memory="reset"), 3) == pytest.approx(0.900375)


def test_but_not_with_adam(digits64):
    run = {"cluster": TWO, "steps": 6}
    averaged = mh.train(digits64, mh.model_averaging(period=1, rule=Adam(0.01)), **run)
    assert not same(averaged, mh.train(digits64, mh.bsp(rule=Adam(0.01)), **run), atol=1e-3)


def test_a_bulk_method_with_many_parameters(digits64):
    averaged = mh.train(digits64, mh.model_averaging(lr=0.1, period=1), cluster=mh.Cluster(workers=3), steps=6)
    assert same(averaged, mh.train(digits64, mh.bsp(lr=0.1), cluster=mh.Cluster(workers=3), steps=6))


@pytest.mark.parametrize(("phase", "ends"), [("end", [4, 8]), ("start", [1, 5, 9])])
def test_the_phase_says_when_the_first_average_comes(phase, ends):
    combined = []
    strategy = mh.model_averaging(period=4, phase=phase)
    probed(strategy, combine=lambda s, w: combined.append(w.step + 1) if w.rank == 0 else None)
    mh.train(toy_t(), strategy, cluster=TWO, steps=9)
    left_over = [10] if phase == "end" else []  # after the last step
    assert combined == ends + left_over


def test_one_worker_is_its_local_rule(digits64):
    alone = mh.train(digits64, mh.model_averaging(lr=0.1, period=3), cluster=mh.Cluster(workers=1), steps=7)
    assert same(alone, mh.train(digits64, mh.bsp(lr=0.1), cluster=mh.Cluster(workers=1), steps=7), atol=0)


def test_the_answer_within_a_round_is_the_average(tmp_path):
    mh.train(toy_t(), mh.model_averaging(lr=0.1, period=8), cluster=TWO, steps=8, out=tmp_path, checkpoint_every=6)
    saved = mh.load_checkpoint(tmp_path / "checkpoints" / "step-00000006")
    assert saved.weights["w"].item() == pytest.approx(((1 - 0.9**6) + 3 * (1 - 0.8**6)) / 2, abs=1e-9)


# -- a period that is measured ------------------------------------------------------------------------


@pytest.mark.parametrize(("overhead", "length"), [(0.5, 1), (0.1, 5), (0.01, 50)])
def test_combining_takes_the_share_of_time_it_may(overhead, length):
    """A step takes a second, an average half of one."""
    lengths = []
    strategy = mh.model_averaging(overhead=overhead)
    probed(strategy, combine=lambda s, w: lengths.append(s.rounds.length))
    cluster = mh.Cluster(workers=2, latency=0.5, bandwidth="inf")
    mh.train(toy_t(seconds=1), strategy, cluster=cluster, steps=2000)
    assert lengths[-1] == length


# -- bulk-synchronous at first ------------------------------------------------------------------------


def test_after_the_warm_up_of_post_local_sgd_comes_model_averaging(digits64):
    run = {"cluster": TWO, "steps": 4}
    warm = mh.train(digits64, mh.post_local_sgd(lr=0.1, warmup=4), **run)
    assert same(
        warm, mh.train(digits64, mh.bsp(lr=0.1, collective="shared"), cluster=mh.Cluster(workers=2, hosts=1), steps=4)
    )
    cold = mh.train(digits64, mh.post_local_sgd(lr=0.1, warmup=0, period=2), **run)
    assert same(cold, mh.train(digits64, mh.model_averaging(lr=0.1, period=2), **run), atol=0)


def test_post_local_sgd_on_toy_t():
    """One step together to 0.35, then two apart: x1 = 0.4735, x2 = 1.304."""
    assert final(mh.post_local_sgd(lr=0.1, warmup=1, period=2), 3) == pytest.approx((0.4735 + 1.304) / 2, abs=1e-9)


# -- some count more ----------------------------------------------------------------------------------


def weighed(weight, steps=2, **rounds):
    return final(LocalSteps(Sgd(0.1), Rounds(2, **rounds), weight=weight), steps)


def test_shares_on_toy_t():
    assert weighed(FixedWeights((0.25, 0.75))) == pytest.approx(0.8575, abs=1e-9)
    assert weighed(FixedWeights((1, 3))) == pytest.approx(0.8575, abs=1e-9)


def test_equal_shares_are_model_averaging_and_all_for_one_takes_that_one():
    assert weighed(FixedWeights((1, 1))) == pytest.approx(0.635, abs=1e-9)
    assert weighed(FixedWeights((0, 1))) == pytest.approx(1.08, abs=1e-9)


def test_samples_count():
    assert weighed(BySamples()) == pytest.approx(0.635, abs=1e-9)


def test_a_small_loss_counts():
    """Losses 1/2 and 0.405 on worker 1, 9 and 5.76 on worker 2."""
    a, b = 2 / (0.5 + 0.405), 2 / (9 + 5.76)
    assert weighed(ByLoss()) == pytest.approx((a * 0.19 + b * 1.08) / (a + b), abs=1e-9)


def test_information_counts():
    """Gradients -1, -0.9 on worker 1 and -6, -4.8 on worker 2."""
    a, b = 1 + 0.81, 36 + 23.04
    assert weighed(ByFisher()) == pytest.approx((a * 0.19 + b * 1.08) / (a + b), abs=1e-9)


class Halves(nn.Module):
    """Worker 1 learns about p, worker 2 about q, nobody about r."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.0, 0.0, 5.0], dtype=torch.float64))

    def forward(self, which):
        return ((self.w[which] - 1) ** 2).mean()


def test_who_knows_nothing_of_a_coordinate_does_not_count_there():
    task = mh.Task(Halves, TensorDataset(torch.tensor([0, 1])), batch_size=1)
    strategy = LocalSteps(Sgd(0.25), Rounds(2), weight=ByFisher())
    result = mh.train(task, strategy, cluster=TWO, steps=2)
    assert result.weights["w"].tolist() == pytest.approx([0.75, 0.75, 5.0], abs=1e-9)


@pytest.mark.parametrize(
    ("shares", "says"),
    [((1,), "the number of shares is 1, but must be 2"), ((0, 0), "shares"), ((-1, 2), ">= 0 and not all 0")],
)
def test_shares_that_make_no_sense_are_refused(shares, says):
    with pytest.raises(mh.Refused, match=says):
        weighed(FixedWeights(shares))


# -- block momentum -----------------------------------------------------------------------------------

CLASSICAL = [(0.635, 0.635, 0.635), (1.412875, 0.777875, 1.412875), (2.048271875, 0.635396875, 2.048271875)]
NESTEROV = [
    (0.635, 0.635, 0.9525),
    (1.3255625, 0.6905625, 1.67084375),
    (1.8463617188, 0.5207992187, 2.1067613281),
]


@pytest.mark.parametrize(("nesterov", "rows"), [(False, CLASSICAL), (True, NESTEROV)])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_bmuf_on_toy_t(nesterov, rows, blocks):
    seen = {}

    def look(s, w):
        (start,) = s.starts
        seen["step"], seen["start"] = start.states[0]["step"].item(), start.weights.item()

    strategy = mh.bmuf(lr=0.1, period=2, block_momentum=0.5, nesterov=nesterov)
    w = final(probed(strategy, combine=look), 2 * blocks)
    assert (w, seen["step"], seen["start"]) == pytest.approx(rows[blocks - 1], abs=1e-9)


def test_with_the_point_ahead_as_base_the_look_ahead_counts_twice():
    seen = []
    strategy = mh.bmuf(lr=0.1, period=2, block_momentum=0.5, base="lookahead")
    w = final(probed(strategy, combine=lambda s, w: seen.append(s.starts[0].weights.item())), 4)
    assert (w, seen[-1]) == pytest.approx((1.6430625, 1.98834375), abs=1e-9)


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_momentum_it_is_model_averaging(digits64, nesterov):
    run = {"cluster": mh.Cluster(workers=3), "steps": 6}
    filtered = mh.train(digits64, mh.bmuf(lr=0.1, period=2, block_momentum=0.0, nesterov=nesterov), **run)
    assert same(filtered, mh.train(digits64, mh.model_averaging(lr=0.1, period=2), **run))


@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_an_outer_sgd_of_torch(digits64, nesterov):
    """Stepping on where blocks start; only what is evaluated differs."""
    run = {"cluster": mh.Cluster(workers=3), "steps": 8}
    starts = {}
    strategy = mh.bmuf(lr=0.1, period=2, block_lr=0.8, block_momentum=0.6, nesterov=nesterov)
    probed(strategy, finish=lambda s, w: starts.update(w.named([start.weights for start in s.starts])))
    mh.train(digits64, strategy, **run)
    outer = mh.rules.Torch(torch.optim.SGD, lr=0.8, momentum=0.6, nesterov=nesterov)
    reference = mh.train(digits64, LocalSteps(Sgd(0.1), Rounds(2), outer), **run)
    assert all(torch.allclose(starts[name], w, rtol=0, atol=1e-12) for name, w in reference.weights.items())


@pytest.mark.parametrize(
    ("nesterov", "base", "total"), [(False, "paper", 2.0), (True, "paper", 2.0), (True, "lookahead", 3.0)]
)
def test_one_unit_moves_the_model_by_lr_over_one_minus_momentum(nesterov, base, total):
    rule = Block(1.0, 0.5, nesterov, base == "lookahead")
    w, state = torch.zeros(1, dtype=torch.float64), rule.init(torch.zeros(1, dtype=torch.float64))
    for unit in [1.0, *[0.0] * 60]:
        w += rule(torch.full((1,), -unit, dtype=torch.float64), UpdateContext(w, state))
    assert w.item() == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize(("workers", "momentum"), [(1, 0.0), (2, 0.5), (8, 0.875)])
def test_by_default_every_mini_batch_counts_as_on_one_machine(workers, momentum):
    at = UpdateContext(torch.zeros(1), workers=workers)
    assert Block()._momentum(at) == momentum
    assert Block(momentum=0.3)._momentum(at) == 0.3


# -- DiLoCo -------------------------------------------------------------------------------------------


def test_diloco_without_its_optimizers_is_bsp(digits64):
    run = {"cluster": TWO, "steps": 5}
    plain = mh.train(digits64, mh.diloco(period=1, outer_lr=1.0, outer_momentum=0.0, rule=Sgd(0.1)), **run)
    assert same(plain, mh.train(digits64, mh.bsp(lr=0.1), **run))


def test_diloco_is_nesterov_block_momentum_evaluated_where_rounds_start(digits64):
    run = {"cluster": TWO, "steps": 6}
    starts = {}
    blocks = mh.bmuf(period=2, block_lr=0.7, block_momentum=0.9, rule=Adam(0.003, weight_decay=0.01, decoupled=True))
    probed(blocks, finish=lambda s, w: starts.update(w.named([start.weights for start in s.starts])))
    mh.train(digits64, blocks, **run)
    result = mh.train(digits64, mh.diloco(period=2), **run)
    assert all(torch.allclose(result.weights[name], w, rtol=0, atol=1e-12) for name, w in starts.items())


def reference_diloco(task, workers, rounds, period, seed=0):
    """The algorithm in plain torch."""
    from manyhands.splits.data import Share

    shares = [Share(task.data, rank, workers, task.batch_size, seed) for rank in range(workers)]
    center = task.build(seed)
    models = [task.build(seed) for _ in range(workers)]
    inner = [torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.01) for model in models]
    outer = torch.optim.SGD(center.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(rounds):
        for share, model, optimizer in zip(shares, models, inner, strict=True):
            with torch.no_grad():
                for p, q in zip(model.parameters(), center.parameters(), strict=True):
                    p.copy_(q)
            for _ in range(period):
                optimizer.zero_grad()
                task.loss_of(model, share.next_batch()).backward()
                optimizer.step()
        for p, *others in zip(center.parameters(), *(model.parameters() for model in models), strict=True):
            p.grad = sum(p.detach() - q.detach() for q in others) / workers
        outer.step()
    return dict(center.named_parameters())


def test_diloco_is_what_one_would_write_in_torch(digits64):
    result = mh.train(digits64, mh.diloco(period=3), cluster=mh.Cluster(workers=3), steps=9)
    for name, w in reference_diloco(digits64, workers=3, rounds=3, period=3).items():
        assert torch.allclose(result.weights[name], w, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("steps", "length"), [(10_000, 500), (400, 40), (5, 1)])
def test_a_default_round_is_at_most_a_tenth_of_the_run(steps, length):
    remarks = mh.diloco().remarks(steps)
    assert mh.diloco().rounds.length_in(steps) == length
    assert remarks == ([] if length == 500 else [f"a round has {length} steps, a tenth of the run, instead of 500"])
    assert mh.diloco(period=500).remarks(steps) == []


def test_the_run_says_so(tmp_path, caplog):
    result = mh.train(toy_t(), mh.diloco(), cluster=TWO, steps=30, out=tmp_path)
    words = "a round has 3 steps, a tenth of the run, instead of 500"
    assert [record.getMessage() for record in caplog.records] == [words]
    assert result.records[0]["remarks"] == [words]


# -- refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: mh.model_averaging(period=0), "period is 0, but must be >= 1"),
        (lambda: mh.model_averaging(phase="middle"), "phase is 'middle'"),
        (lambda: mh.model_averaging(memory="lose"), "memory is 'lose'"),
        (lambda: mh.model_averaging(overhead=1.0), "overhead is 1.0, but must be > 0 and < 1"),
        (lambda: mh.post_local_sgd(warmup=-1), "warmup is -1, but must be >= 0"),
        (lambda: mh.bmuf(block_momentum=1.0), "momentum is 1.0, but must be >= 0 and < 1"),
        (lambda: mh.bmuf(block_lr=0.0), "lr is 0.0, but must be > 0"),
        (lambda: mh.bmuf(nesterov=False, base="lookahead"), "without nesterov"),
        (
            lambda: mh.model_averaging(memory="reset", rule=mh.rules.Torch(torch.optim.SGD, lr=0.1)),
            "memory is 'reset', but must be 'keep'",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, says):
    with pytest.raises(mh.Refused, match=says):
        make()


def test_the_length_of_an_own_loop_is_unknown():
    assert mh.diloco().rounds.length_in(0) == 500
    assert mh.simuparallel().rounds.length_in(0) == math.inf

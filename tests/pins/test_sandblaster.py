"""Card 7, Sandblaster L-BFGS: pinned values, torch, and what does not matter: shards, portions, copies, deaths."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from toys import SECOND, noisy, probed

import manyhands as mh
from manyhands.run.join import Hands
from manyhands.runtime.checkpoint import load_checkpoint
from manyhands.strategies.sandblaster import Sandblaster
from manyhands.virtual.world import simulate

# -- two steps by hand ----------------------------------------------------------------------------


class Bowl(nn.Module):
    """f = (x^2 + 10 y^2) / 2, the loss itself, whatever the samples."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, sample):
        return (torch.tensor([0.5, 5.0], dtype=torch.float64) * self.w**2).sum() + 0 * sample.mean()


def exact(evaluate, start, t, reach):
    """Of a parabola two slopes tell everything."""
    slope = evaluate(1.0).slope
    return evaluate(start.slope / (start.slope - slope))


@pytest.mark.parametrize("place", [{"workers": 1}, {"workers": 3}, {"workers": 2, "servers": 2}, {"hosts": 1}], ids=str)
@pytest.mark.parametrize("history", [1, 10])
def test_a_bowl_is_solved_in_two_steps_through_sharded_dots(place, history):
    steps, points = [], []

    def search(*given):
        steps.append(exact(*given).t)
        return exact(*given)

    strategy = probed(
        Sandblaster(history=history, batches=1, iterations=1, search=search),
        step=lambda s, w: w.rank or points.append(w.flat.groups[0].weights.tolist()),
    )
    task = mh.Task(Bowl, TensorDataset(torch.zeros(6, 1, dtype=torch.float64)), batch_size=1)
    result = mh.train(task, strategy, cluster=mh.Cluster(**place), steps=2)
    assert steps == pytest.approx([101 / 1001, 9.9019801980], abs=1e-9)
    assert points[0] == pytest.approx([0.8991008991, -0.0089910090], abs=1e-9)
    assert result.weights["w"].tolist() == pytest.approx([0, 0], abs=1e-12)


def test_without_a_history_it_is_steepest_descent():
    """The minimum along -g is (g'g) / (g'Ag) away, again and again."""
    task = mh.Task(Bowl, TensorDataset(torch.zeros(4, 1, dtype=torch.float64)), batch_size=1)
    strategy = Sandblaster(history=0, batches=1, iterations=2, search=exact)
    result = mh.train(task, strategy, cluster=mh.Cluster(workers=2), steps=3)
    w, a = torch.ones(2, dtype=torch.float64), torch.tensor([1.0, 10.0], dtype=torch.float64)
    for _ in range(6):
        g = a * w
        w = w - g.dot(g) / g.dot(a * g) * g
    torch.testing.assert_close(result.weights["w"], w, rtol=0, atol=1e-12)


# -- torch ----------------------------------------------------------------------------------------


def train(task=None, steps=24, cluster=None, **knobs):
    knobs = {"batches": 8, "iterations": 1, "portion": 3} | knobs
    return mh.train(task or noisy(), Sandblaster(**knobs), cluster=cluster or mh.Cluster(workers=1), steps=steps)


def flat(weights):
    return torch.cat([x.detach().reshape(-1) for x in weights])


def by_torch(steps, **options):
    """torch.optim.LBFGS on the whole data set; after every step the weights."""
    task = noisy()
    model = task.build(0)
    optimizer = torch.optim.LBFGS(
        model.parameters(), line_search_fn="strong_wolfe", tolerance_grad=0, max_eval=1000, **options
    )

    def closure():
        optimizer.zero_grad()
        loss = task.loss_of(model, task.data.tensors)
        loss.backward()
        return loss

    trajectory = []
    for _ in range(steps):
        optimizer.step(closure)
        trajectory.append(flat(model.parameters()))
    return trajectory


@pytest.mark.parametrize("iterations", [1, 4])
@pytest.mark.parametrize(("lr", "history"), [(1.0, 10), (1.0, 3), (0.3, 10), (8.0, 5)])
def test_one_replica_and_one_shard_are_torch(iterations, lr, history):
    """One worker, whose eight mini-batches of a batch are all samples, in any order."""
    ours = []
    strategy = probed(
        Sandblaster(lr, history, 24, 8, iterations),
        step=lambda s, w: (w.step + 1) % 8 or ours.append(s.sharded.read(False)[0]),
    )
    mh.train(noisy(), strategy, cluster=mh.Cluster(workers=1), steps=8 * 12 // iterations)
    theirs = by_torch(12 // iterations, max_iter=iterations, lr=lr, history_size=history)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-9)


def test_a_search_that_meets_no_numbers_turns_back():
    """Steps that are much too long: the loss there is infinite, and half of it is tried next."""

    class Steep(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([3.0]))

        def forward(self, sample):
            return self.w.exp().exp().sum() + 0 * sample.mean()

    task = mh.Task(Steep, TensorDataset(torch.zeros(4, 1)), batch_size=1)
    result = mh.train(task, mh.sandblaster(lr=1e12, batches=1), cluster=mh.Cluster(workers=2), steps=4)
    assert result.weights["w"].item() < 3 and result.weights["w"].isfinite().all()


# -- what does not matter -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    return flat(train(cluster=mh.Cluster(workers=1)).weights.values())


PLACES = [{"servers": 1}, {"servers": 3}, {"hosts": 1}, {"hosts": 2}, {}]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("workers", [2, 4])
def test_the_number_of_shards_and_of_replicas_changes_nothing(reference, place, workers):
    """Four workers bring the same 24 samples in two mini-batches each, in another order."""
    result = train(steps=24 // workers, batches=8 // workers, cluster=mh.Cluster(workers=workers, **place))
    torch.testing.assert_close(flat(result.weights.values()), reference, rtol=0, atol=1e-9)


@pytest.mark.parametrize("portion", [1, 2, 5, 100])
def test_the_size_of_portions_changes_nothing(reference, portion):
    result = train(steps=6, batches=2, portion=portion, cluster=mh.Cluster(workers=4))
    torch.testing.assert_close(flat(result.weights.values()), reference, rtol=0, atol=1e-9)


def dropping():
    """What is dropped must depend on the samples, not on who computes."""
    task = noisy()
    return replace(task, model=lambda: nn.Sequential(task.model()[0], nn.Dropout(0.3), *task.model()[1:]))


@pytest.mark.parametrize("speeds", [[1, 1, 1, 0.05], [9, 1, 2, 0.3], [0.1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("task", [noisy, dropping])
def test_the_bits_do_not_depend_on_which_replica_computes_a_portion(task, speeds):
    """Slow ones make others take their portions, and copies of what they have."""
    orders = []

    def note(s, w):
        orders.append(w.rank)

    strategy = {"batches": 2, "iterations": 2, "portion": 1}
    alike = train(task(), 6, mh.Cluster(workers=4, servers=2), **strategy)
    cluster = mh.Cluster(workers=4, servers=2, speeds=speeds, jitter=0.5)
    other = mh.train(
        replace(task(), work=SECOND / 1e4), probed(Sandblaster(**strategy), push=note), cluster=cluster, steps=6
    )
    assert other.weights_sha256 == alike.weights_sha256
    shares = [orders.count(rank) for rank in range(4)]
    assert max(shares) > 1.5 * min(shares), "or this test would say little"


# -- stragglers -----------------------------------------------------------------------------------


def busy(samples=240):
    """Sixteenths of a second per portion of four."""
    return replace(noisy(samples, 20), work=SECOND / 64)


@pytest.mark.parametrize("slow", [0, 3])
def test_a_slow_replica_is_covered_by_the_others(slow):
    knobs = {"batches": 1, "iterations": 1, "portion": 2}
    usual = train(busy(), 6, mh.Cluster(workers=4, servers=1), **knobs)
    covered = train(busy(), 6, mh.Cluster(workers=4, servers=1, stragglers=mh.Slow([slow], 5)), **knobs)
    assert covered.weights_sha256 == usual.weights_sha256
    assert covered.seconds < 1.55 * usual.seconds, "3.2 instead of 4 compute, and what it took last is late"


def test_copies_are_for_late_portions_only():
    """Equal replicas end together: no portion is computed twice."""
    computed = []
    strategy = probed(Sandblaster(batches=1, iterations=1, portion=5), push=lambda s, w: computed.append(w.rank))
    mh.train(busy(), strategy, cluster=mh.Cluster(workers=4), steps=3)
    assert len(computed) % 16 == 0 and {computed.count(rank) for rank in range(4)} == {len(computed) // 4}


def test_a_copy_saves_the_pass_when_the_only_replica_that_has_a_portion_is_stuck():
    knobs = {"batches": 1, "iterations": 1, "portion": 20}
    usual = train(busy(), 1, mh.Cluster(workers=4, servers=1), **knobs)
    stuck = mh.Cluster(workers=4, servers=1, stragglers=mh.Slow([2], 1000))
    covered = mh.train(busy(), probed(Sandblaster(**knobs), finish=lambda s, w: None), cluster=stuck, steps=1)
    assert covered.weights_sha256 == usual.weights_sha256
    done = max(line["time"] for line in covered.records if "loss" in line)
    first = max(line["time"] for line in usual.records if "loss" in line)
    assert done < 3.5 * first, "twice the usual time until it is late, and once more"


# -- losses ---------------------------------------------------------------------------------------

SMALL = {"batches": 1, "iterations": 2, "portion": 1}


def short(strategy=None, faults=(), steps=2):
    """Four replicas with three samples each per step; vectors are with two servers."""
    strategy = strategy or Sandblaster(**SMALL)
    cluster = mh.Cluster(workers=4, servers=2, faults=faults)
    return mh.train(replace(noisy(), work=SECOND / 1e4), strategy, cluster=cluster, steps=steps)


def bringing(rank, count):
    """The same run, in which a worker brings only so many mini-batches, though it goes on computing."""

    def program(transport):
        model, task = noisy().build(0), noisy()
        with Hands(transport, model, strategy=Sandblaster(**SMALL), loss=task.loss) as hands:
            for number, batch in enumerate(hands.share(task.data, 3, steps=2)):
                if (hands.rank, number) == (rank, count):
                    break
                hands.step(*batch)
        return flat(model.parameters())

    return simulate(mh.Cluster(workers=4, servers=2), program).results[0]


@pytest.mark.parametrize("rank", [1, 3])
def test_no_portion_is_lost_or_counted_twice_whenever_a_replica_dies(rank):
    """What it had brought when it died counts once, to the last bit; what it had not brought does not count."""
    whole, expected = short(), [bringing(rank, count) for count in (0, 1, 2)]
    assert torch.equal(expected[2], flat(whole.weights.values()))
    seen = []
    for moment in range(30):
        result = short(faults=[mh.Die(rank, whole.seconds * moment / 30)])
        found = [torch.equal(flat(result.weights.values()), one) for one in expected]
        assert sum(found) == 1
        assert result.lost == [(rank, "it died")]
        seen.append(found.index(True))
    assert seen == sorted(seen) and set(seen) == {0, 1, 2}, "the later it dies, the more it has brought"


@pytest.mark.parametrize("kind", [mh.Stop, mh.CutLink])
def test_nor_if_it_is_stopped_or_cut_off(kind):
    whole, expected = short(), [bringing(2, count) for count in (0, 1, 2)]
    for moment in range(10):
        result = short(faults=[kind(2, whole.seconds * moment / 10)])
        assert any(torch.equal(flat(result.weights.values()), one) for one in expected)


def test_one_replica_is_enough():
    whole, expected = short(steps=1), short(steps=1).weights_sha256
    for moment in range(20, 60, 3):
        at = whole.seconds * moment / 60
        result = short(faults=[mh.Die(1, at), mh.Die(2, at * 1.01), mh.Die(3, at * 1.02)], steps=1)
        assert result.weights_sha256 == expected and len(result.lost) == 3


@pytest.mark.parametrize("rank", [0, 4, 5], ids=["coordinator", "server", "other server"])
def test_without_the_coordinator_or_a_vector_server_the_run_ends_and_names_it(rank):
    whole, ends = short(), 0
    for moment in range(20):
        try:
            result = short(faults=[mh.Die(rank, whole.seconds * moment / 20)])
        except mh.PeerLost as loss:
            assert (loss.rank, loss.why) == (rank, "it died")
            ends += 1
        else:
            assert result.weights_sha256 == whole.weights_sha256
    assert ends >= 19


def test_a_loss_that_is_no_number_names_whose_samples_it_was():
    """Whichever replica computes it: rank 2 sends it in its third step, and is slow."""

    def spoil(self, w, batch):
        return kind.step(self, w, (batch[0] * float("nan"), batch[1]) if (w.rank, w.step) == (2, 2) else batch)

    strategy = Sandblaster(**SMALL)
    kind = type(strategy)
    strategy.__class__ = type(kind.__name__, (kind,), {"step": spoil})
    with pytest.raises(mh.Diverged, match="the loss is nan on rank 2 at step 2") as caught:
        short(strategy, faults=[mh.Slow([2], 50)], steps=4)
    assert (caught.value.rank, caught.value.step) == (2, 2)


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [{}, {"servers": 2}, {"hosts": 1}], ids=str)
@pytest.mark.parametrize("task", [noisy, dropping])
def test_a_resumed_run_equals_one_that_never_stopped(place, task, tmp_path):
    """Where a batch ends; in the middle of one it is used up first, as it would be at the end."""
    knobs = {"batches": 2, "iterations": 2, "history": 3}
    run = {"cluster": mh.Cluster(workers=4, **place), "seed": 5}
    never = mh.train(task(), Sandblaster(**knobs), steps=14, **run)
    saved = mh.train(task(), Sandblaster(**knobs), steps=14, out=tmp_path / "a", checkpoint_every=4, **run)
    assert saved.weights_sha256 == never.weights_sha256
    mh.train(task(), Sandblaster(**knobs), steps=8, out=tmp_path / "b", checkpoint_every=8, **run)
    again = mh.train(task(), Sandblaster(**knobs), steps=14, resume=tmp_path / "b", **run)
    assert again.weights_sha256 == never.weights_sha256
    odd = mh.train(task(), Sandblaster(**knobs), steps=14, out=tmp_path / "c", checkpoint_every=5, **run)
    mh.train(task(), Sandblaster(**knobs), steps=5, out=tmp_path / "d", checkpoint_every=5, **run)
    on = mh.train(
        task(), Sandblaster(**knobs), steps=14, out=tmp_path / "d", checkpoint_every=5, resume=tmp_path / "d", **run
    )
    assert on.weights_sha256 == odd.weights_sha256 != never.weights_sha256


def test_the_history_continues_with_other_servers_and_may_become_shorter(tmp_path):
    knobs = {"batches": 2, "iterations": 2}
    run = {"seed": 5, "checkpoint_every": 8}
    never = mh.train(noisy(), Sandblaster(**knobs), steps=14, seed=5, cluster=mh.Cluster(workers=4))
    four = mh.Cluster(workers=4, servers=3)
    mh.train(noisy(), Sandblaster(**knobs), steps=8, out=tmp_path, cluster=four, **run)
    state = load_checkpoint(tmp_path / "checkpoints").state
    assert state["moves"].item() == len(state["pairs"]) == 8
    again = mh.train(noisy(), Sandblaster(**knobs), steps=14, resume=tmp_path, seed=5, cluster=mh.Cluster(workers=4))
    torch.testing.assert_close(flat(again.weights.values()), flat(never.weights.values()), rtol=0, atol=1e-9)
    kept = []
    shorter = probed(
        Sandblaster(history=3, **knobs), restored=lambda s, w: w.rank or kept.append(s.coordinator.history)
    )
    mh.train(noisy(), shorter, steps=14, resume=tmp_path, seed=5, cluster=mh.Cluster(workers=4))
    (history,) = kept
    assert [pair.number for pair in history.pairs] == [11, 12, 13] and len(state["pairs"]) == 8

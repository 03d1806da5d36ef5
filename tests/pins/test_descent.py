"""Card 9, Hogwild!, by a model that writes its own gradient: the same as by autograd, up to how sums are rounded."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset
from toys import probed

import manyhands as mh
from manyhands.rules import Adagrad, Momentum, Sgd, chain
from manyhands.rules.clip import ClipValue
from manyhands.run.join import Hands
from manyhands.tasks.sparse import Logistic
from manyhands.virtual.world import simulate

FEATURES = 20


def by_autograd(z, y):
    """The same loss by another name: the model does not know it."""
    return binary_cross_entropy_with_logits(z, y)


def task(loss=binary_cross_entropy_with_logits, dtype=torch.float32, batch_size=3):
    """Features are shared within and between mini-batches; the last two never come."""
    random = torch.Generator().manual_seed(0)
    v = torch.randint(FEATURES - 2, (24, 4), generator=random)
    x = torch.randn(24, 4, generator=random, dtype=dtype)
    data = TensorDataset(v, x, (torch.arange(24) % 2).to(dtype))
    return mh.Task(lambda: Logistic(FEATURES).to(dtype), data, loss, batch_size)


def weights(strategy, given, **run):
    (w,) = mh.train(given, strategy, **run).weights.values()
    return w.flatten()


def both(strategy, dtype=torch.float32, **run):
    """By the model itself, and by autograd."""
    return [weights(strategy(), task(loss, dtype), **run) for loss in (binary_cross_entropy_with_logits, by_autograd)]


CASES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-13)], ids=["float32", "float64"]
)


@CASES
@pytest.mark.parametrize("lr", [0.5, lambda samples: 0.5 / (1 + samples)], ids=["constant", "schedule"])
def test_one_worker_gives_the_same_weights_both_ways(dtype, tolerance, lr):
    own, ordinary = both(lambda: mh.hogwild(rule=Sgd(lr)), dtype, cluster=mh.Cluster(workers=1), steps=40)
    assert (own - ordinary).abs().max() <= tolerance and own.abs().max() > 0.1


@CASES
@pytest.mark.parametrize("order", sorted(set(permutations([0, 0, 1, 1]))))
def test_two_workers_write_what_they_have_read_before(dtype, tolerance, order):
    """Each computes on what was there when it began, whoever has written since."""
    cluster = mh.Cluster(workers=2, order=order)
    own, ordinary = both(lambda: mh.hogwild(lr=0.5), dtype, cluster=cluster)
    assert (own - ordinary).abs().max() <= tolerance and own.any()


RULES = {
    "sgd": (lambda: mh.hogwild(lr=0.5), True),
    "decay": (lambda: mh.hogwild(rule=Sgd(0.5, weight_decay=0.1)), False),
    "momentum": (lambda: mh.hogwild(rule=Momentum(0.5)), False),
    "adagrad": (lambda: mh.hogwild(rule=Adagrad(0.5)), False),
    "chain": (lambda: mh.hogwild(rule=chain(ClipValue(0.01), Sgd(0.5))), False),
    "hogbatch": (lambda: mh.hogbatch(lr=0.5), False),
}


@pytest.mark.parametrize("rule", RULES)
def test_only_plain_sgd_on_the_shared_weights_is_left_to_the_model(rule):
    strategy, expected = RULES[rule]
    descends = []
    watched = probed(strategy(), setup=lambda s, w: descends.append(s.descending is not None))
    own = weights(watched, task(), cluster=mh.Cluster(workers=1), steps=6)
    ordinary = weights(strategy(), task(by_autograd), cluster=mh.Cluster(workers=1), steps=6)
    assert descends == [expected]
    assert (own - ordinary).abs().max() <= 2e-6 and own.any()


def test_another_loss_is_left_to_autograd():
    descends = []
    for loss in (binary_cross_entropy_with_logits, by_autograd, None):
        given = replace(task(), loss=loss, gradient=gradient if loss is None else None)
        strategy = probed(mh.hogwild(), setup=lambda s, w: descends.append(s.descending is not None))
        mh.train(given, strategy, cluster=mh.Cluster(workers=1), steps=1)
    assert descends == [True, False, False]


def gradient(model, v, x, y):
    return torch.zeros(()), {"table.weight": torch.zeros(FEATURES, 1)}


def test_an_update_reads_and_writes_its_support_only():
    """Other weights are NaN, and so is the whole flat gradient: whoever read one would spread it."""
    seen = []

    def poison(s, w):
        s.weights[0][-2:] = torch.nan
        w.flat.groups[0].outgoing.fill_(torch.nan)

    def look(s, w):
        seen.append((s.weights[0].isnan().nonzero().flatten().tolist(), w.flat.groups[0].outgoing.isnan().all().item()))

    strategy = probed(mh.hogwild(lr=0.5), setup=poison, step=look)
    result = mh.train(task(), strategy, cluster=mh.Cluster(workers=1), steps=5)
    assert seen == [([FEATURES - 2, FEATURES - 1], True)] * 5
    assert result.final_loss < 1


def test_updates_are_counted_as_any_other():
    counts = []
    for loss in (binary_cross_entropy_with_logits, by_autograd):
        strategy = probed(mh.hogwild(), finish=lambda s, w: counts.append(list(s.slices[0].counts)))
        mh.train(task(loss), strategy, cluster=mh.Cluster(workers=1), steps=7)
    assert counts == [[7], [7]]


def test_the_time_of_an_update_is_that_of_its_support():
    few, many = (
        mh.train(
            replace(task(), model=lambda size=size: Logistic(size), work=1),
            mh.hogwild(),
            cluster=mh.Cluster(workers=1),
            steps=1,
        ).seconds
        for size in (FEATURES, 100_000)
    )
    assert few == many > 0


# -- in your own loop ------------------------------------------------------------------------------


def looped(step):
    """The weights after a walk over the data, step(hands, *fields) by step."""

    def run(transport):
        net = Logistic(FEATURES)
        with Hands(transport, net, strategy=mh.hogwild(lr=0.5), loss=binary_cross_entropy_with_logits) as hands:
            for batch in zip(*(field.split(3) for field in task().data.tensors), strict=True):
                step(hands, *batch)
        return net.table.weight.detach()

    (w,) = simulate(mh.Cluster(workers=1), run).results
    return w


def test_fields_with_names_are_left_to_autograd(monkeypatch):
    descents, real = [], Logistic.descend
    monkeypatch.setattr(Logistic, "descend", lambda self, *fields: descents.append(1) or real(self, *fields))
    by_place = looped(lambda hands, v, x, y: hands.step(v, x, y))
    assert len(descents) == 8
    by_name = looped(lambda hands, v, x, y: hands.step(values=x, features=v, label=y))
    assert len(descents) == 8
    assert (by_place - by_name).abs().max() <= 2e-6 and by_name.any()

"""Cards 4b, 4c, 4d, 13, 14 and 15: methods for late gradients, pinned on toy T wherever its weights are kept."""

import math

import pytest
import torch
from toys import COPIES, PLACES, SCHEDULE_A, WHERE, toy_t

import manyhands as mh
from manyhands.core.rule import UpdateContext
from manyhands.rules import AdaptiveDamping, Momentum, Sgd, StalenessAware, TotalMomentum, chain
from manyhands.servers.shard import Shard


@pytest.fixture
def updates(monkeypatch):
    """What the shards held after each update; every copy of w must be the same everywhere."""
    values, update = {}, Shard._update

    def noted(shard, group, read):
        update(shard, group, read)
        for weight_slice in shard.slices:
            assert torch.equal(weight_slice.weights, weight_slice.weights[:1].expand_as(weight_slice.weights))
            values.setdefault(weight_slice.span, []).append(weight_slice.weights[0].item())

    monkeypatch.setattr(Shard, "_update", noted)

    def run(strategy, where="co-located", order=SCHEDULE_A, task=None):
        values.clear()
        cluster = mh.Cluster(workers=2, order=order, **PLACES[where])
        mh.train(task or toy_t(copies=COPIES), strategy, cluster=cluster)
        first, *others = values.values()
        assert sum(span.numel for span in values) == COPIES
        assert all(other == first for other in others), "shards may not differ here"
        return first

    return run


def asgd():
    return mh.downpour(rule=Sgd(0.1))


def close(*values):
    return pytest.approx(list(values), abs=1e-9)


# -- card 14: DC-ASGD -------------------------------------------------------------------------------------


@WHERE
def test_dc_asgd_on_schedule_a(where, updates):
    assert updates(mh.dc_asgd(lr=0.1), where) == close(0.1, 0.6856, 0.773702656, 1.2290319802)


@WHERE
def test_dc_asgd_adaptive_with_one_mean_square_on_the_server(where, updates):
    values = updates(mh.dc_asgd(lr=0.1, adaptive=True), where)
    assert values == close(0.1, 0.1702874515, 0.2517900728, 0.5306482381)


@WHERE
def test_dc_asgd_adaptive_with_a_mean_square_per_worker(where, updates):
    values = updates(mh.dc_asgd(lr=0.1, adaptive=True, mean_squares=2), where)
    assert values == close(0.1, 0.1633437003, 0.2187516056, 0.5903109730)


UNEVEN = [0, 1, 1, 0, 0]
"""In schedule A the weights before the last update are those that the worker saw; here they are not always."""

COMPENSATIONS = {
    "ours": lambda g, w, bak, last: g * g * (w - bak),
    "one backup for all": lambda g, w, bak, last: g * g * (w - last),
    "|g| for g^2": lambda g, w, bak, last: abs(g) * (w - bak),
    "none": lambda g, w, bak, last: 0.0,
}


def by_hand(compensation):
    """Asynchronous SGD on toy T in plain Python."""
    gradients = [lambda w: w - 1, lambda w: 2 * (w - 3)]
    w, last, bak, found = 0.0, 0.0, [0.0, 0.0], []
    for k in UNEVEN:
        g = gradients[k](bak[k])
        w, last = w - 0.1 * (g + 0.04 * compensation(g, w, bak[k], last)), w
        bak[k] = w
        found.append(w)
    return found


def test_known_mistakes_have_other_numbers(updates):
    values = updates(mh.dc_asgd(lr=0.1), order=UNEVEN)
    alike = {name: by_hand(compensation) == close(*values) for name, compensation in COMPENSATIONS.items()}
    assert alike == {name: name == "ours" for name in COMPENSATIONS}


@WHERE
@pytest.mark.parametrize("adaptive", [False, True])
def test_without_other_updates_in_between_it_is_an_ordinary_step(where, adaptive, updates):
    alone = [1, 1, 1]
    strong = mh.dc_asgd(lr=0.1, strength=50.0, adaptive=adaptive)
    assert updates(strong, where, alone) == updates(asgd(), where, alone) == close(0.6, 1.08, 1.464)


@WHERE
@pytest.mark.parametrize("strength", [0.0, 0.04, 5.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_one_worker_is_sequential_sgd_for_any_strength(digits64, where, adaptive, strength):
    cluster = mh.Cluster(workers=1, **PLACES[where])
    compensated = mh.dc_asgd(lr=0.1, strength=strength, adaptive=adaptive)
    result, plain = (mh.train(digits64, one, cluster=cluster, steps=6) for one in (compensated, asgd()))
    assert result.weights_sha256 == plain.weights_sha256


# -- card 15 and 4d: staleness-aware, DynSGD -----------------------------------------------------------------


@WHERE
def test_staleness_divides_the_rate(where, updates):
    assert updates(mh.staleness_aware(lr=0.1), where, [0, 0, 1]) == close(0.1, 0.19, 0.49)


@WHERE
def test_two_workers_in_turn_are_never_staler_than_one(where, updates):
    assert updates(mh.staleness_aware(lr=0.1), where) == updates(asgd(), where) == close(0.1, 0.7, 0.79, 1.25)


@WHERE
def test_dyn_sgd_counts_the_gradients_own_update_too(where, updates):
    assert updates(mh.dyn_sgd(lr=0.1), where) == close(0.1, 0.4, 0.445, 0.705)
    assert updates(mh.dyn_sgd(lr=0.1), where, [0, 0, 1]) == close(0.1, 0.19, 0.39)


@pytest.mark.parametrize("where", ["one server", "co-located", "shared"])
def test_in_lock_step_nothing_is_stale(digits64, where):
    cluster = mh.Cluster(workers=3, **PLACES[where])
    rules = [Sgd(0.1), chain(StalenessAware(), Sgd(0.1))]
    plain, aware = (mh.train(digits64, mh.bsp_server(rule=rule), cluster=cluster, steps=4) for rule in rules)
    assert plain.weights_sha256 == aware.weights_sha256


# -- card 4b and 4c: AGN, ADAG ---------------------------------------------------------------------------------

TWO_AND_TWO = [0, 0, 1, 1]


@WHERE
def test_agn_pushes_the_mean_of_its_steps(where, updates):
    assert updates(mh.agn(lr=0.1, period=2), where, TWO_AND_TWO) == close(0.095, 0.635)


def test_without_the_division_it_is_a_zealous_downpour(updates):
    zealous = mh.downpour(rule=Sgd(0.1), n_fetch=2, n_push=2, phase="end", local_lr=0.1)
    assert updates(zealous, order=TWO_AND_TWO) == close(0.19, 1.27)


def test_the_longer_the_period_the_smaller_the_commits(updates):
    """A worker that has arrived at its own minimum commits its whole way, over lambda."""
    for period in (50, 200):
        (value,) = updates(mh.agn(lr=0.1, period=period), order=[0] * period)
        assert value == pytest.approx((1 - 0.9**period) / period, abs=1e-9)


def test_what_is_left_at_the_end_is_the_mean_of_what_there_is(updates):
    assert updates(mh.agn(lr=0.1, period=2), order=[0, 0, 1]) == close(0.095, 0.695)


@WHERE
def test_adag_damps_what_others_have_moved(where, updates):
    values = updates(mh.adag(lr=0.1, period=2), where, TWO_AND_TWO)
    assert values == close(0.095, 0.5902992433)
    assert (values[1] - values[0]) / 0.54 == pytest.approx(0.9172208209, abs=1e-9)


@WHERE
def test_adag_is_agn_without_staleness_or_if_gamma_is_unbounded(where, updates):
    unbounded, agn = mh.adag(lr=0.1, period=2, gamma=math.inf), mh.agn(lr=0.1, period=2)
    assert updates(unbounded, where, TWO_AND_TWO) == updates(agn, where, TWO_AND_TWO)
    alone = [1, 1, 1, 1]
    assert updates(mh.adag(lr=0.1, period=2), where, alone) == updates(agn, where, alone)


def test_adag_damps_coordinate_by_coordinate():
    """A norm over all of them, as the thesis writes it, would damp both alike."""
    w = torch.tensor([1.0, 0.0], dtype=torch.float64)
    at = UpdateContext(w, seen=torch.zeros(2, dtype=torch.float64))
    assert AdaptiveDamping(0.5)(torch.ones(2, dtype=torch.float64), at).tolist() == pytest.approx([1 / 3, 1])


# -- item 3 of the test matrix: one schedule, many implementations, the same floats ------------------------------

SAME = {
    "dc-asgd, lambda = 0": lambda: mh.dc_asgd(lr=0.1, strength=0.0),
    "dc-asgd adaptive, lambda = 0": lambda: mh.dc_asgd(lr=0.1, strength=0.0, adaptive=True),
    "staleness-aware": lambda: mh.staleness_aware(lr=0.1),
    "agn, lambda = 1": lambda: mh.agn(lr=0.1, period=1),
    "adag, lambda = 1, gamma unbounded": lambda: mh.adag(lr=0.1, period=1, gamma=math.inf),
    "momentum 0": lambda: mh.asgd_momentum(lr=0.1, momentum=0.0),
    "total momentum of 2 workers": lambda: mh.asgd_momentum(lr=0.1, total=0.5),
}
UNLIKE = {
    "dc-asgd": lambda: mh.dc_asgd(lr=0.1),
    "dyn-sgd": lambda: mh.dyn_sgd(lr=0.1),
    "adag": lambda: mh.adag(lr=0.1, period=1),
    "momentum": lambda: mh.asgd_momentum(lr=0.1, momentum=-0.1),
}


@WHERE
def test_all_that_should_be_asgd_is_asgd_bit_for_bit(digits64, where):
    cluster = mh.Cluster(workers=2, order=SCHEDULE_A * 3, **PLACES[where])
    digests = {name: mh.train(digits64, make(), cluster=cluster).weights_sha256 for name, make in SAME.items()}
    plain = mh.train(digits64, asgd(), cluster=cluster).weights_sha256
    assert digests == dict.fromkeys(SAME, plain)
    others = {mh.train(digits64, make(), cluster=cluster).weights_sha256 for make in UNLIKE.values()}
    assert len(others | {plain}) == len(UNLIKE) + 1, "or the identities would say little"


@pytest.mark.parametrize("method", [*SAME, *UNLIKE])
def test_the_place_of_the_weights_does_not_matter(digits64, method):
    order = [0, 1, 1, 0, 0, 1]
    runs = [
        mh.train(digits64, {**SAME, **UNLIKE}[method](), cluster=mh.Cluster(workers=2, order=order, **place))
        for place in PLACES.values()
    ]
    assert len({run.weights_sha256 for run in runs}) == 1


# -- card 13: asynchrony begets momentum ----------------------------------------------------------------------------


def trajectory(rule, gradient, steps, workers=1):
    """w_1, w_2, ... from w_0 = 1, where `gradient` is given all of w so far."""
    ws, state = [torch.ones(1, dtype=torch.float64)], {"m": torch.zeros(1, dtype=torch.float64)}
    for _ in range(steps):
        at = UpdateContext(ws[-1], state, workers=workers)
        ws.append(ws[-1] + rule(gradient(ws).clone(), at))
    return [w.item() for w in ws[1:]]


def mixture(M):
    """The expected gradient of w²/2 when staleness is geometric; there is none before the start."""
    c = 1 - 1 / M
    return lambda ws: sum((1 - c) * c**lag * w for lag, w in enumerate(reversed(ws)))


def fresh(ws):
    return ws[-1]


def test_delayed_gradients_are_momentum():
    expected = close(0.975, 0.931875, 0.876234375)
    assert trajectory(Sgd(0.1), mixture(4), 3) == expected
    assert trajectory(Momentum(0.1 / 4, 0.75), fresh, 3) == expected
    for M in (2, 3, 16):
        delayed = trajectory(Sgd(0.1), mixture(M), 40)
        assert delayed == close(*trajectory(Momentum(0.1 / M, 1 - 1 / M), fresh, 40))


def test_so_they_are_beside_explicit_momentum():
    """V_{t+1} = (mu + c) V_t - mu c V_{t-1} - eta (1 - c) w_t, with c = 1 - 1/M."""
    found = trajectory(Momentum(0.1, -0.3), mixture(4), 4)
    assert found == close(0.975, 0.939375, 0.894234375, 0.8435496094)
    mu, c, w, v = -0.3, 0.75, [1.0], [0.0, 0.0]
    for _ in range(4):
        v.append((mu + c) * v[-1] - mu * c * v[-2] - 0.1 * (1 - c) * w[-1])
        w.append(w[-1] + v[-1])
    assert found == close(*w[1:])


def test_the_total_is_matched_to_first_order():
    """mu + (1 - 1/M) = mu*: the law of both has the momentum of mu* up to the product of its two parts."""
    for M, total in [(2, 0.9), (4, 0.9), (4, 0.6), (20, 0.9)]:
        rule = TotalMomentum(0.1, total)
        mu = rule._added(UpdateContext(torch.zeros(1), workers=M))
        assert mu + 1 - 1 / M == pytest.approx(total)
        found = trajectory(rule, mixture(M), 6, workers=M)
        assert found == close(*trajectory(Momentum(0.1, mu), mixture(M), 6))


def test_one_worker_is_the_synchronous_run(digits64):
    cluster = mh.Cluster(workers=1)
    ours = mh.train(digits64, mh.asgd_momentum(lr=0.1, total=0.9), cluster=cluster, steps=6)
    plain = mh.train(digits64, mh.bsp(rule=Momentum(0.1, 0.9)), cluster=cluster, steps=6)
    none = mh.train(digits64, mh.asgd_momentum(lr=0.1, total=0.0), cluster=cluster, steps=6)
    sgd = mh.train(digits64, mh.bsp(lr=0.1), cluster=cluster, steps=6)
    assert ours.weights_sha256 == plain.weights_sha256 != none.weights_sha256 == sgd.weights_sha256


def test_torch_would_not_brake():
    with pytest.raises(ValueError, match="momentum"):
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=-0.3)

"""Card 5, EASGD: pinned values on toy T, conservation, identities."""

import re

import pytest
import torch
from toys import number, parabolas, probed, toy_t

import manyhands as mh
from manyhands.codecs import Half, Raw
from manyhands.rules import Nesterov
from manyhands.splits.data import Share

# (x1, x2, c) after 1, 2, 3 steps
SYNCHRONOUS = [(0.1, 0.6, 0), (0.18, 1.02, 0.07), (0.251, 1.321, 0.176)]
# after events of worker 1, 2, 1, 2
ASYNCHRONOUS = [(0.1, 0, 0), (0.1, 0.6, 0), (0.18, 0.6, 0.01), (0.18, 1.021, 0.069)]
GRADIENT_AFTER_THE_MOVE = (0.181, 1.0328)


def ends(task, strategy, **run):
    """Every worker's x and the centre."""
    xs = {}
    strategy = probed(strategy, finish=lambda s, w: xs.setdefault(w.rank, w.flat.groups[0].weights.item()))
    result = mh.train(task, strategy, **run)
    return (*(xs[rank] for rank in sorted(xs)), number(result))


@pytest.mark.parametrize("rate", [{"moving_rate": 0.1}, {"center_rate": 0.2}, {"moving_rate": 0.1, "center_rate": 0.2}])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_synchronous(steps, rate):
    """alpha = 0.1 or, of two workers, beta = 0.2: the one follows from the other."""
    elastic = mh.easgd(lr=0.1, **rate)
    got = ends(toy_t(), elastic, cluster=mh.Cluster(workers=2), steps=steps)
    assert got == pytest.approx(SYNCHRONOUS[steps - 1], abs=1e-9)


@pytest.mark.parametrize("method", [mh.easgd, mh.eamsgd])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_without_a_rate_the_centre_follows_as_in_the_paper(method, asynchronous):
    """beta = 0.9, alpha = beta / P."""
    given = [{}, {"center_rate": 0.9}, {"moving_rate": 0.45}]
    cluster = mh.Cluster(workers=2, order=[0, 1, 0, 1]) if asynchronous else mh.Cluster(workers=2)
    steps = {} if asynchronous else {"steps": 3}
    strategies = [method(lr=0.1, asynchronous=asynchronous, **rate) for rate in given]
    assert len({mh.train(toy_t(), one, cluster=cluster, **steps).weights_sha256 for one in strategies}) == 1


@pytest.mark.parametrize("method", [mh.easgd, mh.eamsgd])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_rates_that_contradict_each_other_are_refused(method, asynchronous):
    elastic = method(center_rate=0.3, moving_rate=0.2, asynchronous=asynchronous)
    words = "center_rate is 0.3, but must be 0.6 = 3 workers x moving_rate 0.2: give only one of the two"
    with pytest.raises(mh.Refused, match=re.escape(words)):
        mh.train(parabolas((0, 0), (0, 0), (0, 0)), elastic, cluster=mh.Cluster(workers=3), steps=1)


def test_a_spring_that_would_throw_the_centre_beyond_its_workers_is_refused():
    words = "moving_rate is 0.3, but must be <= 0.25 = 1 / 4 workers, unless asynchronous"
    with pytest.raises(mh.Refused, match=re.escape(words)):
        mh.train("digits", mh.easgd(moving_rate=0.3), cluster=mh.Cluster(workers=4), steps=1)
    mh.train("digits", mh.easgd(moving_rate=0.25), cluster=mh.Cluster(workers=4), steps=1)


@pytest.mark.parametrize("where", [{"servers": 1}, {}, {"hosts": 1}], ids=["server", "co-located", "shared"])
@pytest.mark.parametrize("events", [1, 2, 3, 4])
def test_asynchronous_by_turns(events, where):
    elastic = mh.easgd(lr=0.1, moving_rate=0.1, asynchronous=True)
    got = ends(toy_t(), elastic, cluster=mh.Cluster(workers=2, order=[0, 1, 0, 1][:events], **where))
    assert got == pytest.approx(ASYNCHRONOUS[events - 1], abs=1e-9)
    assert got[:2] != pytest.approx(GRADIENT_AFTER_THE_MOVE, abs=1e-6)


# -- with a codec -------------------------------------------------------------------------------------

# By hand: 0.1 travels as 1638 / 2^14, a tenth of that comes back as 1310 / 2^17; 0.6 travels as 1229 / 2^11, and a
# tenth of its distance to 1310 / 2^17 comes back as 1934 / 2^15.
E1, E2 = 1310 / 2**17, 1934 / 2**15
IN_FP16 = [(0.1, 0, 0), (0.1, 0.6, 0), (0.19 - E1, 0.6, E1), (0.19 - E1, 1.08 - E2, E1 + E2)]


@pytest.mark.parametrize("where", [{"servers": 1}, {}, {"hosts": 1}], ids=["server", "co-located", "shared"])
@pytest.mark.parametrize("events", [1, 2, 3, 4])
def test_both_sides_move_by_what_was_sent(events, where):
    elastic = mh.easgd(lr=0.1, moving_rate=0.1, asynchronous=True, codec=Half())
    got = ends(toy_t(), elastic, cluster=mh.Cluster(workers=2, order=[0, 1, 0, 1][:events], **where))
    assert got == pytest.approx(IN_FP16[events - 1], abs=1e-14)
    assert events < 3 or got != pytest.approx(ASYNCHRONOUS[events - 1], abs=1e-6)


@pytest.mark.parametrize("codec", [Raw(), Half(), Half("bf16")], ids=repr)
def test_what_the_centre_gains_its_workers_lose_whatever_is_rounded(codec):
    """No gradient at all: there is nothing but the spring."""
    xs = [1 / 3, 500 / 7, -2e-5]
    elastic = mh.easgd(moving_rate=0.3, asynchronous=True, codec=codec)
    probed(elastic, setup=lambda s, w: w.flat.groups[0].weights.fill_(xs[w.rank]))
    *found, c = ends(parabolas((0, 0), (0, 0), (0, 0)), elastic, cluster=mh.Cluster(workers=3, servers=1), steps=5)
    assert sum(found) + c == pytest.approx(sum(xs), rel=1e-14)
    assert 1 < c < 500 / 7


PLACES = [{"servers": 1}, {"servers": 2}, {}, {"hosts": 2}, {"hosts": 1}]


@pytest.mark.parametrize("codec", [Raw(), Half(), Half("bf16")], ids=repr)
@pytest.mark.parametrize("method", [mh.easgd, mh.eamsgd])
def test_wherever_the_centre_is_the_numbers_are_the_same(method, codec):
    """All begin at 0, which is sent as it is: before the first turn it does not matter who comes first."""
    task, order = parabolas((1, 1), (2, 3), (0.7, 2.2), copies=6), [0, 1, 2, 2, 1, 0, 0, 0, 1, 2]
    clusters = [mh.Cluster(workers=3, order=order, **where) for where in PLACES]
    runs = [mh.train(task, method(lr=0.1, asynchronous=True, codec=codec), cluster=one) for one in clusters]
    assert len({run.weights_sha256 for run in runs}) == 1


def test_the_codecs_are_not_the_same(digits64):
    cluster = mh.Cluster(workers=2, order=[0, 1, 0, 1])
    methods = [mh.easgd(lr=0.1, asynchronous=True, codec=codec) for codec in (None, Raw(), Half(), Half("bf16"))]
    raw, also_raw, *others = [mh.train(digits64, method, cluster=cluster).weights_sha256 for method in methods]
    assert raw == also_raw and len({raw, *others}) == 3


def test_half_of_the_bytes_travel_also_of_a_model_of_sizes():
    exchanges, parameters = 3 * 2, 138_357_544
    raw, half = (
        mh.train("vgg16", mh.easgd(asynchronous=True, codec=codec), cluster=mh.Cluster(workers=2, servers=1), steps=3)
        for codec in (Raw(), Half())
    )
    assert raw.bytes - half.bytes == exchanges * parameters * 2 * 2
    assert half.seconds < raw.seconds


# -- the spring alone ---------------------------------------------------------------------------------


def pull_only(**rate):
    """x = (1, 5, -2), c = 4 and no gradient at all: one elastic step."""
    seen = {}

    def begin(s, w):
        w.flat.groups[0].weights.fill_([1.0, 5.0, -2.0][w.rank])
        s.center[0].fill_(4.0)

    elastic = mh.easgd(lr=0.1, **rate)
    probed(elastic, setup=begin, finish=lambda s, w: seen.setdefault(w.rank, w.flat.groups[0].weights.item()))
    result = mh.train(parabolas((0, 0), (0, 0), (0, 0)), elastic, cluster=mh.Cluster(workers=3), steps=1)
    return [seen[rank] for rank in range(3)], number(result)


@pytest.mark.parametrize("rate", [{"center_rate": 0.6}, {"moving_rate": 0.2}])
def test_the_pure_elastic_step(rate):
    xs, c = pull_only(**rate)
    assert xs == pytest.approx([1.6, 4.8, -0.8], abs=1e-9)
    assert c == pytest.approx(2.4, abs=1e-9)
    assert sum(xs) + c == pytest.approx(8, abs=1e-9)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_without_a_spring_workers_are_independent_and_the_centre_rests(asynchronous):
    elastic = mh.easgd(lr=0.1, moving_rate=0, asynchronous=asynchronous)
    got = ends(toy_t(), elastic, cluster=mh.Cluster(workers=2), steps=2, per_worker=True)
    assert got == pytest.approx((0.19, 1.08, 0), abs=1e-9)


def test_the_period_counts_from_the_first_step():
    moves = []
    elastic = probed(mh.easgd(lr=0.1, period=3), move_together=lambda s, w: moves.append(w.step))
    mh.train(toy_t(), elastic, cluster=mh.Cluster(workers=1), steps=7)
    assert moves == [0, 3, 6]


def test_one_worker_without_a_spring_is_plain_sgd(digits64, plain_sgd):
    share = Share(digits64.data, 0, 1, 32, seed=0)
    reference = plain_sgd(digits64, [share.next_batch() for _ in range(5)], lr=0.1)
    last = {}
    elastic = mh.easgd(lr=0.1, moving_rate=0)
    probed(elastic, finish=lambda s, w: last.update(w.named()))
    mh.train(digits64, elastic, cluster=mh.Cluster(workers=1), steps=5)
    for name, w in reference.items():
        assert torch.allclose(last[name], w, rtol=0, atol=1e-12)


# -- with momentum ------------------------------------------------------------------------------------

# after events of worker 1, 2, 1, 2 with delta = 0.9
WITH_MOMENTUM = [(0.1, 0, 0), (0.1, 0.6, 0), (0.261, 0.6, 0.01), (0.261, 1.453, 0.069)]


@pytest.mark.parametrize("where", [{"servers": 1}, {}, {"hosts": 1}], ids=["server", "co-located", "shared"])
@pytest.mark.parametrize("events", [1, 2, 3, 4])
def test_momentum_asynchronous_by_turns(events, where):
    elastic = mh.eamsgd(lr=0.1, momentum=0.9, moving_rate=0.1, asynchronous=True)
    got = ends(toy_t(), elastic, cluster=mh.Cluster(workers=2, order=[0, 1, 0, 1][:events], **where))
    assert got == pytest.approx(WITH_MOMENTUM[events - 1], abs=1e-9)


@pytest.mark.parametrize("rate", [{"moving_rate": 0.1}, {"center_rate": 0.2}])
def test_momentum_synchronous(rate):
    """By hand: v = (0.1, 0.6), then v1 = 0.09 - 0.1 (0.19 - 1) and v2 = 0.54 - 0.2 (1.14 - 3)."""
    elastic = mh.eamsgd(lr=0.1, momentum=0.9, **rate)
    got = ends(toy_t(), elastic, cluster=mh.Cluster(workers=2), steps=2)
    assert got == pytest.approx((0.1 + 0.171 - 0.01, 0.6 + 0.912 - 0.06, 0.07), abs=1e-9)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_without_momentum_it_is_easgd(digits64, asynchronous):
    runs = [
        mh.train(digits64, method(lr=0.1, asynchronous=asynchronous), cluster=mh.Cluster(workers=3), steps=5)
        for method in (mh.easgd, lambda **knobs: mh.eamsgd(momentum=0.0, **knobs))
    ]
    assert runs[0].weights_sha256 == runs[1].weights_sha256


def test_one_worker_without_a_spring_is_nesterov_in_its_first_form(digits64):
    """x + delta v, the point ahead, is what torch's form keeps."""
    cluster, lr, δ, ahead = mh.Cluster(workers=1), 0.05, 0.9, {}

    def look(s, w):
        ahead.update(w.named([p.weights + δ * v for p, v in zip(w.flat.groups, s.velocity, strict=True)]))

    mh.train(digits64, probed(mh.eamsgd(lr=lr, momentum=δ, moving_rate=0.0), step=look), cluster=cluster, steps=6)
    torch_form = mh.train(digits64, mh.bsp(rule=Nesterov(lr, δ)), cluster=cluster, steps=6)
    for name, w in torch_form.weights.items():
        assert torch.allclose(ahead[name], w, rtol=0, atol=1e-10)

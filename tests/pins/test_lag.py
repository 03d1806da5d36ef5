"""The lag of every gradient, by hand, for orders that are prescribed; and what is dropped, apart, ahead or not defined.

order 0 0 1 0      worker 0   |-- g --|-- g --|           |-- g --|        finishes at 1, 2, 4
                   worker 1   |---------- g ----------|                    finishes at 3: 2 updates of others, then
                                                                           worker 0 has read before one of worker 1
"""

import pytest
from toys import SCHEDULE_A, probed, toy_t

import manyhands as mh
from manyhands.report.measures import totals
from manyhands.report.reading import of_lines
from manyhands.rules import Sgd

ORDER = [0, 0, 1, 0]
EIGHT_TIMES = mh.Slow([0], 8)


def steps_of(result):
    """The step lines in the order of time."""
    return sorted((line for line in result.records if line["kind"] == "step"), key=lambda line: line["time"])


def lags(result, rank=None):
    return [line["lag"] for line in steps_of(result) if rank in (None, line["rank"])]


# -- shared memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [mh.hogwild, mh.hogbatch])
@pytest.mark.parametrize(
    ("order", "expected"),
    [([0, 1], [0, 1]), (ORDER, [0, 0, 2, 1]), ([0, 0, 0, 1], [0, 0, 0, 3]), ([0, 1, 0, 0, 1], [0, 1, 1, 0, 2])],
)
def test_on_shared_weights_it_is_the_updates_of_others_since_the_read(method, order, expected):
    result = mh.train(toy_t(), method(lr=0.1), cluster=mh.Cluster(workers=2, order=order))
    assert lags(result) == expected
    assert (result.mean_lag, result.max_lag) == (sum(expected) / len(expected), max(expected))


def test_svrg_counts_inner_steps_and_a_full_step_has_none():
    """The barrier is at 3.3 s. Worker 1 reads u at 6.7 and writes at 10; worker 0 writes at 5.3, 7.3, 9.3 and 11.3."""
    svrg = mh.asysvrg(lr=0.1, full_steps=1, inner_steps=4)
    cluster = mh.Cluster(workers=2, speeds=[1, 0.3])
    result = mh.train(toy_t(), svrg, cluster=cluster, steps=5, per_worker=True)
    assert lags(result, rank=0) == [None, 0, 0, 0, 0]
    assert lags(result, rank=1) == [None, 2, 0, 0, 0]
    assert (result.mean_lag, result.max_lag) == (2 / 8, 2)


# -- peers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (mh.ad_psgd, [0, 0, 2, 1]),
        (lambda: mh.gossip(mode="pairwise"), [0, 0, 2, 1]),
        (lambda: mh.gossip(mode="push"), [0, 0, 2, 1]),
        (lambda: mh.gossip(mode="pull"), [0, 0, 0, 0]),
    ],
)
def test_among_peers_it_is_the_exchanges_that_others_began_since_the_read(strategy, expected):
    result = mh.train(toy_t(), strategy(), cluster=mh.Cluster(workers=2, order=ORDER))
    assert lags(result) == expected


# -- the elastic centre ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", [{"servers": 1}, {}, {"hosts": 1}], ids=["server", "co-located", "shared"])
def test_at_an_elastic_centre_it_is_the_moves_of_others_between_two_own(where):
    """Both move it at 0, worker 0 again at 1 and 2, worker 1 at 4: after two moves of worker 0."""
    elastic = mh.easgd(lr=0.1, moving_rate=0.1, asynchronous=True)
    result = mh.train(toy_t(), elastic, cluster=mh.Cluster(workers=2, order=[0, 0, 0, 1, 1], **where))
    assert lags(result, rank=0) == [0, 1, 0]
    assert lags(result, rank=1) == [1, 2]


def test_a_step_without_an_exchange_has_none():
    elastic = mh.easgd(lr=0.1, period=2, asynchronous=True)
    result = mh.train(toy_t(), elastic, cluster=mh.Cluster(workers=1), steps=4)
    assert lags(result) == [0, None, 0, None]
    assert result.mean_lag == 0


# -- shards ---------------------------------------------------------------------------------------


def test_outcomes_come_with_the_next_read():
    """A push is not answered: what was pushed in a step is known in the next one, and of the last one never."""
    asgd = mh.downpour(rule=Sgd(0.1), prefetch=False)
    result = mh.train(toy_t(), asgd, cluster=mh.Cluster(workers=2, servers=1, order=SCHEDULE_A))
    assert lags(result, rank=0) == [None, 0]
    assert lags(result, rank=1) == [None, 1]


def test_own_updates_count_where_the_weights_do_not_contain_them():
    """Three pushes after one fetch: the second lacks one update, the third lacks two."""
    asgd = mh.downpour(rule=Sgd(0.1), prefetch=False, n_fetch=3, n_push=1)
    result = mh.train(toy_t(), asgd, cluster=mh.Cluster(workers=1, servers=1), steps=7)
    assert lags(result) == [None, None, None, 2, None, None, 2]
    last = steps_of(result)[-1]
    assert (last["applied"], last["lag_sum"]) == (3, 3)
    assert (result.mean_lag, result.max_lag) == (1, 2)


@pytest.mark.parametrize("where", [{"servers": 1}, {"hosts": 1}], ids=["server", "shared"])
def test_they_do_not_count_where_a_cache_has_applied_them(where):
    result = mh.train(toy_t(), mh.ssp(3, lr=0.1, cache=True), cluster=mh.Cluster(workers=1, **where), steps=12)
    assert {lag for lag in lags(result) if lag is not None} == {0}


@pytest.mark.parametrize("where", [{}, {"servers": 2}, {"hosts": 1}], ids=str)
@pytest.mark.parametrize("method", [mh.backup_workers, mh.k_sync])
def test_dropped_gradients_are_counted_apart(method, where):
    result = mh.train("digits", method(), cluster=mh.Cluster(stragglers=EIGHT_TIMES, **where), steps=30)
    assert (result.mean_lag, result.max_lag) == (0, 0), "what is applied is new"
    dropped = [line for line in steps_of(result) if line.get("dropped")]
    assert result.dropped == sum(line["dropped"] for line in dropped) > 0
    assert {line["rank"] for line in dropped} >= {0}
    assert result.dropped_mean_lag == sum(line["dropped_lag_sum"] for line in dropped) / result.dropped >= 1
    row = totals(of_lines(result.records))
    assert (row["dropped"], row["dropped_mean_lag"], row["max_lag"]) == (result.dropped, result.dropped_mean_lag, 0)


def test_shards_of_one_read_may_be_apart():
    """As far as the versions that the shards have sent."""
    read = {}
    strategy = probed(
        mh.downpour(rule=Sgd(0.01), prefetch=False),
        pull=lambda s, w: read.setdefault(w.rank, []).append([client.version for client in s.clients]),
    )
    cluster = mh.Cluster(servers=2, stragglers=EIGHT_TIMES, jitter=0.5)
    result = mh.train("digits", strategy, cluster=cluster, steps=30)
    for rank, versions in read.items():
        lines = [line for line in steps_of(result) if line["rank"] == rank]
        assert [line["apart"] for line in lines] == [max(some) - min(some) for some in versions]
    assert result.max_apart >= 1 and 0 < result.mean_apart < result.max_apart


def test_one_shard_is_not_apart_from_anything():
    result = mh.train(toy_t(), mh.downpour(), cluster=mh.Cluster(workers=2, servers=1), steps=3)
    assert (result.mean_apart, result.max_apart) == (None, None)
    assert not any("apart" in line for line in steps_of(result))


# -- nothing to measure -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", [mh.bsp, mh.d_psgd, mh.diloco, mh.topk_sgd, mh.easgd, mh.sandblaster])
def test_in_lock_step_it_is_zero(method):
    result = mh.train("digits", method(), cluster=mh.Cluster(stragglers=EIGHT_TIMES), steps=6)
    assert method().traits.lag == "always 0"
    assert set(lags(result)) == {0} and (result.mean_lag, result.max_lag) == (0, 0)


def test_bulk_servers_measure_zero():
    result = mh.train("digits", mh.bsp_server(), cluster=mh.Cluster(servers=2, stragglers=EIGHT_TIMES), steps=6)
    assert set(lags(result)) == {None, 0} and result.max_lag == 0


def test_without_common_weights_it_is_not_defined_anywhere():
    result = mh.train("digits", mh.simuparallel(), cluster=mh.Cluster(stragglers=EIGHT_TIMES), steps=6)
    assert set(lags(result)) == {None} and (result.mean_lag, result.max_lag) == (None, None)
    assert result.records[0]["lag"] == "not defined"
    row = totals(of_lines(result.records))
    assert (row["mean_lag"], row["max_lag"]) == (None, None)
    assert "<td>not defined</td>" in result._repr_html_()

"""Card 18, a tree of servers: the pinned gradient, the flat method it equals, what the root gets, who is waited for."""

from collections import Counter

import pytest
import torch
from toys import number, parabolas, toy_t

import manyhands as mh
from manyhands.codecs import Feedback, Half, TopK
from manyhands.consistency import Bulk, Quorum, Stale
from manyhands.core.errors import Refused
from manyhands.rules import Momentum, Sgd
from manyhands.servers.shard import Shard
from manyhands.servers.shard_server import WEIGHTS, ShardServer
from manyhands.strategies.server import Server

PLACES = {"one server": {"servers": 1}, "two servers": {"servers": 2}, "co-located": {}, "one host": {"hosts": 1}}
WHERE = pytest.mark.parametrize("where", PLACES)
SHAPES = [(3, 2), (4, 2), (5, 2), (5, 3), (6, 4)]
STEPS = 4


@pytest.fixture
def versions(monkeypatch):
    """How many updates every span of the weights has received."""
    found, update = Counter(), Shard._update

    def noted(shard, group, read):
        found.update(weight_slice.span for weight_slice in shard.slices)
        update(shard, group, read)

    monkeypatch.setattr(Shard, "_update", noted)
    return found


@pytest.fixture
def pushes(monkeypatch):
    """Everything that was pushed to a server: the client, the lag, and the header."""
    found, take = [], ShardServer._push

    def noted(server, i, pushed, message):
        found.append((i, server._shard.clocks.version - pushed.seen, pushed))
        take(server, i, pushed, message)

    monkeypatch.setattr(ShardServer, "_push", noted)
    return found


def uneven(workers, where, **knobs):
    speeds = [1, 0.7, 2, 1.3, 0.5, 1.1][:workers]
    return mh.Cluster(workers=workers, speeds=speeds, latency="1ms", **PLACES[where], **knobs)


def assert_close(one, other):
    for name, x in one.weights.items():
        assert torch.allclose(x, other.weights[name], rtol=0, atol=1e-12)


# -- the pin --------------------------------------------------------------------------------------


def two_alike():
    """Toy T with a third worker, the second here, that is like the first: the tree is ((W1, W3), W2)."""
    return parabolas((1, 1), (1, 1), (2, 3))


@WHERE
def test_the_mean_is_the_sum_of_sums_over_the_sum_of_counts(where):
    where = PLACES["one server"] if where == "two servers" else PLACES[where]
    result = mh.train(two_alike(), mh.hierarchical_server(lr=1), cluster=mh.Cluster(workers=3, **where), steps=1)
    assert number(result) == pytest.approx(8 / 3, abs=1e-9)


def test_a_mean_of_means_would_be_another(monkeypatch):
    take = ShardServer._push

    def mean(server, i, pushed, message):
        message.tensors = tuple(x / pushed.terms for x in message.tensors)
        take(server, i, pushed._replace(terms=1), message)

    monkeypatch.setattr(ShardServer, "_push", mean)
    cluster = mh.Cluster(workers=3, servers=1)
    assert number(mh.train(two_alike(), mh.hierarchical_server(lr=1), cluster=cluster, steps=1)) == pytest.approx(3.5)


# -- identities -----------------------------------------------------------------------------------


@WHERE
@pytest.mark.parametrize(("workers", "groups"), SHAPES)
def test_a_bulk_tree_of_any_shape_is_bsp_server(workers, groups, where, digits64, versions):
    knobs = {"cluster": uneven(workers, where), "steps": STEPS}
    flat = mh.train(digits64, mh.bsp_server(rule=Momentum(0.1)), **knobs)
    assert set(versions.values()) == {STEPS}
    versions.clear()
    tree = mh.train(digits64, mh.hierarchical_server(groups, rule=Momentum(0.1)), **knobs)
    assert set(versions.values()) == {STEPS}
    assert_close(flat, tree)


@WHERE
@pytest.mark.parametrize("codec", [None, Half(), Feedback(TopK(0.1))], ids=repr)
def test_groups_of_one_are_no_groups(where, codec, digits64):
    """Trees are made of messages, so on one host they equal what workers on hosts of their own do."""
    tree = mh.train(digits64, mh.bsp_server(codec=codec, groups=4), cluster=uneven(4, where), steps=STEPS)
    apart = uneven(4, "co-located" if where == "one host" else where)
    flat = mh.train(digits64, mh.bsp_server(codec=codec), cluster=apart, steps=STEPS)
    assert tree.weights_sha256 == flat.weights_sha256


@WHERE
def test_groups_of_one_are_no_groups_in_downpour_either(where, pushes):
    where = PLACES["one server"] if where == "two servers" else PLACES[where]
    cluster = mh.Cluster(workers=2, order=[0, 1, 0, 1], **where)
    result = mh.train(toy_t(), mh.downpour(rule=Sgd(0.1), groups=2), cluster=cluster)
    assert number(result) == pytest.approx(1.25, abs=1e-9)
    assert [lag for _, lag, _ in pushes] == [0, 1, 1, 1]


def test_without_staleness_ssp_adds_up_all_gradients_of_a_clock(digits64):
    knobs = {"cluster": uneven(5, "two servers"), "steps": STEPS, "per_worker": True}
    flat, tree = (mh.train(digits64, mh.ssp(staleness=0, lr=0.02, groups=groups), **knobs) for groups in (0, 2))
    assert_close(flat, tree)


def test_a_quorum_of_all_groups_is_bulk(digits64):
    knobs = {"cluster": uneven(5, "two servers"), "steps": STEPS, "per_worker": True}
    bulk = mh.train(digits64, mh.hierarchical_server(3), **knobs)
    quorum = mh.train(digits64, Server(Quorum(k=3), Sgd(0.3), groups=3), **knobs)
    assert quorum.weights_sha256 == bulk.weights_sha256


# -- what the root gets ---------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch):
    """The ranks that a server has sent its weights to, apart from the final read."""
    found, send = [], ShardServer._send_weights

    def noted(server, rank, tag, weights):
        found.extend([rank] if tag == WEIGHTS else [])
        return send(server, rank, tag, weights)

    monkeypatch.setattr(ShardServer, "_send_weights", noted)
    return found


@pytest.mark.parametrize(("groups", "clients"), [(0, 6), (2, 2), (4, 4)])
def test_the_root_gets_a_message_per_group_and_answers_as_many(groups, clients, digits64, pushes, answers):
    mh.train(digits64, mh.bsp_server(groups=groups), cluster=mh.Cluster(workers=6, servers=1), steps=STEPS)
    assert len(pushes) == len(answers) == clients * STEPS
    assert sum(pushed.terms for _, _, pushed in pushes) == sum(pushed.batches for _, _, pushed in pushes) == 6 * STEPS


def test_where_the_root_is_the_bottleneck_a_tree_is_faster():
    def seconds(groups):
        cluster = mh.Cluster(workers=16, servers=1, speeds=[100] * 16)
        return mh.train("vgg16", mh.bsp_server(groups=groups), cluster=cluster, steps=2).seconds

    assert seconds(4) < 0.7 * seconds(0)


def test_what_goes_up_in_downpour_is_bounded_by_what_has_been_answered(digits64, pushes):
    slow = mh.Cluster(workers=6, servers=1, latency="20ms")
    mh.train(digits64, mh.downpour(rule=Sgd(0.01), groups=2, n_fetch=4), cluster=slow, steps=12)
    counts = [pushed.terms for _, _, pushed in pushes]
    assert sum(counts) == 6 * 12 and len(counts) < 6 * 12 / 2
    assert max(counts) > 3, "a child that does not read may have several gradients in a sum"


# -- staleness ------------------------------------------------------------------------------------


def test_a_sum_is_as_old_as_the_oldest_read(pushes):
    """Worker 2 reads version 0 and pushes after two updates of the other group, together with worker 3."""
    speeds = [1, 1, 0.3, 0.29]
    cluster = mh.Cluster(workers=4, servers=1, speeds=speeds, latency="200ms")
    rows = [(1, 1), (1, 1), (2, 3), (2, 3)]
    mh.train(parabolas(*rows, seconds=1), mh.downpour(rule=Sgd(0.01), groups=2), cluster=cluster, steps=3)
    slow = [(lag, pushed.seen) for i, lag, pushed in pushes if i == 1]
    assert slow[0][1] == 0 and slow[0][0] >= 2
    seen = [pushed.seen for i, _, pushed in pushes if i == 1]
    assert seen == sorted(seen)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@WHERE
def test_the_gap_between_groups_never_passes_its_bound(staleness, where, digits64):
    cluster = mh.Cluster(workers=5, stragglers=mh.Slow(ranks=[1], factor=5), jitter=0.5, **PLACES[where])
    result = mh.train(digits64, mh.ssp(staleness, lr=0.02, groups=2), cluster=cluster, steps=10)
    steps = [line for line in result.records if "loss" in line]
    assert len(steps) == 5 * 10
    assert max(line["ahead"] for line in steps) <= staleness


# -- stragglers and losses ------------------------------------------------------------------------


def straggling(strategy, task):
    links = {"latency": "1us", "bandwidth": "100Gbit"}
    slow = mh.Cluster(workers=4, servers=1, stragglers=mh.Slow(ranks=[1], factor=5), **links)
    result = mh.train(task, strategy, cluster=slow, steps=12)
    return Counter(line["rank"] for line in result.records if "loss" in line), result


def test_a_straggler_holds_up_all_workers_only_in_bulk(digits64):
    taken, slow = straggling(mh.hierarchical_server(), digits64)
    assert set(taken.values()) == {12}
    calm = mh.train(digits64, mh.hierarchical_server(), cluster=mh.Cluster(workers=4, servers=1), steps=12)
    assert slow.weights_sha256 == calm.weights_sha256


def test_a_straggler_holds_up_its_group_in_ssp(digits64):
    taken, _ = straggling(mh.ssp(staleness=3, lr=0.02, groups=2), digits64)
    assert taken[0] - taken[1] <= 1 and taken[2] - taken[3] <= 1, "inside a group all are in step"
    assert 2 <= taken[2] - taken[0] <= 4


def test_a_straggler_holds_up_no_worker_in_downpour(digits64):
    taken, _ = straggling(mh.downpour(rule=Sgd(0.02), groups=2), digits64)
    assert taken[0] > 2 * taken[1] and taken[2] > 2 * taken[1]


TOLERANT = {
    "downpour": lambda: mh.downpour(rule=Sgd(0.02), groups=2),
    "ssp": lambda: mh.ssp(lr=0.02, groups=2),
    "softsync": lambda: mh.softsync(groups=2),
}


def dying(strategy, task, rank, where):
    calm = mh.train(task, strategy(), cluster=mh.Cluster(workers=4, **PLACES[where]), steps=12)
    cluster = mh.Cluster(workers=4, faults=[mh.Die(rank, at=calm.seconds / 4)], **PLACES[where])
    return mh.train(task, strategy(), cluster=cluster, steps=12)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("method", TOLERANT)
def test_a_lost_child_is_dropped_from_its_group(method, rank, digits64):
    result = dying(TOLERANT[method], digits64, rank, "two servers")
    assert result.lost == [(rank, "it died")]
    steps = [line for line in result.records if "loss" in line]
    assert 4 * 12 - 1 <= len(steps) <= 4 * 12
    sibling = rank - 1
    assert max(line["time"] for line in steps if line["rank"] == sibling) > result.seconds / 2


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("method", TOLERANT)
def test_a_worker_with_an_aggregator_ends_the_run(method, rank, digits64):
    with pytest.raises(mh.PeerLost, match=f"rank {rank} is lost: it died"):
        dying(TOLERANT[method], digits64, rank, "two servers")


@WHERE
@pytest.mark.parametrize("rank", range(4))
def test_any_lost_worker_ends_a_bulk_run(rank, where, digits64):
    with pytest.raises(mh.PeerLost, match=f"rank {rank} is lost: it died"):
        dying(mh.hierarchical_server, digits64, rank, where)


@pytest.mark.parametrize("method", TOLERANT)
def test_the_same_seed_gives_the_same_bits(method, digits64):
    cluster = uneven(5, "two servers", jitter=0.5)
    one, two = (mh.train(digits64, TOLERANT[method](), cluster=cluster, steps=8, seed=3) for _ in range(2))
    assert one.weights_sha256 == two.weights_sha256
    assert [line for line in one.records if "loss" in line] == [line for line in two.records if "loss" in line]


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [None, Feedback(TopK(0.1))], ids=["raw", "feedback"])
@WHERE
def test_a_resumed_tree_equals_one_that_never_stopped(where, codec, digits64, tmp_path):
    def run(steps=6, **more):
        strategy = mh.hierarchical_server(rule=Momentum(0.05), codec=codec)
        return mh.train(digits64, strategy, cluster=uneven(5, where), steps=steps, seed=5, **more)

    never = run()
    assert run(out=tmp_path / "whole", checkpoint_every=2).weights_sha256 == never.weights_sha256
    run(steps=2, out=tmp_path / "half", checkpoint_every=2)
    assert run(resume=tmp_path / "half").weights_sha256 == never.weights_sha256


@pytest.mark.parametrize("method", TOLERANT)
def test_others_continue_from_a_checkpoint_with_a_tree_or_without(method, digits64, tmp_path):
    knobs = {"cluster": uneven(5, "two servers"), "seed": 5}
    mh.train(digits64, TOLERANT[method](), steps=6, out=tmp_path, checkpoint_every=3, **knobs)
    for groups in (0, 2, 3):
        strategy = TOLERANT[method]()
        strategy.groups = groups
        result = mh.train(digits64, strategy, steps=12, resume=tmp_path, **knobs)
        assert len([line for line in result.records if "loss" in line]) == 5 * 6
        assert all(x.isfinite().all() for x in result.weights.values())


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: mh.hierarchical_server(4), "groups is 4, but must be <= 3, the number of workers"),
        (lambda: mh.hierarchical_server(1), "groups is 1, but must be >= 2"),
        (lambda: mh.hierarchical_server(0), "groups is 0, but must be >= 2"),
        (lambda: mh.downpour(groups=1), "groups is 1, but must be >= 2, or 0 for none"),
        (lambda: mh.ssp(groups=-1), "groups is -1, but must be >= 2, or 0 for none"),
        (lambda: mh.ssp(cache=True, groups=2), "groups is 2, but must be 0 with a cache"),
        (
            lambda: Server(Bulk(), mh.dc_asgd().rule, groups=2),
            "groups is 2, and the sum of a group was not computed at any",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(Refused, match=words):
        mh.train(two_alike(), make(), cluster=mh.Cluster(workers=3), steps=1)


def test_ssp_with_a_memory_at_the_root_learns(digits64):
    strategy = Server(Stale(1), Momentum(0.01), groups=2)
    result = mh.train(digits64, strategy, cluster=mh.Cluster(workers=4), steps=60)
    assert result.final_loss < 1.0

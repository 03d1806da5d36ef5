"""Two servers for a shard: whenever one of them dies, nothing is lost and nothing is counted twice."""

import random
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.codecs import Feedback, Raw, TopK
from manyhands.consistency import Free
from manyhands.core.errors import Refused
from manyhands.core.worker import Worker
from manyhands.rules import Momentum, Sgd, Torch
from manyhands.runtime.checkpoint import load_checkpoint
from manyhands.servers import ServerSetup, connect, serve
from manyhands.strategies.server import Server
from manyhands.virtual.world import simulate
from repeats import diagonals

WORKERS, STEPS = 3, 4
CLUSTER = {"workers": WORKERS, "speeds": [1, 0.6, 1.4], "jitter": 0.2, "latency": "300us", "bandwidth": "10Mbit"}


class Counter(nn.Module):
    """f(w) = -sum of w: with plain SGD of rate 1 every weight counts the gradients that were applied to it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(12, dtype=torch.float64))

    def forward(self, x):
        return -(self.w.sum() * x).mean()


def counting():
    return mh.Task(Counter, TensorDataset(torch.ones(24, dtype=torch.float64)), batch_size=1, work=2e7)


def learning():
    """A linear map, learned by a model whose weights tell everything that was ever applied to them."""
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(48, 4, generator=noise)
    y = x @ torch.randn(4, 2, generator=noise)
    model = lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))  # noqa: E731
    return mh.Task(model, TensorDataset(x, y), mse_loss, batch_size=4, work=2e7)


def run(strategy, task=learning, servers=3, faults=(), steps=STEPS, train=None, **cluster):
    machines = mh.Cluster(**{**CLUSTER, "servers": servers, "faults": faults, **cluster})
    return mh.train(task(), strategy, cluster=machines, steps=steps, seed=3, **(train or {}))


def moments(seconds, count=30):
    """Instants from before the first message until after the last."""
    return [1.05 * seconds * moment / count for moment in range(count)]


def counts(result):
    """How often each weight was updated; shards may differ if a worker died between two of them."""
    (weights,) = result.weights.values()
    return weights.tolist()


def steps_of(result):
    return [line for line in result.records if "loss" in line]


COUNTED = {
    "ssp": lambda: mh.ssp(rule=Sgd(1.0), staleness=1, replicas=2),
    "ssp in lock step": lambda: mh.ssp(rule=Sgd(1.0), staleness=0, replicas=2),
    "ssp with a cache": lambda: mh.ssp(rule=Sgd(1.0), staleness=2, cache=True, replicas=2),
    "downpour": lambda: mh.downpour(rule=Sgd(1.0), replicas=2),
    "downpour in periods": lambda: mh.downpour(rule=Sgd(1.0), n_fetch=3, n_push=2, local_lr=0.0, replicas=2),
    "dc_asgd": lambda: mh.dc_asgd(strength=0.0, rule=Sgd(1.0), replicas=2),
}
"""Methods whose weights count mini-batches."""
IN_FLIGHT = {"ssp with a cache": 3, "downpour in periods": 6}
"""How many mini-batches may be lost with a worker, if not one: those whose push was not answered yet."""
BULK = {
    "sgd": lambda: mh.bsp_server(replicas=2),
    "momentum": lambda: mh.bsp_server(rule=Momentum(0.05), replicas=2),
    "a rule that remembers": lambda: mh.bsp_server(rule=Torch("AdamW", lr=0.01), replicas=2),
    "a codec that remembers": lambda: mh.bsp_server(codec=Feedback(TopK(0.2)), shard="layer", replicas=2),
}


# -- no rank dies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [2, 3])
@pytest.mark.parametrize("rule", [lambda: Sgd(0.1), lambda: Torch("AdamW", lr=0.01)], ids=["sgd", "torch"])
def test_a_second_copy_changes_no_bit_of_a_bulk_run(rule, servers):
    one, two = (run(mh.bsp_server(rule=rule(), replicas=n), servers=servers) for n in (1, 2))
    assert one.weights_sha256 == two.weights_sha256


@pytest.mark.parametrize("method", [mh.ssp, mh.downpour, mh.dc_asgd, mh.adag])
def test_nor_of_what_a_lone_worker_does(method):
    one, two = (run(method(replicas=n), servers=2, workers=1, speeds=None) for n in (1, 2))
    assert one.weights_sha256 == two.weights_sha256


@pytest.mark.parametrize("method", [mh.ssp, mh.downpour, mh.dc_asgd])
def test_nor_of_what_happens_in_a_given_order(method):
    def in_order(n):
        cluster = mh.Cluster(workers=2, servers=2, order=[0, 1, 1, 0, 1, 0, 0, 1])
        return mh.train(learning(), method(replicas=n), cluster=cluster, seed=3)

    assert in_order(1).weights_sha256 == in_order(2).weights_sha256


def test_every_gradient_travels_twice_and_every_answer_waits_for_a_round_trip():
    one, two = (run(mh.bsp_server(replicas=n), jitter=0) for n in (1, 2))
    weights = sum(x.nbytes for x in one.weights.values())
    assert two.bytes_sent - one.bytes_sent == WORKERS * STEPS * weights
    assert two.seconds - one.seconds > STEPS * 2 * 300e-6


# -- a server dies, at any moment -------------------------------------------------------------------


@pytest.mark.parametrize("servers", [2, 3])
@pytest.mark.parametrize("method", BULK)
def test_a_bulk_run_without_one_of_its_servers_gives_the_same_bits(method, servers):
    whole = run(BULK[method](), servers=servers)
    times, hurt = moments(whole.seconds, 30 if method == "sgd" else 10), 0
    for number, at in enumerate(times):
        rank = WORKERS + number % servers
        result = run(BULK[method](), servers=servers, faults=[mh.Die(rank, at)])
        assert result.weights_sha256 == whole.weights_sha256, f"rank {rank} died at {at}"
        hurt += bool(result.lost)
    assert hurt > len(times) * 3 // 4


@pytest.mark.parametrize(("method", "servers"), diagonals(2, COUNTED, [2, 3]))
def test_every_mini_batch_counts_once_whichever_server_dies(method, servers):
    whole = run(COUNTED[method](), counting, servers)
    assert counts(whole) == [WORKERS * STEPS] * 12
    times, hurt = moments(whole.seconds, 30 if method in ("ssp", "downpour") else 10), 0
    for number, at in enumerate(times):
        rank = WORKERS + number % servers
        result = run(COUNTED[method](), counting, servers, faults=[mh.Die(rank, at)])
        assert counts(result) == [WORKERS * STEPS] * 12, f"rank {rank} died at {at}"
        assert len(steps_of(result)) == WORKERS * STEPS
        hurt += result.lost == [(rank, "it died")]
    assert hurt > len(times) * 3 // 4


@pytest.mark.parametrize("method", ["ssp", "downpour"])
def test_nothing_is_lost_even_if_a_worker_is_nearer_than_the_backup(method):
    """On the slow link of the backup a copy takes longer than an answer would."""
    far = mh.SlowLink(4, factor=8)
    whole = run(COUNTED[method](), counting, faults=[far])
    for at in moments(whole.seconds, 15):
        result = run(COUNTED[method](), counting, faults=[far, mh.Die(3, at)])
        assert counts(result) == [WORKERS * STEPS] * 12, f"rank 3 died at {at}"


def test_half_of_the_servers_may_die_if_no_two_of_them_held_the_same_shard():
    whole = run(BULK["sgd"](), servers=4)
    for at in moments(whole.seconds * 0.9, 12):
        result = run(BULK["sgd"](), servers=4, faults=[mh.Die(3, at), mh.Stop(5, 0.7 * at)])
        assert result.weights_sha256 == whole.weights_sha256
        assert sorted(rank for rank, _ in result.lost) == [3, 5]


@pytest.mark.parametrize("method", [BULK["sgd"], COUNTED["ssp"], COUNTED["downpour"]], ids=["bulk", "ssp", "downpour"])
def test_without_both_of_its_servers_a_shard_is_lost(method):
    whole = run(method())
    for number, at in enumerate(moments(whole.seconds * 0.8, 12)):
        first, second = [(3, 4), (4, 3), (5, 3)][number % 3]
        with pytest.raises(mh.PeerLost) as caught:
            run(method(), faults=[mh.Die(first, at), mh.Die(second, at + [0, 2e-4, 2e-3][number % 3])])
        assert caught.value.rank in (first, second)


def test_the_remaining_server_logs_that_it_serves_alone(caplog):
    at = run(mh.ssp(replicas=2)).seconds / 3
    run(mh.ssp(replicas=2), faults=[mh.Die(4, at)])
    assert sorted(record.getMessage() for record in caplog.records) == [
        "rank 4 is lost: it died; from now on rank 3 serves shard 0 alone",
        "rank 4 is lost: it died; from now on rank 5 serves shard 1 alone",
    ]


def elastic_moves(faults=()):
    """The moves that a single worker receives when it exchanges with a centre, shard by shard, ten times."""
    moves, setup = [], ServerSetup("size", Free(), Sgd(1.0), Raw(), copies=2)

    def program(t):
        w = Worker(t, counting(), Counter(), seed=0, steps=1, batch_size=1)
        if t.role == "server":
            serve(w, setup)
        else:
            clients = connect(w, setup)
            for turn, client in product(range(10), clients):
                xs = [(torch.full((span.numel,), turn + 1.0, dtype=torch.float64),) for span in client.spans]
                moves.extend(e.tolist() for (e,) in client.exchange(xs, 0.3).moves)
            for client in clients:
                client.done()
        t.leave()

    cluster = mh.Cluster(workers=1, servers=2, faults=faults)
    return moves, simulate(cluster, program).seconds


def test_an_elastic_move_is_made_once_and_answered_alike():
    whole, seconds = elastic_moves()
    assert whole[0] == [0.3] * 6 and whole[2] == pytest.approx([0.3 * 1.7] * 6)
    for number, at in enumerate(moments(seconds)):
        assert elastic_moves([mh.Die(1 + number % 2, at)])[0] == whole


# -- workers die too --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", COUNTED)
def test_a_worker_and_a_server_die_together(method):
    whole = run(COUNTED[method](), counting)
    for number, at in enumerate(moments(whole.seconds * 0.9, 12)):
        worker, server, later = number % 3, 3 + number % 2, [0.0, 1e-4, 5e-4][number % 3]
        faults = [mh.Die(worker, at), mh.Die(server, at + later)][:: 1 if number % 2 else -1]
        result = run(COUNTED[method](), counting, faults=faults)
        certain = len(steps_of(result)) - IN_FLIGHT.get(method, 1)
        assert all(certain <= count <= WORKERS * STEPS and count == int(count) for count in counts(result))
        assert {line["rank"] for line in steps_of(result) if line["time"] > at} <= {0, 1, 2} - {worker}


def test_a_bulk_run_ends_with_the_worker_it_cannot_do_without():
    whole = run(BULK["sgd"]())
    for at in moments(whole.seconds * 0.8, 12):
        with pytest.raises(mh.PeerLost, match="rank 1 is lost"):
            run(BULK["sgd"](), faults=[mh.Die(4, at), mh.Die(1, at + 1e-4)])


@pytest.mark.parametrize("method", ["ssp", "downpour in periods"])
def test_the_lead_and_a_server_may_be_lost_at_any_moment_of_the_end(method):
    """Links of others are slow, so that some have received the last message of the lead and some have not."""
    late = [mh.SlowLink(1, factor=4), mh.SlowLink(4, factor=3)]
    ends = run(COUNTED[method](), counting, faults=late, steps=3).seconds
    answered = 0
    for moment in range(30):
        at = max(0.0, ends + (moment - 15) * 2e-4)
        server = 3 + moment % 3
        faults = [*late, mh.Die(0, at), mh.Die(server, at + [-2e-4, 0, 2e-4][moment % 3])]
        try:
            result = run(COUNTED[method](), counting, faults=faults, steps=3)
        except mh.PeerLost as loss:
            assert loss.rank in (0, server)
        else:
            answered += 1
            certain = WORKERS * 3 - IN_FLIGHT.get(method, 1) - 1
            assert all(certain <= count <= WORKERS * 3 for count in counts(result))
    assert answered > 10


@pytest.mark.parametrize("method", COUNTED)
def test_no_schedule_of_faults_makes_a_run_hang(method):
    until = 1.2 * run(COUNTED[method](), counting).seconds
    outcomes = []
    for seed in range(16):
        draw = random.Random(f"{method} {seed}")
        faults = [draw.choice([mh.Die, mh.Stop, mh.CutLink])(draw.randrange(6), draw.uniform(0, until)) for _ in "12"]
        faults.append(mh.SlowLink(draw.randrange(6), draw.uniform(0, until), factor=draw.uniform(2, 20)))
        try:
            outcomes.append(run(COUNTED[method](), counting, faults=faults))
        except mh.PeerLost as loss:
            assert loss.rank in {fault.rank for fault in faults[:2]}
    assert any(result.lost for result in outcomes)
    assert all(max(counts(result)) <= WORKERS * STEPS for result in outcomes)


# -- checkpoints ------------------------------------------------------------------------------------


def saving(folder):
    return {"out": folder, "checkpoint_every": 2}


@pytest.mark.parametrize("before", [2, 3])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_run_with_two_copies_continues_with_any_number_of_servers(before, after, tmp_path):
    whole = run(mh.bsp_server(rule=Momentum(0.05)))
    run(mh.bsp_server(rule=Momentum(0.05), replicas=2), servers=before, steps=2, train=saving(tmp_path))
    copies = 1 if after == 1 else 2
    again = run(mh.bsp_server(rule=Momentum(0.05), replicas=copies), servers=after, train={"resume": tmp_path})
    assert again.weights_sha256 == whole.weights_sha256


def test_a_server_may_die_while_a_run_is_saved_and_continues(tmp_path):
    strategy = lambda: mh.bsp_server(rule=Momentum(0.05), replicas=2)  # noqa: E731
    whole = run(strategy(), train=saving(tmp_path / "whole"))
    for number, at in enumerate(moments(whole.seconds, 12)):
        folder = tmp_path / str(number)
        result = run(strategy(), faults=[mh.Die(3 + number % 3, at)], train=saving(folder))
        assert result.weights_sha256 == whole.weights_sha256
        saved = load_checkpoint(folder / "checkpoints" / "step-00000004")
        right = load_checkpoint(tmp_path / "whole" / "checkpoints" / "step-00000004")
        assert all(torch.equal(x, right.state[name]) for name, x in saved.state.items())


def test_nor_does_that_hold_up_or_double_what_comes_in_any_order(tmp_path):
    for method in ("ssp", "downpour in periods"):
        whole = run(COUNTED[method](), counting, train=saving(tmp_path / method))
        for number, at in enumerate(moments(whole.seconds, 12)):
            folder = tmp_path / f"{method} {number}"
            result = run(COUNTED[method](), counting, faults=[mh.Die(3 + number % 3, at)], train=saving(folder))
            assert counts(result) == [WORKERS * STEPS] * 12


# -- refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [{"servers": 0}, {"servers": 1}, {"servers": 0, "hosts": 1}])
def test_two_copies_need_two_servers(place):
    servers = place["servers"]
    with pytest.raises(Refused, match=f"^replicas is 2, but must be 1 with {servers} servers: "):
        run(mh.ssp(replicas=2), **place)


def test_there_are_one_or_two_copies():
    with pytest.raises(Refused, match=r"^replicas is 3, but must be 1 or 2$"):
        mh.ssp(replicas=3)


def test_where_one_shard_decides_for_all_there_is_one_copy():
    with pytest.raises(Refused, match=r"^replicas is 2, but must be 1: with .* one shard decides for all$"):
        Server(mh.backup_workers().when, Sgd(0.1), copies=2)

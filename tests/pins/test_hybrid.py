"""Card 23, all-reduce and servers by sparsity: it is bsp, and its bytes are those of the closed forms."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from toys import SECOND, probed

import manyhands as mh
from manyhands.collectives.cost import machine_bytes
from manyhands.core.errors import ManyhandsError, MayNotWait
from manyhands.rules import Adagrad, Adam, ClipNorm, ClipValue, Momentum, Sgd, StepDecay, WeightDecay, chain
from manyhands.run.join import Hands
from manyhands.virtual.world import simulate

ALL_SPARSE, ALL_DENSE = 2.0, 0.0


class Ratings(nn.Module):
    """Who likes what: two sparse tables, a small network on top, and dropout, which must not depend on who waits."""

    def __init__(self, sparse=True, bag=False):
        super().__init__()
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.users = kind(40, 3, sparse=sparse, dtype=torch.float64)
        self.items = nn.Embedding(25, 4, sparse=True, padding_idx=0, dtype=torch.float64)
        self.bag = bag
        layers = [nn.Linear(7, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 1)]
        self.top = nn.Sequential(*layers).double()

    def forward(self, user, item):
        users = self.users(user[:, None] if self.bag else user)
        return self.top(torch.cat([users, self.items(input=item)], 1)).squeeze(1)


def ratings(model=Ratings, samples=60, batch_size=6):
    noise = torch.Generator().manual_seed(3)
    user, item = (torch.randint(0, top, (samples,), generator=noise) for top in (40, 25))
    data = TensorDataset(user, item, torch.randn(samples, generator=noise, dtype=torch.float64))
    return mh.Task(model, data, nn.functional.mse_loss, batch_size=batch_size, name="ratings")


def train(strategy, workers=3, steps=6, task=None, cluster=None, **where):
    cluster = mh.Cluster(workers=workers, **where)
    return mh.train(task or ratings(), strategy, cluster=cluster, steps=steps, seed=1)


def assert_close(one, other):
    assert one.weights.keys() == other.weights.keys()
    for name, w in one.weights.items():
        assert torch.allclose(w, other.weights[name], rtol=0, atol=1e-12), name


# -- it is bsp ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [{}, {"servers": 1}, {"servers": 3}, {"hosts": 1}, {"jitter": 0.5}], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_with_plain_sgd_the_result_is_that_of_bsp(workers, where):
    hybrid = train(mh.hybrid(lr=0.3, threshold=ALL_SPARSE), workers, **where)
    assert_close(hybrid, train(mh.bsp(lr=0.3), workers))


@pytest.mark.parametrize("threshold", [ALL_DENSE, 0.2, ALL_SPARSE])
def test_whatever_the_threshold(threshold):
    """6 of 60 samples touch about 14 % of the users and 22 % of the items."""
    hybrid = train(mh.hybrid(threshold=threshold))
    assert_close(hybrid, train(mh.bsp()))


def test_bags_of_rows_are_tables_too():
    bags = ratings(lambda: Ratings(bag=True))
    assert_close(train(mh.hybrid(threshold=ALL_SPARSE), task=bags), train(mh.bsp(), task=bags))


@pytest.mark.parametrize(
    "rule",
    [
        Sgd(StepDecay(0.3, every=30, factor=0.5)),
        Adagrad(0.1),
        Adagrad(0.1, eps=1e-3),
        chain(ClipValue(0.01), Sgd(0.5)),
        chain(ClipValue(0.01), Adagrad(0.1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", [{}, {"servers": 2}], ids=str)
def test_so_it_is_with_every_rule_that_moves_nothing_without_a_gradient(rule, where):
    """Of rows that come twice the gradients are summed before they are squared or clipped."""
    assert_close(train(mh.hybrid(rule=rule, threshold=ALL_SPARSE), **where), train(mh.bsp(rule=rule)))


class Rows(nn.Module):
    """The loss is the sum of c times the rows of a sample, so a row's gradient is the sum of its c."""

    def __init__(self, rows=4, width=1):
        super().__init__()
        self.table = nn.Embedding(rows, width, sparse=True, dtype=torch.float64)
        nn.init.zeros_(self.table.weight)

    def forward(self, rows, c):
        return (c[..., None] * self.table(rows)).sum()


def rows(*samples, **knobs):
    """Worker k gets the k-th sample: (rows, their c)."""
    fields = [torch.tensor(one) for one in zip(*samples, strict=True)]
    return mh.Task(lambda: Rows(**knobs), TensorDataset(fields[0], fields[1].double()), batch_size=1)


@pytest.mark.parametrize("where", [{}, {"servers": 1}, {"hosts": 1}], ids=str)
def test_rows_that_come_twice_are_summed_and_all_are_divided_by_the_number_of_workers(where):
    task = rows(([0, 0, 1], [1, 2, 4]), ([1, 2, 2], [8, 16, 32]))
    result = train(mh.hybrid(lr=1.0, threshold=ALL_SPARSE), workers=2, steps=1, task=task, **where)
    assert result.weights["table.weight"].flatten().tolist() == [-1.5, -6, -24, 0]


def test_adagrad_squares_the_mean_of_a_row_and_leaves_untouched_rows_alone():
    task = rows(([0, 0, 1], [1, 2, 4]), ([1, 2, 2], [8, 16, 32]))
    result = train(mh.hybrid(rule=Adagrad(0.5), threshold=ALL_SPARSE), workers=2, steps=2, task=task)
    twice = -0.5 * (1 + 1 / 2**0.5)
    assert result.weights["table.weight"].flatten().tolist() == pytest.approx([twice, twice, twice, 0], abs=1e-12)


class Sometimes(Ratings):
    """The users count only if the first item of a mini-batch is even: a table may be unused in a step."""

    def forward(self, user, item):
        users = self.users(user) if item[0] % 2 == 0 else self.users.weight.new_zeros(len(user), 3)
        return self.top(torch.cat([users, self.items(item)], 1)).squeeze(1)


def test_a_table_may_be_unused_in_a_step():
    task = ratings(Sometimes)
    assert_close(train(mh.hybrid(threshold=ALL_SPARSE), steps=9, task=task), train(mh.bsp(), steps=9, task=task))


class Twice(Ratings):
    """The users are looked up twice, some of them only the second time."""

    def forward(self, user, item):
        return super().forward(user, item) + self.users(user.flip(0)[: len(user) // 2].repeat(2)).sum()


def test_a_table_may_be_looked_up_several_times():
    task = ratings(Twice)
    assert_close(train(mh.hybrid(threshold=ALL_SPARSE), task=task), train(mh.bsp(), task=task))


class Recomputed(Ratings):
    """Looks up its embeddings as in a checkpoint: under hooks that belong to the thread, which virtual ranks share."""

    def forward(self, user, item):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return super().forward(user, item)


def test_no_rank_waits_for_rows_inside_a_checkpoint_in_virtual_time():
    with pytest.raises(MayNotWait, match=r"may not wait for rows from rank \d inside hooks of saved tensors"):
        train(mh.hybrid(threshold=ALL_SPARSE), task=ratings(Recomputed))


# -- nothing sparse, nothing dense ----------------------------------------------------------------------


def test_without_tables_it_is_bsp_to_the_last_bit_and_byte(digits64):
    hybrid, bsp = (train(strategy, task=digits64) for strategy in (mh.hybrid(), mh.bsp()))
    assert hybrid.weights_sha256 == bsp.weights_sha256
    assert hybrid.bytes_sent == bsp.bytes_sent


def test_servers_have_nothing_to_do_without_tables(digits64):
    assert_close(train(mh.hybrid(), task=digits64, servers=2), train(mh.bsp(), task=digits64))


@pytest.mark.parametrize("where", [{}, {"servers": 2}, {"hosts": 1}], ids=str)
def test_with_tables_only_there_is_no_collective(where):
    found = []
    task = rows(*[([k, 3 - k], [1 + k, 1]) for k in range(3)])
    strategy = probed(mh.hybrid(threshold=ALL_SPARSE), setup=lambda s, w: found.append(s.dense))
    assert_close(train(strategy, task=task, **where), train(mh.bsp(), task=task))
    assert found == [None] * 3


# -- the choice ---------------------------------------------------------------------------------------


def decided(result):
    """What the record says, rank by rank."""
    lines = [line for line in result.records if "by_shards" in line]
    assert {line["step"] for line in lines} == {1}
    return [(line["by_shards"], line["by_all_reduce"]) for line in sorted(lines, key=lambda line: line["rank"])]


def test_all_workers_decide_by_the_mean_of_what_they_have_measured(caplog):
    """Of 4 rows one worker touches 1 and the other 3: 1/2 on average."""
    task = rows(([0, 0, 0], [1, 1, 1]), ([1, 2, 3], [1, 1, 1]))
    with caplog.at_level(logging.INFO, "manyhands"):
        dense = train(mh.hybrid(threshold=0.5), workers=2, task=task)
        sparse = train(mh.hybrid(threshold=0.51), workers=2, task=task)
    assert decided(dense) == [({}, {"table.weight": 0.5})] * 2
    assert decided(sparse) == [({"table.weight": 0.5}, {})] * 2
    assert [(one.args["by_shards"], one.args["by_all_reduce"]) for one in caplog.records] == [
        decided(dense)[0],
        decided(sparse)[0],
    ]
    assert_close(dense, sparse)


def test_a_table_of_which_every_row_is_touched_is_dense():
    task = rows(*[([0, 1, 2, 3], [1, 2, 3, 4])] * 2, width=8)
    hybrid, bsp = (train(one, workers=2, steps=5, task=task) for one in (mh.hybrid(), mh.bsp()))
    assert decided(hybrid) == [({}, {"table.weight": 1.0})] * 2
    assert hybrid.bytes_sent - bsp.bytes_sent == 2 * 8, "but for what was measured: one number each"


class Open(nn.Module):
    """A table that is also read past its module."""

    def __init__(self, from_step=0):
        super().__init__()
        self.table = nn.Embedding(4, 1, sparse=True, dtype=torch.float64)
        self.runs, self.from_step = 0, from_step

    def forward(self, rows, c):
        self.runs += 1
        around = self.table.weight.sum() if self.runs > self.from_step else 0.0
        return (c[..., None] * self.table(rows)).sum() + around


def test_a_gradient_that_is_not_sparse_at_all_is_dense():
    task = mh.Task(Open, rows(([0], [1]), ([1], [1])).data, batch_size=1)
    hybrid = train(mh.hybrid(threshold=1), workers=2, task=task)
    assert decided(hybrid) == [({}, {"table.weight": 1.0})] * 2
    assert_close(hybrid, train(mh.bsp(), workers=2, task=task))


def test_rows_that_were_never_asked_for_are_not_taken_for_fresh():
    task = mh.Task(lambda: Open(from_step=2), rows(([0], [1]), ([1], [1])).data, batch_size=1)
    with pytest.raises(ManyhandsError, match=r"3 rows of table.weight have a gradient but were never asked for"):
        train(mh.hybrid(threshold=ALL_SPARSE), workers=2, task=task)


# -- bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("N", "dense", "shards", "gathered"), [(2, 2, 0.2, 0.2), (4, 3, 0.3, 0.6), (8, 3.5, 0.35, 1.4)]
)
def test_bytes_of_a_machine_per_step(N, dense, shards, gathered):
    assert machine_bytes("dense", N, 1) == pytest.approx(dense, abs=1e-12)
    assert machine_bytes("sparse, shards", N, 1, 0.1) == pytest.approx(shards, abs=1e-12)
    assert machine_bytes("sparse, all-gather", N, 1, 0.1) == pytest.approx(gathered, abs=1e-12)
    assert machine_bytes("dense, one server", N, 1) == 2 * (N - 1)


def test_with_all_rows_and_two_machines_all_ways_cost_the_same():
    ways = [machine_bytes(how, 2, 1) for how in ("dense", "sparse, shards", "sparse, all-gather", "dense, one server")]
    assert ways == [2, 2, 2, 2]


R, WIDTH = 1600, 16


def disjoint(N):
    """Worker k touches every tenth row, from the k-th: no two the same, and equally many on every server."""
    touched = torch.stack([torch.arange(k, R, 10) for k in range(N)])
    return mh.Task(lambda: Rows(R, WIDTH), TensorDataset(touched, torch.ones(N, R // 10).double()), batch_size=1)


def bytes_of_a_step(strategy, N):
    """What goes in and out of a machine in one step, on average: the last of four."""
    three, four = (train(strategy, N, steps=steps, task=disjoint(N)).bytes_sent for steps in (3, 4))
    return 2 * (four - three) / N


@pytest.mark.parametrize("N", [2, 4, 8])
def test_measured_bytes_are_those_of_the_closed_forms(N):
    """Row numbers come on top: 8 bytes beside every row, be it asked for or pushed."""
    w, numbers = R * WIDTH * 8, R * 8
    assert bytes_of_a_step(mh.bsp(collective="ring"), N) == pytest.approx(machine_bytes("dense", N, w), rel=1e-3)
    expected = machine_bytes("sparse, shards", N, w + numbers, 0.1)
    assert bytes_of_a_step(mh.hybrid(), N) == pytest.approx(expected, abs=1e-6)


# -- slow, lost, resumed ------------------------------------------------------------------------------


def test_a_straggler_costs_time_and_changes_nothing():
    task = replace(ratings(), work=SECOND)
    even, slow = (train(mh.hybrid(), task=task, stragglers=some) for some in ([], mh.Slow(ranks=[0], factor=5)))
    assert slow.weights_sha256 == even.weights_sha256
    assert even.seconds == pytest.approx(6 * 6, rel=1e-3)
    assert slow.seconds == pytest.approx(5 * 6 * 6, rel=1e-3)


@pytest.mark.parametrize("where", [{}, {"servers": 2}, {"hosts": 1}], ids=str)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_lost_worker_ends_the_run(rank, where):
    whole = train(mh.hybrid(threshold=ALL_SPARSE), **where)
    with pytest.raises(mh.PeerLost, match=f"rank {rank} is lost"):
        train(mh.hybrid(threshold=ALL_SPARSE), faults=[mh.Die(rank, whole.seconds / 2)], **where)


@pytest.mark.parametrize("rank", [3, 4])
def test_so_does_a_lost_server(rank):
    whole = train(mh.hybrid(threshold=ALL_SPARSE), servers=2)
    with pytest.raises(mh.PeerLost, match=f"rank {rank} is lost"):
        train(mh.hybrid(threshold=ALL_SPARSE), servers=2, faults=[mh.Die(rank, whole.seconds / 2)])


ONE_HOST, TWO_SERVERS = {"hosts": 1}, {"servers": 2}


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {}), (TWO_SERVERS, TWO_SERVERS), (ONE_HOST, ONE_HOST), ({"servers": 3}, {}), ({}, {"servers": 1})],
    ids=str,
)
def test_a_resumed_run_equals_one_that_never_stopped(before, after, tmp_path):
    """One table is dense by measurement, the other is not; both have a memory, and so has the rest."""

    def run(steps, **settings):
        strategy = mh.hybrid(rule=Momentum(0.1), sparse_rule=Adagrad(0.1), threshold=0.2)
        cluster = mh.Cluster(workers=3, **settings.pop("where"))
        return mh.train(ratings(), strategy, cluster=cluster, steps=steps, seed=1, **settings)

    never = run(7, where=before)
    assert [len(some) for some in decided(never)[0]] == [1, 1]
    run(4, where=before, out=tmp_path, checkpoint_every=2)
    again = run(7, where=after, out=tmp_path, checkpoint_every=2, resume=tmp_path)
    if before.keys() == after.keys():
        assert again.weights_sha256 == never.weights_sha256
    assert_close(again, never)
    assert not [line for line in again.records if "by_shards" in line], "what was decided stays"


# -- refusals -----------------------------------------------------------------------------------------


DECAYS = Sgd(0.1, weight_decay=0.1), chain(Sgd(0.1), WeightDecay(0.1, 0.1))


@pytest.mark.parametrize("rule", [Momentum(0.1), Adam(0.1), *DECAYS, chain(ClipNorm(1.0), Sgd(0.1))], ids=str)
def test_a_rule_that_moves_rows_without_a_gradient_is_refused(rule):
    with pytest.raises(mh.Refused, match=r"users.weight, items.weight is .* must be one that moves nothing without a"):
        train(mh.hybrid(rule=rule))
    hybrid = train(mh.hybrid(rule=rule, sparse_rule=Sgd(0.1)))
    assert hybrid.final_loss is not None, "but for what is dense it is welcome"


class Tied(nn.Module):
    def __init__(self, **knobs):
        super().__init__()
        self.table = nn.Embedding(4, 4, sparse=True, **knobs)
        self.back = nn.Linear(4, 4)
        if not knobs:
            self.back.weight = self.table.weight

    def forward(self, rows, c):
        return self.back(self.table(rows)).sum()


@pytest.mark.parametrize(
    ("knobs", "why"),
    [({}, "table.weight belongs to 2 modules"), ({"max_norm": 1.0}, "max_norm of table.weight is 1.0, but must be N")],
    ids=["tied", "max_norm"],
)
def test_rows_that_others_read_or_move_are_refused(knobs, why):
    task = mh.Task(lambda: Tied(**knobs), rows(([0], [1]), ([1], [1])).data, batch_size=1)
    with pytest.raises(mh.Refused, match=why):
        train(mh.hybrid(), workers=2, task=task)


def test_what_cannot_be_a_threshold_or_measured_is_refused():
    with pytest.raises(mh.Refused, match=r"threshold is -0.1, but must be >= 0"):
        mh.hybrid(threshold=-0.1)
    with pytest.raises(mh.Refused, match="servers is 5, but must be <= 4, the number of parameters"):
        train(mh.hybrid(), task=rows(([0], [1])), workers=1, servers=5)
    with pytest.raises(mh.Refused, match="a task of sizes only has no gradients"):
        train(mh.hybrid(), task=mh.Task(Rows, range(9), sizes_only=True))


def test_a_frozen_table_is_no_table():
    def frozen():
        model = Ratings()
        model.users.weight.requires_grad_(False)
        return model

    task = ratings(frozen)
    hybrid = train(mh.hybrid(threshold=ALL_SPARSE), task=task)
    assert decided(hybrid)[0][0].keys() == {"items.weight"}
    assert_close(hybrid, train(mh.bsp(), task=task))


# -- one's own loop -----------------------------------------------------------------------------------


def own_loop(strategy, look=lambda model: None, servers=0):
    """What every rank of a user's own loop ends with: its model, and what it saw after each step."""

    def program(transport):
        task, seen = ratings(), []
        model = task.build(1)
        with Hands(transport, model, strategy=strategy, loss=task.loss, seed=1) as hands:
            for batch in hands.share(task.data, task.batch_size, steps=6):
                hands.step(*batch)
                seen.append(look(model))
        return model, seen

    return simulate(mh.Cluster(workers=3, servers=servers), program).results


@pytest.mark.parametrize("servers", [0, 2])
def test_in_ones_own_loop_all_ranks_end_with_whole_tables_and_no_hooks(servers):
    ends = own_loop(mh.hybrid(threshold=ALL_SPARSE), servers=servers)
    managed = train(mh.hybrid(threshold=ALL_SPARSE))
    assert len(ends) == 3 + servers
    for model, _ in ends:
        assert all(torch.equal(managed.weights[name], p) for name, p in model.named_parameters())
        assert not any(module._forward_pre_hooks for module in model.modules())


def test_between_two_steps_the_model_reads_the_newest_rows_too():
    def look(model):
        with torch.no_grad():
            out = model.eval()(torch.arange(40), torch.arange(40) % 25)
        model.train()
        return out

    hybrid, bsp = (own_loop(strategy, look) for strategy in (mh.hybrid(threshold=ALL_SPARSE), mh.bsp()))
    for (_, ours), (_, theirs) in zip(hybrid, bsp, strict=True):
        assert len(ours) == 6
        assert torch.allclose(torch.stack(ours), torch.stack(theirs), rtol=0, atol=1e-12)


def test_after_a_failure_the_model_is_its_owners_again():
    models = []

    def program(transport):
        task = ratings()
        models.append(task.build(1))
        with Hands(transport, models[-1], strategy=mh.hybrid(threshold=ALL_SPARSE), loss=task.loss) as hands:
            for batch in hands.share(task.data, task.batch_size, steps=6):
                hands.step(*batch)
                if hands.rank == 1:
                    raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        simulate(mh.Cluster(workers=3), program)
    assert models[1](torch.arange(4), torch.arange(4)).isfinite().all()

"""Teams of real processes: the bits of virtual time, and a lost stage takes its team along while the others finish."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import manyhands as mh
from branched_models import LENGTH, WORDS, Branching, Gpt
from manyhands.run.methods import over_team, strategy_of
from manyhands.strategies.grid import Grid
from pace import assert_within

from .tools import KILLED, LIMIT, Strike, kill, messages, small, struck, taken_by

pytestmark = pytest.mark.timeout(120)

EXACT = {"bsp": mh.bsp, "diloco": partial(mh.diloco, period=3), "easgd": mh.easgd, "d-psgd": mh.d_psgd}
TWO = mh.piped(stages=2, micro_batches=2)


@pytest.mark.parametrize("link", ["shm", "tcp"])
@pytest.mark.parametrize("name", EXACT)
def test_two_teams_of_two_processes_have_the_bits_of_virtual_time(name, link, quickly):
    hosts = 1 if link == "shm" else None
    virtual = mh.train(small(), EXACT[name](), team=TWO, cluster=mh.Cluster(workers=4, hosts=hosts), steps=8)
    real = mh.train(small(), EXACT[name](), team=TWO, workers=4, link=link, steps=8)
    assert real.weights_sha256 == virtual.weights_sha256
    assert real.samples == virtual.samples == 8 * 2 * 4


def struck_team(strategy, strike, team=TWO):
    """A method over teams, one of whose ranks is struck as it begins a step."""
    return struck(over_team(strategy, team), strike)


@pytest.mark.parametrize("rank", [2, 3])
def test_downpour_over_teams_loses_a_stage_and_finishes(rank, tmp_path, quickly):
    """DistBelief: two replicas of two stages, whose parts are on two servers."""
    strike = Strike(kill, tmp_path, rank=rank)
    result = mh.train(small(), struck_team(mh.downpour(lr=0.01), strike), workers=4, servers=2, steps=30)
    assert dict(result.lost) == {rank: KILLED, 5 - rank: f"its team has lost rank {rank}"}
    taken = taken_by(result)
    assert taken[rank] <= 5
    assert taken[0] == taken[1] >= 2 * 30 - 6, "the others have taken over what was left"
    assert all(bool(torch.isfinite(w).all()) for w in result.weights.values())


@pytest.mark.parametrize(("make", "link"), [(mh.ssp, "shm"), (mh.ad_psgd, "tcp"), (mh.gossip, "shm")])
def test_a_team_without_a_member_ends_and_the_others_continue(make, link, tmp_path, caplog, quickly):
    strike = Strike(kill, tmp_path, rank=3)
    result = mh.train(small(), struck_team(make(lr=0.01), strike), workers=4, link=link, steps=30)
    assert dict(result.lost) == {3: KILLED, 2: "its team has lost rank 3"}
    assert {message for message in messages(caplog) if "lost" in message} == {
        f"rank 3 is lost: {KILLED}",
        "rank 2 is lost: its team has lost rank 3",
    }


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_a_method_that_needs_all_workers_names_the_rank_of_the_job(link, tmp_path, quickly):
    strike = Strike(kill, tmp_path, rank=3)
    with pytest.raises(mh.PeerLost, match=f"^rank 3 is lost: {KILLED}$"):
        mh.train(small(), struck_team(mh.bsp(lr=0.01), strike), workers=4, link=link, steps=10**6)
    assert_within(LIMIT, strike.seconds_ago())


def test_a_loss_that_is_no_number_names_the_rank_of_the_job(tmp_path, quickly):
    task = replace(small(), loss=no_number)
    with pytest.raises(mh.Diverged, match=r"nan on rank [13] at step 0"):
        mh.train(task, mh.bsp(), team=TWO, workers=4, steps=10)


def no_number(out, target):
    return (out - target).square().mean() * float("nan")


def test_a_grid_is_made_of_a_method_and_a_team():
    grid = over_team(mh.ssp(staleness=3), "piped(2)")
    assert isinstance(grid, Grid) and grid.replicas(8) == 4


def branching():
    """Numbers of the first stage decide what is computed; they travel as truth values."""
    x = torch.randn(64, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    return mh.Task(lambda: Branching().double(), TensorDataset(x, torch.arange(64) % 3), cross_entropy, batch_size=8)


def tied():
    words = torch.randint(WORDS, (64, LENGTH), generator=torch.Generator().manual_seed(0))
    return mh.Task(lambda: Gpt(tied=True).double(), TensorDataset(words, words.roll(1, 1)), batch_size=8)


@pytest.mark.parametrize("link", ["shm", "tcp"])
@pytest.mark.parametrize("make", [branching, tied])
def test_stages_of_a_model_that_is_no_chain_have_the_bits_of_virtual_time(make, link, quickly):
    team, hosts = mh.piped(stages=3, micro_batches=2), 1 if link == "shm" else None
    virtual = mh.train(make(), mh.bsp(), team=team, cluster=mh.Cluster(workers=3, hosts=hosts), steps=5)
    real = mh.train(make(), mh.bsp(), team=team, workers=3, link=link, steps=5)
    assert real.weights_sha256 == virtual.weights_sha256


def words():
    x = torch.randint(WORDS, (64, LENGTH), generator=torch.Generator().manual_seed(0))
    return mh.Task(Gpt, TensorDataset(x, x.roll(1, 1)), batch_size=8)


def measured(result):
    """The cut that all ranks have in their records."""
    found = [line for line in result.records if "stage_seconds" in line]
    assert all(min(line["stage_seconds"]) > 0 for line in found)
    (cut,) = {line["cut"] for line in found}
    return cut, {line["rank"] for line in found}


@pytest.mark.parametrize("name", ["pipedream", "gpipe"])
def test_where_stages_take_equal_time_is_measured_and_known_to_all_ranks(name, quickly):
    timed = mh.train(words(), strategy_of(f"{name}:balance=time"), workers=2, steps=4)
    cut, ranks = measured(timed)
    named = mh.train(words(), strategy_of(f"{name}:cut={cut}"), cluster=mh.Cluster(2), steps=4)
    assert timed.weights_sha256 == named.weights_sha256 and ranks == {0, 1}


def test_planned_stages_are_those_of_virtual_time(quickly):
    strategy = mh.pipedream(replicas="planned", bandwidth="1Gbit")
    virtual = mh.train("digits", strategy, cluster=mh.Cluster(3), steps=6)
    real = mh.train("digits", strategy, workers=3, steps=6)
    found = [line for line in real.records if "stage_replicas" in line]
    assert {line["rank"] for line in found} == {0, 1, 2}
    assert all((line["cut"], line["stage_replicas"]) == ("6", [1, 2]) for line in found)
    assert real.weights_sha256 == virtual.weights_sha256


def test_the_servers_of_teams_know_it_too(quickly):
    result = mh.train(words(), mh.ssp(), team=mh.piped(2, balance="time"), workers=4, servers=1, steps=4)
    assert measured(result)[1] == {0, 1, 2, 3}


SLICED = {
    "pairs": mh.sliced(2),
    "neurons": mh.sliced(2, "neurons"),
    "stages of slices": mh.piped(2, micro_batches=2, of=mh.sliced(2)),
}


@pytest.mark.parametrize("link", ["shm", "tcp"])
@pytest.mark.parametrize("name", SLICED)
def test_slices_have_the_bits_of_virtual_time(name, link, quickly):
    team, hosts = SLICED[name], 1 if link == "shm" else None
    virtual = mh.train(small(), mh.bsp(), team=team, cluster=mh.Cluster(workers=4, hosts=hosts), steps=5)
    real = mh.train(small(), mh.bsp(), team=team, workers=4, link=link, steps=5)
    assert real.weights_sha256 == virtual.weights_sha256


@pytest.mark.parametrize("rank", [2, 3])
def test_downpour_over_neurons_loses_a_slice_and_finishes(rank, tmp_path, quickly):
    """DistBelief: two replicas whose layers are divided by neurons, and two servers."""
    strike = Strike(kill, tmp_path, rank=rank)
    strategy = struck_team(mh.downpour(lr=0.01), strike, mh.sliced(2, "neurons"))
    result = mh.train(small(), strategy, workers=4, servers=2, steps=30)
    assert dict(result.lost) == {rank: KILLED, 5 - rank: f"its team has lost rank {rank}"}
    taken = taken_by(result)
    assert taken[0] == taken[1] >= 2 * 30 - 6, "the others have taken over what was left"
    assert all(bool(torch.isfinite(w).all()) for w in result.weights.values())

"""A worker may be a team of ranks: every method over teams of pipeline stages, in virtual time."""

import copy
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

import manyhands as mh
from every_method import EVERY, loop
from manyhands import catalog
from manyhands.core.footprint import footprint
from manyhands.core.recipe import recipe_of
from manyhands.rules import ClipNorm, Momentum, Sgd
from manyhands.rules import chain as links
from manyhands.rules.schedules import StepDecay
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.grid import Grid
from manyhands.tasks import load
from repeats import every, one_of_each, only

from .small import chain, model, steps_of, task

EQUAL = [
    *("bsp", "bsp-server", "hierarchical-server", "hybrid", "easgd", "eamsgd", "bmuf", "diloco", "model-averaging"),
    *("post-local-sgd", "weighted-averaging", "d-psgd", "adaptive-batch", "asysvrg", "hogbatch", "simuparallel"),
    *("fp16-sgd", "strom", "powersgd", "sufficient-factors"),
]
"""Methods over teams equal to themselves with a worker for each team."""
REFUSED = {name for name, recipe in EVERY.items() if recipe().traits.needs_whole_model}
OVER_TEAMS = [name for name in EVERY if name not in REFUSED]
ASYNCHRONOUS = [name for name in OVER_TEAMS if not EVERY[name]().traits.lockstep]
SURVIVORS = {
    "ssp on one host": (partial(mh.ssp, lr=0.02), {"hosts": 1}),
    "ssp with servers": (partial(mh.ssp, lr=0.02), {"servers": 2}),
    "downpour": (partial(mh.downpour, lr=0.02), {"servers": 2}),
    "easgd asynchronous": (partial(mh.easgd, asynchronous=True), {"servers": 1}),
    "ad-psgd": (mh.ad_psgd, {}),
    "gossip": (mh.gossip, {}),
}
"""Methods that continue without a lost worker, and where."""
TWO = mh.piped(stages=2)


@cache
def digits64():
    digits = load("digits")
    x, y = digits.data.tensors
    return mh.Task(lambda: digits.model().double(), TensorDataset(x.double(), y), cross_entropy, name="digits64")


def run(strategy, workers=4, team=TWO, on=None, of=None, **knobs):
    """Teams on a host of their own for each rank, unless the method needs one host."""
    hosts = 1 if strategy.traits.one_host else None
    cluster = mh.Cluster(workers=workers, **{"hosts": hosts, **(on or {})})
    return mh.train(of or digits64(), strategy, team=team, cluster=cluster, **{"steps": 12, "seed": 1, **knobs})


def difference(one, other):
    return max((w - other.weights[name]).abs().max().item() for name, w in one.weights.items())


def losses(result):
    return {(line["rank"], line["step"]): line["loss"] for line in steps_of(result)}


# -- every method -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EQUAL)
def test_over_teams_a_method_is_itself_with_as_many_workers(name):
    alone, teams = run(EVERY[name](), workers=2, team=None), run(EVERY[name]())
    assert difference(alone, teams) < 1e-12
    found, expected = losses(teams), losses(alone)
    assert found == {(member, step): pytest.approx(expected[member // 2, step], abs=1e-12) for member, step in found}
    assert teams.samples == alone.samples


@pytest.mark.parametrize("name", one_of_each(loop, OVER_TEAMS))
def test_every_method_trains_over_teams(name):
    result = run(EVERY[name](), of="digits", steps=60)
    first = [loss for (_, step), loss in losses(result).items() if step == 1]
    assert result.final_loss < 0.8 * max(first)


@pytest.mark.parametrize("schedule", ["one-f-one-b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("name", ["bsp", "diloco"])
def test_over_every_schedule_a_method_is_itself_with_as_many_workers(name, schedule):
    alone = run(EVERY[name](), workers=2, team=None)
    teams = run(EVERY[name](), team=mh.piped(2, schedule=schedule))
    assert difference(alone, teams) < 1e-12
    assert teams.samples == alone.samples


@pytest.mark.parametrize("schedule", ["one-f-one-b", "interleaved", "zero-bubble"])
def test_an_asynchronous_method_trains_over_every_schedule(schedule):
    result = run(mh.ssp(staleness=2), team=mh.piped(2, schedule=schedule), of="digits", steps=60, on={"jitter": 0.2})
    first = [loss for (_, step), loss in losses(result).items() if step == 1]
    assert result.final_loss < 0.8 * max(first)
    assert result.max_lag <= 2 + 1


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_method_whose_parts_cannot_be_trained_separately_is_refused(name):
    strategy = EVERY[name]()
    with pytest.raises(mh.Refused) as caught:
        run(strategy)
    why = f"{recipe_of(strategy).name} cannot be trained over teams of ranks: {strategy.traits.needs_whole_model}"
    assert str(caught.value) == why


def test_which_methods_are_refused():
    divided = {name.replace("_", "-") for name in (*catalog.pipelines.__all__, *catalog.slices.__all__)}
    assert {"sandblaster", "backup-workers", "k-sync", "k-async", "fully-sharded"} | divided == REFUSED


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"workers": 5}, "workers is 5, but must be divisible by 2, the ranks of a team"),
        ({"batch_size": 30}, "batch_size is 30, but must be divisible by micro_batches = 4"),
        ({"team": mh.piped(5), "workers": 10}, "the number of stages is 5, but must be <= 4"),
        ({"on": {"newcomers": [0.1]}}, "the number of joining workers is 1, but must be 0"),
        ({"on": {"order": [0, 1]}}, "prescribes the order"),
        (
            {"team": "piped(stages=2,schedule='gpip')"},
            "schedule is gpip, but must be one of gpipe, one-f-one-b, interleaved",
        ),
        ({"team": "pipd(2)"}, "did you mean piped"),
    ],
    ids=str,
)
def test_what_a_team_cannot_do_is_refused(settings, why):
    with pytest.raises(mh.Refused, match=why):
        run(mh.bsp() if "newcomers" not in settings.get("on", ()) else mh.ssp(), **settings)


def test_a_norm_of_the_whole_model_is_refused():
    with pytest.raises(mh.Refused, match="of is 'model', but must be 'parameter'"):
        mh.bsp(rule=links(ClipNorm(1.0, of="model"), Sgd(0.1)))


def test_a_method_over_teams_has_its_name_and_its_team():
    result = run(mh.ssp(staleness=2), of=task(model=model), team="piped(stages=2, micro_batches=2)")
    header = result.records[0]
    assert header["method"] == "ssp:staleness=2,team=piped(stages=2, micro_batches=2)"
    assert (header["workers"], header["replicas"]) == (4, 2)


# -- budgets, data and random numbers belong to teams ---------------------------------------------------


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_a_team_draws_a_mini_batch_once(name):
    result = run(EVERY[name](), workers=6, on={"jitter": 0.5}, steps=9)
    assert result.samples == 9 * 3 * 32
    taken = {rank: [line for line in steps_of(result) if line["rank"] == rank] for rank in range(6)}
    assert all(len(taken[rank]) == len(taken[rank + 1]) for rank in (0, 2, 4))


def test_gossip_chooses_the_same_peer_for_all_parts_of_a_team():
    drawn = {}

    class Watched(Grid):
        def setup(self, w):
            super().setup(w)
            drawn[w.rank] = self.me.random.getstate()[1][:3]

    team = copy.deepcopy(TWO)
    mh.train(digits64(), Watched(mh.gossip(), team), cluster=mh.Cluster(workers=6), steps=3, seed=1)
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3] != drawn[4] == drawn[5]


class Masks(nn.Module):
    """Notes which units dropout keeps."""

    def __init__(self, seen):
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 4), seen

    def forward(self, x):
        out = nn.functional.dropout(self.layer(x), 0.5, self.training)
        self.seen.append(out.detach() == 0)
        return out


def test_dropout_differs_between_teams_stages_and_micro_batches():
    seen = []
    of = task(model=lambda: nn.Sequential(Masks(seen), Masks(seen), nn.Linear(4, 2)), batch_size=4)
    run(mh.bsp(lr=0.01), of=of, team=mh.piped(2, micro_batches=2, keep="graph"), steps=1)
    passes = [tuple(mask.flatten().tolist()) for mask in seen]
    assert len(passes) == 2 * 2 * 2, "two teams, two micro-batches, two layers"
    assert len(set(passes)) == len(passes)


# -- what the rest of the house relies on ----------------------------------------------------------------


def test_a_rate_schedule_sees_the_same_samples_on_every_stage():
    """Also while a pipeline that streams is filled and drained."""
    asked = {}

    class Noted(Sgd):
        def __call__(self, g, at):
            asked.setdefault(at.weights.data_ptr(), []).append(at.samples)
            return super().__call__(g, at)

        def can_move(self, weights):
            return False

    three = chain(4, 8, 8, 2)
    mh.train(task(model=lambda: copy.deepcopy(three)), mh.pipedream(rule=Noted(0.1)), cluster=mh.Cluster(3), steps=6)
    assert list(asked.values()) == [[0, 4, 8, 12, 16, 20]] * 3


def test_a_rank_keeps_its_own_part_only():
    kept = {}

    class Measured(Grid):
        def finish(self, w):
            super().finish(w)
            own = sum(p.numel() * p.element_size() for p in w.trained.parameters())
            kept[w.rank] = footprint(w.model) / own

    mh.train(digits64(), Measured(mh.bsp(), TWO), cluster=mh.Cluster(workers=4), steps=2)
    assert all(1 <= share <= 1.1 for share in kept.values()), kept


def test_the_others_parts_are_no_numbers_by_mistake():
    """A script that reads them sees it; the answer is whole."""

    class Looked(Grid):
        def finish(self, w):
            super().finish(w)
            own = {id(p) for p in w.trained.parameters()}
            assert all(bool(p.isnan().all()) for p in w.model.parameters() if id(p) not in own)

    result = mh.train(digits64(), Looked(mh.bsp(), TWO), cluster=mh.Cluster(workers=4), steps=2)
    assert all(bool(w.isfinite().all()) for w in result.weights.values())


def test_statistics_of_batch_norm_are_those_of_all_teams():
    def with_statistics():
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))

    of = task(model=with_statistics, batch_size=8)
    alone = run(mh.bsp(), workers=2, team=None, of=of)
    teams = run(mh.bsp(), of=of, team=mh.piped(2, micro_batches=1))
    assert teams.buffers.keys() == alone.buffers.keys()
    assert all(torch.allclose(x, alone.buffers[name]) for name, x in teams.buffers.items())


def test_evaluations_in_the_middle_do_not_change_the_weights():
    plain, looked = run(mh.bsp(), of="digits"), run(mh.bsp(), of="digits", evaluate_every=4)
    assert plain.weights_sha256 == looked.weights_sha256
    assert [line["evaluated"] for line in looked.records if line["kind"] == "evaluation"] == [4, 8]


# -- checkpoints ------------------------------------------------------------------------------------------


def saved(name, tmp_path, **settings):
    """A run of 12 steps that was saved after the sixth, and that checkpoint."""
    result = run(EVERY[name](), out=tmp_path, checkpoint_every=6, **settings)
    return result, tmp_path / "checkpoints" / "step-00000006"


@pytest.mark.parametrize("name", every(3, EQUAL))
def test_a_run_over_teams_is_resumed_with_the_same_teams_with_others_or_without(name, tmp_path):
    whole, at_six = saved(name, tmp_path)
    assert difference(run(EVERY[name](), resume=at_six), whole) == 0
    assert difference(run(EVERY[name](), workers=8, team=mh.piped(4), resume=at_six), whole) < 1e-12
    assert difference(run(EVERY[name](), workers=2, team=None, resume=at_six), whole) < 1e-12


@pytest.mark.parametrize("name", every(3, EQUAL))
def test_a_run_without_teams_is_resumed_over_teams(name, tmp_path):
    whole, at_six = saved(name, tmp_path, workers=2, team=None)
    assert difference(run(EVERY[name](), resume=at_six), whole) < 1e-12


@pytest.mark.parametrize("name", every(3, [name for name in OVER_TEAMS if name not in EQUAL]))
def test_every_other_method_is_resumed_over_teams(name, tmp_path):
    _, at_six = saved(name, tmp_path)
    for settings in ({}, {"workers": 6}, {"workers": 2, "team": None}):
        result = run(EVERY[name](), resume=at_six, **settings)
        assert result.samples == (12 * 2 - 6 * 2) * 32 or settings.get("workers") == 6
        assert all(bool(w.isfinite().all()) for w in result.weights.values())


# -- a lost member takes its team along -------------------------------------------------------------------


LOST = [(name, rank) for name in SURVIVORS for rank in range(6)]
ONE_OF_EACH = {*zip(SURVIVORS, (0, 3, 0, 3, 0, 3), strict=True)}
"""The first rank of the first team or the second one of the second."""


@pytest.mark.parametrize(("name", "rank"), only(lambda case: case in ONE_OF_EACH, LOST))
def test_a_lost_member_takes_its_team_along_and_the_others_continue(name, rank):
    """Whenever it is lost: in a forward pass, a backward pass, a pull, an exchange, a grant, or at the end."""
    (make, place), mate = SURVIVORS[name], rank ^ 1
    settings = {"workers": 6, "of": task(samples=48, model=model), "steps": 10, "team": mh.piped(2, micro_batches=2)}
    whole = run(make(), on=place, **settings)
    for tenth in range(1, 10):
        at = whole.seconds * tenth / 10
        result = run(make(), on={**place, "faults": [mh.Die(rank, at)]}, **settings)
        found = dict(result.lost)
        assert found.keys() == {rank, mate}, tenth
        assert found[mate] == f"its team has lost rank {rank}"
        assert result.samples >= whole.samples - 4, "but for the mini-batch that was lost"
        assert all(bool(w.isfinite().all()) for w in result.weights.values())


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("make", [mh.bsp, mh.bsp_server, mh.diloco, mh.easgd], ids=lambda make: make.__name__)
def test_a_method_that_needs_all_workers_ends_and_names_the_rank_of_the_job(make, rank):
    of = task(model=model)
    whole = run(make(), of=of)
    with pytest.raises(mh.PeerLost) as caught:
        run(make(), of=of, on={"faults": [mh.Die(rank, whole.seconds / 2)]})
    assert caught.value.rank == rank
    assert str(caught.value) == f"rank {rank} is lost: it died"


def test_a_stage_of_downpour_with_two_servers_is_lost():
    """DistBelief: each member talks to the shards that hold its part."""
    of, two = task(model=model), {"servers": 2}
    whole = run(mh.downpour(lr=0.02), of=of, on=two)
    result = run(mh.downpour(lr=0.02), of=of, on={**two, "faults": [mh.Die(3, whole.seconds / 2)]})
    assert {rank for rank, _ in result.lost} == {2, 3}
    assert result.final_loss < 2 * whole.final_loss


# -- bounds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", range(4))
def test_ssp_over_teams_keeps_its_bound_when_a_stage_is_slow(slow):
    result = run(
        mh.ssp(staleness=2, lr=0.02), workers=4, on={"stragglers": mh.Slow([slow], 8), "jitter": 0.2}, steps=20
    )
    done = dict.fromkeys(range(4), 0)
    for line in sorted(steps_of(result), key=lambda line: line["time"]):
        done[line["rank"]] += 1
        clocks = [min(done[2 * team], done[2 * team + 1]) for team in range(2)]
        assert max(clocks) - min(clocks) <= 2 + 1, "a clock of the slow team may be under way"
    assert result.lag.ahead_max <= 2
    assert max(done.values()) > min(done.values()), "the fast team does more"


# -- a loop of one's own ------------------------------------------------------------------------------------


def own_loop(strategy, workers=4, team=TWO, optimizer=None, **knobs):
    """Every rank's model after a loop of steps, and the losses of each."""
    from manyhands.run.methods import over_team

    from .test_own_loop import Joined

    def program(hands, losses):
        for x, y in hands.share(task().data, batch_size=4, **{"steps": 6, **knobs}):
            losses.append(hands.step(x, y))

    return Joined(
        over_team(strategy, team), program, mh.Cluster(workers=workers), optimizer=optimizer, loss=mse_loss, seed=1
    )


@pytest.mark.parametrize("make", [mh.bsp, mh.easgd, mh.diloco, mh.d_psgd], ids=lambda make: make.__name__)
def test_an_own_loop_over_teams_is_the_loop_with_as_many_workers(make):
    teams, alone = own_loop(make()), own_loop(make(), workers=2, team=None)
    expected = alone.models[0].state_dict()
    for found in teams.models:
        assert all(torch.allclose(x, expected[name], atol=1e-6) for name, x in found.state_dict().items())
    losses = [one["losses"] for one in teams.ranks]
    assert losses[0] == losses[1] == pytest.approx(alone.ranks[0]["losses"], abs=1e-6)


def test_an_own_loop_over_teams_steps_by_the_users_optimizer():
    def adam(model):
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    teams = own_loop(mh.bsp(), optimizer=adam)
    alone = own_loop(mh.bsp(), workers=2, team=None, optimizer=adam)
    expected = alone.models[0].state_dict()
    assert all(torch.allclose(x, expected[name], atol=1e-6) for name, x in teams.models[3].state_dict().items())


def test_an_own_loop_of_asynchronous_teams_shares_a_budget():
    joined = own_loop(mh.ssp(lr=0.02), steps=10)
    taken = [len(one["losses"]) for one in joined.ranks]
    assert taken[0] == taken[1] and taken[2] == taken[3]
    assert taken[0] + taken[2] == 2 * 10


def test_momentum_and_schedules_over_teams():
    def rule():
        return Momentum(StepDecay(0.1, 96), momentum=0.9)

    assert difference(run(mh.bsp(rule=rule()), workers=2, team=None), run(mh.bsp(rule=rule()))) < 1e-12


class Noting(AllReduce):
    """Has a note for every step."""

    def notes(self):
        return {"noted": 7}


def test_what_a_method_says_about_a_run_it_says_over_teams_too():
    alone, teams = run(mh.diloco(), workers=2, team=None), run(mh.diloco())
    assert teams.records[0]["remarks"] == alone.records[0]["remarks"] != []
    assert [line["noted"] for line in steps_of(run(Noting(Sgd(0.1)), steps=2))] == [7] * 8

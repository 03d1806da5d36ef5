"""A run that was saved and resumed is the run that never stopped; other numbers of ranks can go on from it too."""

import json
import random
import shutil
from statistics import fmean

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.catalog import compressed
from manyhands.codecs import Feedback, TopK
from manyhands.core.state import named
from manyhands.core.strategy import Strategy, Traits
from manyhands.rules import Adam, Momentum, Sgd, Torch, by_name
from manyhands.runtime.checkpoint import load_checkpoint
from repeats import diagonals

from .small import METHODS, SERVED, steps_of, task

EXACT = [
    *["bsp", "fully_sharded", "bsp_server", "hierarchical_server", "hybrid"],
    *["bmuf", "adaptive_batch", "easgd", "d_psgd", "gpipe"],
]
LOOSE = [name for name in METHODS if name not in EXACT]
RULES = {
    "sgd": lambda: Sgd(0.02),
    "momentum": lambda: Momentum(0.01),
    "adam": lambda: Adam(0.01),
    "torch": lambda: Torch("AdamW", lr=0.01),
    "by name": lambda: by_name({"*.bias": Adam(0.01), "*": Torch("AdamW", lr=0.01, weight_decay=0.1)}),
}
STEPS, EVERY = 9, 4


def model(dropout=0.1):
    """With statistics to keep and dropout to repeat."""
    return nn.Sequential(
        *[nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh()],
        *[nn.Dropout(dropout), nn.Linear(8, 8), nn.Linear(8, 2)],
    )


def run(method, steps=STEPS, rule="adam", data=None, workers=4, servers=0, hosts=None, train=None, **knobs):
    if method != "sandblaster":  # which has its own
        knobs["rule"] = RULES[rule]() if isinstance(rule, str) else rule
    data = data or task(model=model, batch_size=8)
    cluster = mh.Cluster(workers=workers, servers=servers, hosts=hosts)
    return mh.train(data, METHODS[method](**knobs), cluster=cluster, steps=steps, seed=5, **(train or {}))


def saving(folder):
    return {"out": folder, "checkpoint_every": EVERY}


def going_on(folder):
    return {"out": folder, "checkpoint_every": EVERY, "resume": folder}


def at_eight(folder):
    """The checkpoint in the middle of a run of nine steps."""
    return folder / "checkpoints" / "step-00000008"


def assert_same(one, other):
    assert one.weights_sha256 == other.weights_sha256
    assert all(torch.equal(x, other.buffers[name]) for name, x in one.buffers.items())


# -- equal to the last bit ----------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "rule"), diagonals(2, EXACT, RULES))
def test_a_resumed_run_equals_one_that_never_stopped(method, rule, tmp_path):
    never = run(method, rule=rule)
    whole = run(method, rule=rule, train=saving(tmp_path / "whole"))
    run(method, steps=EVERY, rule=rule, train=saving(tmp_path / "half"))
    again = run(method, rule=rule, train=going_on(tmp_path / "half"))
    assert_same(never, whole)
    assert_same(never, again)
    assert {line["step"] for line in steps_of(again)} == set(range(EVERY + 1, STEPS + 1)), "only the rest was trained"


@pytest.mark.parametrize("method", EXACT)
def test_a_killed_run_continues_from_its_last_checkpoint(method, tmp_path):
    never = run(method)
    run(method, train=saving(tmp_path))
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000009")
    assert_same(never, run(method, train=going_on(tmp_path)))


@pytest.mark.parametrize("place", [{"hosts": 1}, {"servers": 3}], ids=["shared memory", "server ranks"])
@pytest.mark.parametrize("rule", RULES)
def test_wherever_the_shards_are(rule, place, tmp_path):
    never = run("bsp_server", rule=rule)
    run("bsp_server", steps=EVERY, rule=rule, train=saving(tmp_path), **place)
    assert_same(never, run("bsp_server", rule=rule, train=going_on(tmp_path), **place))


@pytest.mark.parametrize("rule", RULES)
def test_another_number_of_servers_or_stages_changes_nothing(rule, tmp_path):
    data = task(model=lambda: model(dropout=0), batch_size=8)  # what is dropped depends on a stage's rank
    for method, before, after in (
        ("bsp_server", {"servers": 3}, {"servers": 2}),
        ("bsp_server", {"servers": 2}, {}),
        ("bsp_server", {"hosts": 1}, {"servers": 1}),
        ("bsp_server", {"servers": 1, "shard": "layer"}, {"hosts": 1}),
        ("gpipe", {"workers": 4}, {"workers": 2}),
        ("gpipe", {"workers": 1}, {"workers": 3}),
    ):
        never = run(method, rule=rule, data=data)
        folder = tmp_path / f"{method} {before}"
        run(method, steps=EVERY, rule=rule, data=data, train=saving(folder), **before)
        assert_same(never, run(method, rule=rule, data=data, train=going_on(folder), **after))


def test_a_rule_that_needs_whole_tensors_resumes_too(tmp_path):
    adafactor = lambda: Torch("Adafactor", lr=0.01)  # noqa: E731
    never = run("bsp_server", rule=adafactor(), servers=2)
    run("bsp_server", steps=EVERY, rule=adafactor(), servers=2, train=saving(tmp_path))
    assert_same(never, run("bsp_server", rule=adafactor(), servers=3, train=going_on(tmp_path)))


def test_a_schedule_of_the_learning_rate_continues_where_it_was(tmp_path):
    def fading():
        return Momentum(lambda samples: 0.05 / (1 + samples / 64))

    for method in EXACT:
        never = run(method, rule=fading())
        run(method, steps=EVERY, rule=fading(), train=saving(tmp_path / method))
        assert_same(never, run(method, rule=fading(), train=going_on(tmp_path / method)))


def test_parameters_that_are_not_always_touched_keep_their_counts(tmp_path):
    class Twofold(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            return self.left(x) if x[0, 0] > 0 else self.left(x) + self.right(x)

    data = task(model=Twofold, batch_size=1)
    for rule in ("adam", "torch"):
        never = run("bsp_server", rule=rule, data=data, workers=1)
        run("bsp_server", steps=EVERY, rule=rule, data=data, workers=1, train=saving(tmp_path / rule))
        assert_same(never, run("bsp_server", rule=rule, data=data, workers=1, train=going_on(tmp_path / rule)))
        counts = load_checkpoint(tmp_path / rule / "checkpoints").state
        assert int(counts["rule/right.bias/:updates"]) < int(counts["rule/left.bias/:updates"]) == STEPS


@pytest.mark.parametrize("period", [1, 3])
def test_the_centre_and_every_worker_of_easgd_come_back(period, tmp_path):
    never = run("easgd", period=period)
    run("easgd", steps=EVERY, period=period, train=saving(tmp_path))
    assert_same(never, run("easgd", period=period, train=going_on(tmp_path)))


@pytest.mark.parametrize("place", [{}, {"hosts": 1}, {"servers": 2}], ids=["apart", "one host", "servers"])
def test_a_streaming_pipeline_and_a_lone_client_equal_themselves_resumed(place, tmp_path):
    """Draining and fetching anew change the run, but at a checkpoint they do so whether it goes on or is resumed."""
    ways = [("downpour", {"n_fetch": 3, "n_push": 2, "phase": "end", "workers": 1, **place})]
    ways += [("pipedream", place)] if "servers" not in place else []
    for method, knobs in ways:
        whole = run(method, train=saving(tmp_path / method), **knobs)
        again = run(method, train={"resume": at_eight(tmp_path / method)}, **knobs)
        assert_same(whole, again)


def test_a_lone_worker_of_asynchronous_easgd_does_not_notice_that_it_is_saved(tmp_path):
    alone = {"workers": 1, "servers": 2}
    never = run("easgd asynchronous", **alone)
    assert_same(never, run("easgd asynchronous", train=saving(tmp_path), **alone))
    assert_same(never, run("easgd asynchronous", train={"resume": at_eight(tmp_path)}, **alone))


def test_what_was_accrued_is_pushed_with_the_next_gradient_however_often_one_pushes(tmp_path):
    run("downpour", steps=EVERY, workers=1, n_push=3, phase="end", train=saving(tmp_path))
    assert any("/accrued/" in name for name in load_checkpoint(tmp_path / "checkpoints").state)
    often, seldom = (
        run("downpour", steps=EVERY + 1, workers=1, n_push=n, phase="end", train={"resume": tmp_path}) for n in (1, 5)
    )
    assert_same(often, seldom)


def test_what_a_codec_has_not_sent_yet_is_not_forgotten(tmp_path):
    codec = Feedback(TopK(0.1))
    never = run("bsp_server", rule="sgd", codec=codec)
    run("bsp_server", steps=EVERY, rule="sgd", codec=codec, train=saving(tmp_path))
    memory = {name for name in load_checkpoint(tmp_path / "checkpoints").state if "/memory/" in name}
    assert len(memory) == 4 * 10, "of every worker, for every parameter"
    assert_same(never, run("bsp_server", rule="sgd", codec=codec, train=going_on(tmp_path)))


@pytest.mark.parametrize("method", compressed.__all__)
def test_nor_is_anything_else_that_what_is_sent_depends_on(method, tmp_path):
    """On a model whose matrices are large enough to be sent as something smaller."""

    def digits(**more):
        return mh.train("digits", getattr(mh, method)(), cluster=mh.Cluster(workers=2), checkpoint_every=20, **more)

    digits(steps=20, out=tmp_path)
    assert_same(digits(steps=40, out=tmp_path / "whole"), digits(steps=40, out=tmp_path, resume=tmp_path))


# -- methods whose result depends on timing -------------------------------------------------------------


@pytest.mark.parametrize("method", LOOSE)
def test_every_method_resumes_and_keeps_learning(method, tmp_path):
    data = task(samples=64, batch_size=8)
    run(method, steps=20, rule="sgd", data=data, train={"out": tmp_path, "checkpoint_every": 20})
    saved = load_checkpoint(tmp_path / "checkpoints")
    result = run(method, steps=120, rule="sgd", data=data, train={"resume": tmp_path})
    begins = steps_of(result)[: 16 if method in ("pipedream", "sandblaster") else 4]
    first = [line["loss"] for line in begins if line["loss"] is not None]
    fresh = run(method, steps=20, rule="sgd", data=data)
    assert fmean(first) < 2 * fresh.final_loss + 0.5, "it does not begin anew"
    assert result.final_loss < 0.8 * fresh.final_loss
    assert saved.facts["step"] == 20 and result.samples == 100 * 8 * (4 if method != "pipedream" else 1)


@pytest.mark.parametrize("place", [{}, {"hosts": 1}, {"servers": 2}], ids=["apart", "one host", "servers"])
@pytest.mark.parametrize("method", ["ssp", "downpour", "dc_asgd", "easgd asynchronous"])
def test_saving_does_not_hold_a_method_up_wherever_its_shards_are(method, place, tmp_path):
    data = task(work=1e7)
    cluster = mh.Cluster(workers=4, speeds=[1, 0.3, 2, 1], **place)
    for staleness in (0, 2) if method == "ssp" else (None,):
        knobs = {} if staleness is None else {"staleness": staleness}
        out = tmp_path / str(staleness)
        result = mh.train(
            data, METHODS[method](lr=0.01, **knobs), cluster=cluster, steps=10, out=out, checkpoint_every=3
        )
        assert len(steps_of(result)) == 40 and result.samples == 160
        facts = load_checkpoint(out / "checkpoints").facts
        assert facts["step"] == 10 and sum(facts["positions"]) == 40, "all that was granted was trained"


def test_a_checkpoint_of_ssp_holds_every_update(tmp_path):
    """With plain SGD the shards hold the sum of all gradients, also of those that waited for others."""
    strategy = mh.ssp(staleness=0, rule=Sgd(0.01))
    mh.train(task(), strategy, cluster=mh.Cluster(servers=2), steps=4, out=tmp_path, checkpoint_every=4)
    saved = load_checkpoint(tmp_path / "checkpoints")
    assert {int(x) for name, x in saved.state.items() if name.endswith(":updates")} == {16}
    assert int(saved.state["rule/:samples"]) == 4 * 4 * 4


def test_a_checkpoint_waits_for_gradients_that_are_in_flight(tmp_path):
    """On a slow link small words overtake a large gradient, so the lead asks before it has arrived."""
    large = task(model=lambda: nn.Sequential(nn.Linear(4, 9000), nn.Linear(9000, 2)))
    cluster = mh.Cluster(workers=3, servers=1, bandwidth="10Mbit", faults=[mh.SlowLink(2, factor=20)])
    mh.train(large, mh.ssp(lr=0.01), cluster=cluster, steps=2, out=tmp_path, checkpoint_every=2)
    saved = load_checkpoint(tmp_path / "checkpoints")
    assert {int(x) for name, x in saved.state.items() if name.endswith(":updates")} == {6}


def test_after_a_checkpoint_all_clients_begin_at_the_same_weights(tmp_path):
    seen = {}
    strategy = watched(mh.downpour(n_fetch=3), lambda _, w: seen.update({w.rank: w.flat.named()}), "resume")
    mh.train(task(), strategy, steps=4, out=tmp_path, checkpoint_every=4)
    saved = load_checkpoint(tmp_path / "checkpoints").weights
    assert len(seen) == 4
    assert all(torch.equal(x, saved[name]) for weights in seen.values() for name, x in weights.items())


def test_random_choices_continue_alike_whether_resumed_or_not(tmp_path):
    went_on, was_resumed = {}, {}
    whole = watched(mh.ad_psgd(), lambda _, w: went_on.setdefault(w.rank, w.random.getstate()), "resume")
    again = watched(mh.ad_psgd(), lambda _, w: was_resumed.setdefault(w.rank, w.random.getstate()))
    mh.train(task(), whole, steps=6, out=tmp_path, checkpoint_every=3)
    mh.train(task(), again, steps=6, resume=tmp_path / "checkpoints" / "step-00000003")
    assert went_on == was_resumed and len({str(state) for state in went_on.values()}) == 4


def watched(strategy, look, moment="restored"):
    """The strategy, with a look at every worker right after its state was loaded, or after another moment."""
    kind = type(strategy)

    def method(self, w):
        getattr(kind, moment)(self, w)
        look(self, w)

    strategy.__class__ = type(kind.__name__, (kind,), {moment: method})
    return strategy


def restored(method, folder, workers=4):
    """For every worker its weights and its rule's momentum, by parameter, right after it was restored."""
    seen = {}

    def look(self, w):
        names = {slot.param_id: slot.name for slot in w.flat.slots}
        slices = self.own.slices if hasattr(self, "own") else self.slices
        momentum = {names[mark]: state["m"].clone() for one in slices for mark, _, _, state in one.segments()}
        seen[w.rank] = w.flat.named(), momentum

    strategy = watched(METHODS[method](rule=Momentum(0.01)), look)
    data, cluster = task(model=model, batch_size=8), mh.Cluster(workers=workers)
    mh.train(data, strategy, cluster=cluster, steps=STEPS, seed=5, resume=folder)
    assert sorted(seen) == list(range(workers))
    return seen


def same(found, saved, prefix, ending=""):
    return all(torch.equal(x.reshape(-1), saved[f"{prefix}/{name}{ending}"]) for name, x in found.items())


def test_each_worker_of_hogwild_gets_its_own_memory_back(tmp_path):
    run("hogwild", steps=EVERY, rule="momentum", train=saving(tmp_path))
    saved = load_checkpoint(tmp_path / "checkpoints")
    for rank, (weights, momentum) in restored("hogwild", tmp_path).items():
        assert all(torch.equal(x, saved.weights[name]) for name, x in weights.items())
        assert momentum and same(momentum, saved.state, f"worker{rank}/rule", "/m")


@pytest.mark.parametrize("method", ["ad_psgd", "d_psgd", "gossip", "easgd", "easgd asynchronous"])
def test_old_workers_get_their_own_weights_back_and_new_ones_begin_at_the_answer(method, tmp_path):
    run(method, steps=EVERY, rule="momentum", train=saving(tmp_path))
    saved = load_checkpoint(tmp_path / "checkpoints")
    seen = restored(method, tmp_path, workers=6)
    for rank, (weights, momentum) in seen.items():
        if rank < 4:
            assert same(weights, saved.state, f"worker{rank}/x")
            assert momentum and same(momentum, saved.state, f"worker{rank}/rule", "/m")
        else:
            assert all(torch.equal(x, saved.weights[name]) for name, x in weights.items())
            assert not any(m.any() for m in momentum.values())
    xs = [torch.cat([x.reshape(-1) for x in weights.values()]) for weights, _ in seen.values()]
    assert not torch.equal(xs[0], xs[1]), "workers differ, or this test would say little"


def test_steps_and_data_continue_where_each_worker_was(tmp_path):
    cluster = mh.Cluster(workers=2, speeds=[1, 3])
    data = task(work=1e7)
    mh.train(data, mh.downpour(lr=0.01), cluster=cluster, steps=8, out=tmp_path, checkpoint_every=8)
    slots = load_checkpoint(tmp_path / "checkpoints").facts["positions"]
    assert slots[0] < slots[1] and sum(slots) == 16
    again = mh.train(data, mh.downpour(lr=0.01), cluster=cluster, steps=10, resume=tmp_path)
    firsts = {rank: min(line["step"] for line in steps_of(again) if line["rank"] == rank) for rank in (0, 1)}
    assert firsts == {0: slots[0] + 1, 1: slots[1] + 1}


# -- another number of workers --------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "workers"), diagonals(3, METHODS, [2, 3, 6]))
def test_another_number_of_workers_continues_from_the_samples_consumed(method, workers, tmp_path):
    workers = min(workers, 4) if method in ("gpipe", "pipedream") else workers
    run(method, steps=6, train=saving(tmp_path))
    result = run(method, steps=15, workers=workers, train=going_on(tmp_path))
    replicas = 1 if method in ("gpipe", "pipedream") else workers
    start = 6 * (4 if replicas > 1 else 1) // replicas
    assert result.samples == (15 - start) * replicas * 8
    assert all(x.isfinite().all() for x in result.weights.values())
    assert load_checkpoint(tmp_path / "checkpoints").facts["workers"] == workers


def test_another_batch_size_continues_from_the_samples_consumed(tmp_path):
    run("bsp", steps=EVERY, train=saving(tmp_path))
    result = run("bsp", steps=10, train={"resume": tmp_path, "batch_size": 4})
    assert {line["step"] for line in steps_of(result)} == {9, 10} and result.samples == 2 * 4 * 4


@pytest.mark.parametrize("method", SERVED)
def test_another_number_of_servers_continues(method, tmp_path):
    run(method, steps=4, servers=3, train=saving(tmp_path))
    for servers in (1, 2, 0):
        result = run(method, servers=servers, train={"resume": at_eight(tmp_path).with_name("step-00000004")})
        assert result.samples == 5 * 4 * 8 and all(x.isfinite().all() for x in result.weights.values())


def test_what_workers_that_are_gone_had_not_sent_goes_to_those_that_are_left(tmp_path):
    knobs = {"codec": Feedback(TopK(0.1)), "n_push": 3, "phase": "end"}
    run("downpour", steps=EVERY, rule="sgd", train=saving(tmp_path), **knobs)
    saved = load_checkpoint(tmp_path / "checkpoints").state
    seen = {}

    def look(self, w):
        assert not self.untouched, "all parameters have a gradient waiting"
        vectors = {"memory": self.encoder.memory, "accrued": self.accrued}
        seen[w.rank] = {
            f"{kind}/{n}": x.clone() for kind, xs in vectors.items() for n, x in named(w.flat.slots, xs).items()
        }

    strategy = watched(METHODS["downpour"](rule=Sgd(0.02), **knobs), look)
    data, cluster = task(model=model, batch_size=8), mh.Cluster(workers=3)
    mh.train(data, strategy, cluster=cluster, steps=STEPS, seed=5, resume=tmp_path)
    for rank, found in seen.items():
        assert len(found) == 2 * 10
        for name, x in found.items():
            wanted = saved[f"worker{rank}/{name}"] + (saved[f"worker3/{name}"] if rank == 0 else 0)
            assert torch.equal(x, wanted)
    assert any(x.any() for name, x in saved.items() if name.startswith("worker3/accrued"))
    assert any(x.any() for name, x in saved.items() if name.startswith("worker3/memory"))


# -- what is refused --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run("bsp", train=saving(folder))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"task": task(model=model, batch_size=8, name="other")},
            "the task is 'other', but must be 'task', as in .*step-0",
        ),
        ({"strategy": mh.easgd()}, "the kind of strategy is 'Elastic', but must be 'AllReduce', as in"),
        ({"seed": 6}, "seed is 6, but must be 5, as in"),
        ({"steps": 9}, "steps is 9, but must be > 9, where .*step-00000009 is"),
        (
            {"task": task(batch_size=8)},
            r"0\.bias is .8,. in the model|1\.bias is missing in the model, but must be \(8,\)",
        ),
        ({"strategy": mh.bsp(rule=Momentum(0.1))}, "remembers m, v of .* but must remember m"),
        ({"resume": "/nowhere"}, "/nowhere holds no checkpoint"),
        ({"checkpoint_every": 0, "out": "x"}, "checkpoint_every is 0, but must be >= 1"),
        ({"checkpoint_every": 4}, "checkpoint_every is 4, but there is no folder `out` to save in"),
        ({"cluster": mh.Cluster(workers=2, order=[0, 1])}, "resume is .*, but must be None: the cluster prescribes"),
        ({"task": task(model=model, sizes_only=True)}, "must be None: a task of sizes only has nothing to save"),
    ],
)
def test_what_does_not_fit_is_refused(saved_run, change, message):
    settings = {"task": task(model=model, batch_size=8), "strategy": mh.bsp(rule=Adam(0.01)), "seed": 5, "steps": 12}
    settings = {**settings, "resume": saved_run, **change}
    with pytest.raises(mh.Refused, match=message):
        mh.train(settings.pop("task"), settings.pop("strategy"), **settings)


def test_a_strategy_that_cannot_be_saved_is_refused(tmp_path):
    class Plain(Strategy):
        traits = Traits(lockstep=True, on_worker_loss="ends", resumable=False)

        def setup(self, w):
            """Nothing."""

        def step(self, w, batch):
            return 0.0

        def answer(self, w):
            return w.named()

    with pytest.raises(mh.Refused, match="checkpoint_every is 4, but must be None: this method cannot be saved"):
        mh.train(task(), Plain(), steps=4, out=tmp_path, checkpoint_every=4)
    assert list(tmp_path.iterdir()) == []


def test_a_new_run_does_not_overwrite_the_checkpoints_of_an_old_one(saved_run, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(saved_run, folder)
    record = (folder / "record.jsonl").read_text()
    for resume in ({}, {"resume": saved_run}):
        with pytest.raises(
            mh.Refused, match=r"step-00000009 is there already: resume from .*checkpoints, or save somewh"
        ):
            run("bsp", steps=12, train={**saving(folder), **resume})
    assert (folder / "record.jsonl").read_text() == record
    run("bsp", steps=12, train=going_on(folder))
    assert load_checkpoint(folder / "checkpoints").facts["step"] == 12


def test_a_damaged_checkpoint_is_refused_before_anything_begins(saved_run, tmp_path):
    shutil.copytree(saved_run, tmp_path / "run")
    state = tmp_path / "run" / "checkpoints" / "step-00000009" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(mh.Refused, match=r"state\.safetensors is damaged: .*; .*step-00000008 is good"):
        run("bsp", steps=12, train={"resume": tmp_path / "run"})


# -- what is on disk --------------------------------------------------------------------------------------


def test_checkpoints_say_what_they_are_of(saved_run):
    found = sorted(path.name for path in (saved_run / "checkpoints").iterdir())
    assert found == ["step-00000008", "step-00000009"], "every four steps and at the end; two are kept"
    facts = json.loads((at_eight(saved_run) / "manifest.json").read_text())["facts"]
    assert facts.pop("strategy").startswith("AllReduce(rule=Adam(lr=0.01")
    run_facts = {"step": 8, "task": "task", "kind": "AllReduce", "seed": 5, "batch_size": 8}
    assert facts == run_facts | {"workers": 4, "servers": 0, "replicas": 4, "positions": [8, 8, 8, 8]}


def test_the_weights_on_disk_are_the_answer(tmp_path):
    for method in METHODS:
        if method in ("downpour", "bmuf", "adaptive_batch"):
            continue  # hand over what is left after the last checkpoint
        result = run(method, steps=EVERY, train=saving(tmp_path / method))
        saved = load_checkpoint(tmp_path / method / "checkpoints")
        assert saved.weights.keys() == result.weights.keys()
        assert all(torch.equal(saved.weights[name], x) for name, x in result.weights.items()), method
        assert saved.buffers.keys() == result.buffers.keys()
        assert all(torch.equal(saved.buffers[name], x) for name, x in result.buffers.items()), method


def test_a_run_without_checkpoints_leaves_none(tmp_path):
    run("bsp", train={"out": tmp_path})
    assert [path.name for path in tmp_path.iterdir()] == ["record.jsonl"]


# -- losses -----------------------------------------------------------------------------------------------

WAYS = [(method, {}) for method in METHODS] + [
    (method, place) for method in SERVED for place in ({"servers": 2}, {"hosts": 1})
]


@pytest.mark.parametrize(("method", "place"), WAYS)
def test_no_loss_at_any_moment_makes_a_run_with_checkpoints_hang(method, place, tmp_path):
    data, lr = task(model=model, batch_size=8), 0.005
    settings = {"steps": 6, "checkpoint_every": 2}

    def attempt(number, faults):
        cluster = mh.Cluster(workers=4, faults=faults, **place)
        return mh.train(data, METHODS[method](lr=lr), cluster=cluster, out=tmp_path / str(number), **settings)

    until, ranks, lost = attempt("whole", []).seconds, 4 + place.get("servers", 0), 0
    for number in range(4):
        draw = random.Random(f"{method} {place} {number}")
        rank = 0 if number % 2 else draw.randrange(ranks)
        try:
            result = attempt(number, [mh.Die(rank, draw.uniform(0, until))])
            lost += bool(result.lost)
            assert load_checkpoint(tmp_path / str(number) / "checkpoints").facts["step"] in (2, 4, 6)
        except mh.PeerLost as loss:
            assert loss.rank == rank
            lost += 1
    assert lost, "some of these must have hurt"


def test_a_run_resumed_after_a_loss_gives_all_the_same_position(tmp_path):
    data = task(work=1e7)
    usual = mh.train(data, mh.ad_psgd(lr=0.01), steps=8)
    dying = mh.Cluster(workers=4, faults=[mh.Die(2, usual.seconds / 3)])
    mh.train(data, mh.ad_psgd(lr=0.01), cluster=dying, steps=8, out=tmp_path, checkpoint_every=8)
    facts = load_checkpoint(tmp_path / "checkpoints").facts
    assert facts["positions"][2] is None and facts["step"] == 8
    again = mh.train(data, mh.ad_psgd(lr=0.01), steps=10, resume=tmp_path)
    assert {
        rank: min(line["step"] for line in steps_of(again) if line["rank"] == rank) for rank in range(4)
    } == dict.fromkeys(range(4), 9)

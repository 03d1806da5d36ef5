"""Engines: one protocol, every form of `on=`, and a spec that is handed to the ranks whole."""

import pickle
from dataclasses import replace

import pytest

import manyhands as mh
from manyhands.engines.choose import choose_engine
from manyhands.engines.engine import Engine, Ran
from manyhands.engines.virtual import Virtual
from manyhands.run.spec import make_spec

from .small import task

ENGINES = [mh.Local(3, servers=1, link="tcp", spares=1), Virtual(mh.Cluster(3, servers=1, newcomers=["1ms"]))]


@pytest.mark.parametrize("engine", ENGINES, ids=["local", "virtual"])
def test_engines_describe_their_ranks_alike(engine):
    assert isinstance(engine, Engine)
    assert (engine.roles, engine.joiners) == ({"worker": 3, "server": 1}, 1)
    assert engine.placement() == [0, 1, 2, 3, 4]
    assert engine.facts().keys() == {"world", "link", "cluster"}
    spec = make_spec(task(), mh.ssp(), engine, steps=2)
    assert (spec.workers, spec.servers, spec.roles) == (3, 1, engine.roles)
    assert spec.role_of_rank == ["worker"] * 4 + ["server"]


@pytest.mark.parametrize(
    ("short", "on"),
    [
        ({"workers": 3}, mh.Local(3)),
        ({"workers": 3, "servers": 1, "link": "tcp", "bind": "::1", "spares": 2}, mh.Local(3, 1, "tcp", "::1", 2)),
        ({"cluster": mh.Cluster(5)}, mh.Cluster(5)),
        ({"cluster": mh.Cluster(5), "workers": 5, "servers": 2, "spares": 0}, mh.Cluster(5, servers=2)),
        ({"servers": 2}, mh.Cluster(servers=2)),
        ({}, mh.Cluster()),
    ],
    ids=str,
)
def test_every_short_form_means_an_engine(short, on):
    assert choose_engine(**short) == choose_engine(on)


def test_an_engine_of_another_kind_is_accepted():
    """It gets the spec whole, and what it returns is the result."""

    class Counting(Virtual):
        specs = ()

        def run(self, spec, observe) -> Ran:
            Counting.specs += (spec,)
            return super().run(spec, observe)

    result = mh.train(task(), mh.bsp(), on=Counting(mh.Cluster(2)), steps=3)
    assert result.weights_sha256 == mh.train(task(), mh.bsp(), on=mh.Cluster(2), steps=3).weights_sha256
    (spec,) = Counting.specs
    assert (spec.steps, spec.workers, spec.engine.world) == (3, 2, "virtual")


def test_a_built_in_task_is_sent_by_its_name():
    spec = make_spec("digits", mh.bsp(), mh.Local(2), steps=2)
    sent = pickle.dumps(spec.packed())
    assert len(sent) < 2000, "the data is not in it"
    assert pickle.loads(sent).unpacked().task.name == "digits"
    own = replace(spec, named=None)
    assert own.packed() is own and own.unpacked() is own

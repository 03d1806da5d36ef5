"""mh.compare: all methods get the same setting, failures stay in the table, names are unique, rates are tuned."""

import pytest

import manyhands as mh
from manyhands import catalog
from manyhands.core.recipe import recipe_of
from manyhands.report.measures import Target

SLOW = mh.Cluster(workers=4, stragglers=mh.Slow([0], 4))


def test_methods_run_side_by_side_and_the_soonest_comes_first():
    found = mh.compare("digits", [mh.bsp(), mh.downpour()], cluster=SLOW, epochs=8, target="accuracy=0.8", seeds=2)
    assert [row["method"] for row in found.rows] == ["downpour", "bsp"], "its workers do not wait for the straggler"
    assert found.target == Target("accuracy", 0.8) and found.report is None
    first, second = found.rows
    assert first["seconds_to_target"] < second["seconds_to_target"]
    assert all(row["reached"] == row["seeds"] == 2 for row in found.rows)
    assert [(run.method, run.seed) for run in found.runs] == [("bsp", 0), ("bsp", 1), ("downpour", 0), ("downpour", 1)]


def test_the_same_again_is_the_same_to_the_last_digit():
    def run():
        return mh.compare("digits", [mh.ssp(), mh.ad_psgd()], cluster=SLOW, epochs=3, target="accuracy=0.5").rows

    assert run() == run()


def test_real_processes_are_compared_too(tmp_path):
    out = tmp_path / "out"
    found = mh.compare("digits", [mh.bsp(), mh.hogwild()], on=mh.Local(2), epochs=3, evaluations=3, out=out)
    assert {row["method"]: row["failure"] for row in found.rows} == {"bsp": None, "hogwild": None}
    assert all(len(run.evaluations) == 2 or len(run.evaluations) == 3 for run in found.runs)
    assert found.report == out / "report.html" and found.report.is_file()


def test_what_cannot_run_there_stays_in_the_table():
    hosts = mh.Cluster(workers=4, hosts=2)
    found = mh.compare("digits", [mh.bsp(), mh.hogwild()], on=hosts, epochs=2)
    last = found.rows[-1]
    assert last["method"] == "hogwild" and "share memory" in last["failure"] and last["rank"] == 2


def test_a_lost_peer_is_a_reason_too(tmp_path):
    dies = mh.Cluster(workers=4, servers=1, faults=[mh.Die(1, 0.003)])
    found = mh.compare("digits", [mh.ssp(), mh.bsp_server()], cluster=dies, epochs=5, out=tmp_path / "out")
    rows = {row["method"]: row for row in found.rows}
    assert rows["ssp"]["failure"] is None and "it died" in rows["bsp-server"]["failure"]
    assert "it died" in found.report.read_text(encoding="utf-8")


def test_a_mapping_gives_names_and_leaves_the_strategies_as_they_are():
    mine = mh.bsp(lr=0.1)
    found = mh.compare("digits", {"calm": mine, "bold": mh.bsp(lr=0.3)}, cluster=SLOW, steps=5)
    assert {row["method"] for row in found.rows} == {"calm", "bold"}
    assert str(recipe_of(mine)) == "bsp:lr=0.1"


def test_two_of_one_name_are_refused():
    with pytest.raises(mh.Refused, match="bsp is there twice"):
        mh.compare("digits", [mh.bsp(), mh.bsp()], cluster=SLOW, steps=5)
    with pytest.raises(mh.Refused, match="the number of methods is 0"):
        mh.compare("digits", [], cluster=SLOW, steps=5)


def test_a_target_that_cannot_be_measured_is_refused():
    with pytest.raises(
        mh.Refused, match=r"the target is accuracy 0.9, but must be a loss: regression has no test data"
    ):
        mh.compare("regression", [mh.bsp()], cluster=SLOW, steps=5, target="accuracy=0.9")
    found = mh.compare("regression", [mh.bsp()], cluster=SLOW, steps=20, target="loss=1000")
    assert found.rows[0]["reached"] == 1 and found.rows[0]["accuracy"] is None


def test_tuning_finds_a_rate_that_works_and_says_what_it_did():
    wild = {"wild": mh.bsp(lr=30.0)}
    plain = mh.compare("digits", wild, cluster=SLOW, epochs=6)
    tuned = mh.compare("digits", wild, cluster=SLOW, epochs=6, tune=True)
    assert tuned.rows[0]["method"] == "wild" and "times 0.3, 1, 3" in tuned.notes[0] and "wild 9" in tuned.notes[0]
    assert (tuned.rows[0]["loss"] or 1e9) <= (plain.rows[0]["loss"] or 1e9)
    assert len(tuned.runs) == 1, "trials are not compared"


def test_a_strategy_made_by_hand_has_nothing_to_tune():
    strategy = mh.bsp(rule=mh.rules.Momentum(0.1))
    found = mh.compare("digits", [strategy], cluster=SLOW, steps=8, tune=True)
    assert "has none of its own" in found.notes[0]


@pytest.mark.parametrize("name", sorted(catalog.__all__))
def test_every_recipe_signs_what_it_makes(name):
    required = {"adaptive_batch": {}, "hierarchical_server": {"groups": 2}}.get(name, {})
    recipe = recipe_of(getattr(mh, name)(**required))
    assert (recipe.name, dict(recipe.knobs)) == (name.replace("_", "-"), required)

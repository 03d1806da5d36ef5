"""Evaluations during a run: in lock step they change nothing, and the record says what they cost."""

import pytest

import manyhands as mh
from manyhands.core.errors import Refused
from manyhands.report.measures import Measures
from manyhands.report.reading import of_lines

LOCKSTEP = [mh.bsp, mh.easgd, mh.diloco, mh.d_psgd, mh.topk_sgd, mh.gpipe]
FREE = [mh.ssp, mh.dc_asgd, mh.ad_psgd, mh.gossip, mh.hogwild, mh.pipedream]
SLOW = mh.Cluster(workers=4, stragglers=mh.Slow([1], 4))


def evaluations(result):
    return [line for line in result.records if "evaluated" in line]


@pytest.mark.parametrize("method", LOCKSTEP, ids=lambda method: method.__name__)
def test_evaluations_do_not_change_a_run_in_lock_step(method):
    plain = mh.train("digits", method(), cluster=SLOW, steps=30)
    seen = mh.train("digits", method(), cluster=SLOW, steps=30, evaluate_every=8)
    assert seen.weights_sha256 == plain.weights_sha256
    assert [line["evaluated"] for line in evaluations(seen)] == [8, 16, 24]
    m, alone = Measures(of_lines(seen.records)), Measures(of_lines(plain.records))
    assert m.samples == alone.samples
    assert m.bytes == alone.bytes, "what an evaluation sends is left out"
    if method is not mh.gpipe:  # whose stages quiesce one after the other
        assert m.seconds == pytest.approx(alone.seconds, rel=0.02)


@pytest.mark.parametrize("method", FREE, ids=lambda method: method.__name__)
def test_other_methods_need_about_the_same_time(method):
    plain = mh.train("digits", method(), cluster=SLOW, steps=200)
    seen = mh.train("digits", method(), cluster=SLOW, steps=200, evaluate_every=20)
    assert len(evaluations(seen)) == 9 and evaluations(seen)[-1]["accuracy"] > evaluations(seen)[0]["accuracy"]
    m, alone = Measures(of_lines(seen.records)), Measures(of_lines(plain.records))
    assert m.seconds == pytest.approx(alone.seconds, rel=0.12)
    assert m.samples == alone.samples


def test_an_evaluation_equals_the_end_of_a_run_of_that_length():
    cluster = mh.Cluster(workers=2)
    seen = mh.train("digits", mh.bsp(), cluster=cluster, steps=30, evaluate_every=10)
    ends = [mh.train("digits", mh.bsp(), cluster=cluster, steps=steps).test_accuracy for steps in (10, 20)]
    assert [line["accuracy"] for line in evaluations(seen)] == ends


def test_checkpoints_and_evaluations_may_fall_together_or_not(tmp_path):
    run = {"cluster": mh.Cluster(workers=2), "steps": 20, "evaluate_every": 4}
    saved = mh.train("digits", mh.ssp(), checkpoint_every=6, out=tmp_path, **run)
    assert [line["evaluated"] for line in evaluations(saved)] == [4, 8, 12, 16]
    steps = sorted(int(path.name.split("-")[-1]) for path in (tmp_path / "checkpoints").iterdir())
    assert steps[-1] == 20 and set(steps) <= {6, 12, 18, 20}, "evaluations save nothing"


def test_real_processes_are_evaluated_too():
    real = mh.train("digits", mh.bsp(), on=mh.Local(2), steps=30, evaluate_every=10)
    virtual = mh.train("digits", mh.bsp(), on=mh.Cluster(2), steps=30, evaluate_every=10)
    assert real.weights_sha256 == virtual.weights_sha256
    assert [line["accuracy"] for line in evaluations(real)] == [line["accuracy"] for line in evaluations(virtual)]
    run = of_lines(real.records)
    assert len(Measures(run).pauses) == 2 and run.memory == of_lines(virtual.records).memory | run.memory
    assert all(line["compute"] > 0 and line["wait"] >= 0 and line["send"] >= 0 for line in run.steps)


@pytest.mark.parametrize(
    ("task", "cluster", "every", "words"),
    [
        ("digits", mh.Cluster(workers=2), 0, "evaluate_every is 0, but must be >= 1"),
        ("vgg16", mh.Cluster(workers=2), 5, "vgg16 has no test data or metric"),
        ("digits", mh.Cluster(workers=2, order=[0, 1]), 1, "the cluster prescribes the order of events"),
    ],
)
def test_an_evaluation_that_is_impossible_is_refused(task, cluster, every, words):
    with pytest.raises(Refused, match=words):
        mh.train(task, mh.bsp(), cluster=cluster, steps=2, evaluate_every=every)

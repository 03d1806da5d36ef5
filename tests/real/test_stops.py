"""Whoever launches is interrupted, asked to stop, or killed: everyone ends soon, and what was learned is kept."""

import os
import signal
import threading
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.runtime.launch.launch import launch
from manyhands.runtime.membership import watcher
from pace import assert_within

from .tools import LIMIT, Strike, small, struck, until

pytestmark = pytest.mark.timeout(60)

TRAINS = """
import sys
import manyhands as mh
from real.tools import small
if __name__ == "__main__":
    result = mh.train(small(), mh.{method}(lr=0.01), workers=2, link="{link}", steps={steps}, out=sys.argv[1])
    print(result.stopped_at, result.samples)
"""
NEVER_JOINS = "import time\nprint('up')\ntime.sleep(3600)\n"
LONG = ["--workers", 2, "--steps", 10**6]
TRAIN = ["-m", "manyhands.cli", "train", "ssp", *LONG]


@pytest.fixture
def script(tmp_path):
    def write(text, **fields):
        path = tmp_path / "script.py"
        path.write_text(text.format(**fields) if fields else text)
        return path

    return write


def trains(folder):
    """Whether steps have been recorded."""
    record = Path(folder) / "record.jsonl"
    return record.exists() and '"loss"' in record.read_text()


# -- Ctrl-C -------------------------------------------------------------------------------------------


def interrupt(program, to_all=True):
    os.killpg(program.pid, signal.SIGINT) if to_all else os.kill(program.pid, signal.SIGINT)


def interrupted(program, to_all):
    """Ctrl-C, at a terminal or for the launching process alone; what is said until everyone has ended."""
    began = time.monotonic()
    interrupt(program, to_all)
    code, out, said = program.ended()
    assert_within(LIMIT, time.monotonic() - began)
    assert (code, out, said.splitlines()[-1]) == (130, "", "manyhands: interrupted")
    assert "Traceback" not in said
    return said.splitlines()


SAVING = "manyhands: interrupted: the run stops after this step and is saved; a second Ctrl-C stops it at once"


@pytest.mark.parametrize("to_all", [True, False], ids=["group", "launcher"])
@pytest.mark.parametrize("method", ["bsp", "ssp"])
def test_an_interrupt_saves_a_training_and_says_how_to_resume(method, to_all, tmp_path, start, quickly):
    out = tmp_path / "out"
    program = start("-m", "manyhands.cli", "train", method, *LONG, "--out", out)
    until(lambda: trains(out))
    interrupt(program, to_all)
    code, summary, said = program.ended(10.0)
    assert code == 130 and f"{method} on digits" in summary and "Traceback" not in said
    assert SAVING in said.splitlines()
    saved = mh.load_checkpoint(out / "checkpoints")
    again = f"manyhands train {method} --workers 2 --steps 1000000 --out {out} --resume {out}"
    words = f"manyhands: stopped at step {saved.facts['step']}, saved in {saved.path}; to resume: {again}"
    assert said.splitlines()[-1] == words
    steps = saved.facts["step"] + 1
    resumed = mh.train("digits", getattr(mh, method)(), workers=2, steps=steps, resume=out)
    assert {line["step"] for line in resumed.records if line["kind"] == "step"} and resumed.stopped_at is None


def test_a_run_without_a_folder_is_ended_at_once_by_an_interrupt(tmp_path):
    strike = Strike(interrupt_and_wait, tmp_path)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        mh.train(small(), struck(mh.bsp(lr=0.01), strike), workers=2, steps=10**6)
    assert_within(LIMIT, strike.seconds_ago())


def interrupt_and_wait(w, batch):
    """A step that never ends, during which Ctrl-C is pressed."""
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(3600)


def interrupt_twice_and_wait(w, batch):
    os.kill(os.getppid(), signal.SIGINT)
    until(lambda: w.transport.control.finishing)
    interrupt_and_wait(w, batch)


def terminate_interrupt_and_wait(w, batch):
    os.kill(os.getppid(), signal.SIGTERM)
    until(lambda: w.transport.control.finishing)
    interrupt_and_wait(w, batch)


@pytest.mark.parametrize("act", [interrupt_twice_and_wait, terminate_interrupt_and_wait])
def test_a_second_interrupt_ends_a_run_at_once(act, tmp_path):
    strike = Strike(act, tmp_path)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        mh.train(small(), struck(mh.bsp(lr=0.01), strike), workers=2, steps=10**6, out=tmp_path / "out")
    assert_within(LIMIT, strike.seconds_ago())
    assert not (tmp_path / "out" / "checkpoints").exists()


def interrupt_once(w, batch):
    os.kill(os.getppid(), signal.SIGINT)
    until(lambda: w.transport.control.finishing)
    return batch


def test_a_signal_that_another_thread_of_the_launcher_gets_is_noticed(tmp_path):
    """It does not end the wait of the main thread, in which Python handles it."""
    out = tmp_path / "out"

    def interrupt_from_here():
        until(lambda: trains(out))
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    other = threading.Thread(target=interrupt_from_here)
    other.start()
    with pytest.raises(KeyboardInterrupt, match=r"^the run was stopped at step \d+ and saved: resume="):
        mh.train(small(), mh.bsp(lr=0.01), workers=2, steps=10**6, out=out)
    other.join()


def test_an_interrupt_is_raised_when_the_run_is_saved(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt, match=r"^the run was stopped at step \d+ and saved: resume=") as raised:
        mh.train(small(), struck(mh.bsp(lr=0.01), Strike(interrupt_once, tmp_path)), workers=2, steps=10**6, out=out)
    assert mh.load_checkpoint(out / "checkpoints").facts["step"] == raised.value.result.stopped_at
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_comparison_that_is_interrupted_leaves_no_checkpoint_in_the_way_of_the_next(tmp_path):
    strategy = struck(mh.bsp(lr=0.01), Strike(interrupt_and_wait, tmp_path))
    with pytest.raises(KeyboardInterrupt):
        mh.compare(small(), {"first": strategy, "second": mh.ssp()}, workers=2, steps=10**5, out=tmp_path / "out")
    assert not list((tmp_path / "out").glob("**/checkpoints")) and not list((tmp_path / "out").glob("second*"))


@pytest.mark.parametrize("moment", ["the first rank is there", "all ranks are there"])
def test_an_interrupt_while_ranks_are_being_started_is_not_forgotten(moment, tmp_path, start):
    program = start(*TRAIN, "--out", tmp_path)
    until(lambda: len(program.ranks()) >= (1 if "first" in moment else 2))
    assert "manyhands: nothing was saved" in interrupted(program, to_all=True)


def nothing(transport):
    return None


def test_an_interrupt_between_two_ranks_comes_when_all_are_started(monkeypatch):
    begin, started = SpawnProcess.start, []

    def interrupted_after(process):
        begin(process)
        started.append(process.pid)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(SpawnProcess, "start", interrupted_after)
    monkeypatch.setattr(watcher, "HASTE", 30.0)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch(nothing, workers=2)
    assert len(started) == 2
    assert_within(15, time.monotonic() - began)  # ranks that have not joined are not waited for


@pytest.mark.parametrize("to_all", [True, False], ids=["group", "launcher"])
def test_an_interrupt_ends_scripts_that_never_join(to_all, script, start):
    program = start("-m", "manyhands.cli", "run", "-n", 2, script(NEVER_JOINS))
    assert sorted(program.process.stdout.readline() for _ in range(2)) == ["[0] up\n", "[1] up\n"]
    interrupted(program, to_all)


# -- a launching process that is killed ---------------------------------------------------------------


def killed(program):
    """Nobody is left to end them, so they end by themselves."""
    assert len(program.others()) >= 2
    program.process.kill()
    began = time.monotonic()
    program.process.wait()
    until(lambda: not program.others())
    assert_within(LIMIT, time.monotonic() - began)


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_ranks_end_with_their_launcher(link, tmp_path, start):
    program = start(*TRAIN, "--link", link, "--out", tmp_path)
    until(lambda: trains(tmp_path))
    killed(program)


def test_so_do_ranks_that_have_not_joined_yet(tmp_path, start):
    program = start(*TRAIN, "--out", tmp_path)
    until(lambda: len(program.ranks()) == 2)
    killed(program)


def test_so_do_scripts_that_never_join(script, start):
    program = start("-m", "manyhands.cli", "run", "-n", 2, script(NEVER_JOINS))
    assert sorted(program.process.stdout.readline() for _ in range(2)) == ["[0] up\n", "[1] up\n"]
    killed(program)


# -- SIGTERM ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "link"),
    [
        ("bsp", "tcp"),
        ("ssp", "shm"),
        pytest.param("d_psgd", "shm", marks=pytest.mark.soak),
        pytest.param("pipedream", "shm", marks=pytest.mark.soak),
    ],
)
def test_a_run_that_is_asked_to_stop_can_be_resumed(method, link, tmp_path, script, start, quickly):
    program = start(script(TRAINS, method=method, link=link, steps=10**5), tmp_path / "out")
    until(lambda: trains(tmp_path / "out"))
    program.process.terminate()
    code, out, said = program.ended()
    assert (code, said) == (0, "")
    stopped, samples = map(int, out.split())
    saved = mh.load_checkpoint(tmp_path / "out" / "checkpoints")
    recipe, replicas = getattr(mh, method), 1 if method == "pipedream" else 2
    assert saved.facts["step"] == samples // (4 * replicas) and stopped > 0
    steps = saved.facts["step"] + min(10, saved.facts["step"])
    settings = {"workers": 2, "link": link, "steps": steps}
    resumed = mh.train(small(), recipe(lr=0.01), resume=tmp_path / "out", **settings)
    assert resumed.samples == (steps - saved.facts["step"]) * 4 * replicas
    if recipe is not mh.ssp:
        assert stopped == saved.facts["step"], "in lock step all stop at the same step"
        saves = {"out": tmp_path / "whole", "checkpoint_every": stopped}
        whole = mh.train(small(), recipe(lr=0.01), cluster=mh.Cluster(workers=2), steps=steps, **saves)
        assert resumed.weights_sha256 == whole.weights_sha256


def stop_and_wait(w, batch):
    """A step that never ends. Whoever launched it is asked to stop, and has asked us."""
    os.kill(os.getppid(), signal.SIGTERM)
    until(lambda: w.transport.control.finishing)
    time.sleep(3600)


def stop_twice_and_wait(w, batch):
    os.kill(os.getppid(), signal.SIGTERM)
    until(lambda: w.transport.control.finishing)
    stop_and_wait(w, batch)


def test_who_is_asked_twice_stops_at_once(tmp_path):
    strike = Strike(stop_twice_and_wait, tmp_path)
    with pytest.raises(mh.ManyhandsError, match=r"^the run was asked to stop twice: it stopped at once$"):
        mh.train(small(), struck(mh.bsp(lr=0.01), strike), workers=2, steps=10**6)
    assert_within(LIMIT, strike.seconds_ago())


def test_a_good_moment_that_never_comes_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(watcher, "PATIENCE", 0.5)
    strike = Strike(stop_and_wait, tmp_path)
    with pytest.raises(mh.ManyhandsError, match=r"asked to stop, but has not stopped within 0\.5 s$"):
        mh.train(small(), struck(mh.bsp(lr=0.01), strike), workers=2, steps=10**6)
    assert strike.seconds_ago() > 0.5
    assert_within(0.5 + LIMIT, strike.seconds_ago())

"""A rank is killed, stopped, ends or fails: the run goes on or stops, as its method promises, and says who and why."""

import functools
import os
import signal
from dataclasses import replace

import pytest

import manyhands as mh
from manyhands.runtime.launch import launch as launching
from manyhands.runtime.launch.launch import launch, run_script
from manyhands.runtime.membership import memfd
from pace import assert_within

from .tools import (
    KILLED,
    LIMIT,
    Strike,
    end,
    exit_in_the_model,
    fail_in_the_model,
    kill,
    kill_the_last,
    messages,
    net,
    net_of_its_own,
    no_number,
    small,
    stop,
    struck,
    taken_by,
    with_mortal_server,
)

pytestmark = pytest.mark.timeout(60)

MANY = 10**6
STOPPED = "it was stopped (SIGSTOP) and has been killed"
FAULTS = pytest.mark.parametrize(("act", "why"), [(kill, KILLED), (stop, STOPPED)], ids=["SIGKILL", "SIGSTOP"])


# -- everyone is needed -------------------------------------------------------------------------------


@FAULTS
@pytest.mark.parametrize(
    ("method", "link"),
    [
        (mh.bsp, "shm"),
        (mh.bsp, "tcp"),
        pytest.param(mh.gpipe, "shm", marks=pytest.mark.soak),
        (mh.pipedream, "tcp"),
        (mh.dni, "shm"),
    ],
)
def test_a_method_that_needs_all_workers_stops_at_once(method, link, act, why, tmp_path, caplog, quickly):
    strike = Strike(act, tmp_path)
    with pytest.raises(mh.PeerLost, match=f"^rank 1 is lost: {why.replace('(', '.').replace(')', '.')}$"):
        mh.train(small(), struck(method(lr=0.01), strike), workers=2, link=link, steps=MANY)
    assert_within(LIMIT, strike.seconds_ago())
    assert messages(caplog) == [f"rank 1 is lost: {why}"]


def test_any_method_stops_without_its_server(tmp_path, caplog, capfd):
    strike = Strike(kill_the_last, tmp_path, rank=0)
    with pytest.raises(mh.PeerLost, match=f"^rank 2 is lost: {KILLED}$"):
        mh.train(small(), struck(mh.ssp(lr=0.01), strike), workers=2, servers=1, steps=MANY)
    assert_within(LIMIT, strike.seconds_ago())
    assert messages(caplog) == [f"rank 2 is lost: {KILLED}"]
    assert capfd.readouterr() == ("", "")


# -- the others go on ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "act", "why"),
    [
        (mh.ssp, kill, KILLED),
        (mh.ssp, stop, STOPPED),
        pytest.param(mh.downpour, kill, KILLED, marks=pytest.mark.soak),
        pytest.param(functools.partial(mh.easgd, asynchronous=True), kill, KILLED, marks=pytest.mark.soak),
        (mh.ad_psgd, kill, KILLED),
        pytest.param(mh.gossip, kill, KILLED, marks=pytest.mark.soak),
        (mh.hogwild, kill, KILLED),
    ],
    ids=["ssp", "ssp stopped", "downpour", "easgd asynchronous", "ad_psgd", "gossip", "hogwild"],
)
def test_the_others_do_what_the_lost_worker_cannot(method, act, why, tmp_path, quickly):
    strike = Strike(act, tmp_path)
    result = mh.train("digits", struck(method(), strike), workers=3)
    assert result.lost == [(1, why)]
    taken = taken_by(result)
    assert taken[0] + taken[2] == result.steps * 3 - strike.step - 1, "it took its last one with it"
    assert taken[0] > 0 and taken[2] > 0
    assert result.test_accuracy >= 0.93


def test_with_two_servers_for_every_shard_a_lost_server_does_not_matter(quickly):
    strategy = with_mortal_server(mh.ssp(lr=0.05, replicas=2), rank=3, pushes=40)
    result = mh.train(small(), strategy, workers=2, servers=2, steps=100)
    losses = [line["loss"] for line in result.records if "loss" in line]
    assert result.lost == [(3, KILLED)]
    assert len(losses) == 200, "all that was granted was trained"
    assert result.final_loss < 0.1 * losses[0]


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_nor_does_it_change_a_bit_of_a_bulk_run(link, quickly):
    task = small()
    whole = mh.train(task, mh.bsp_server(lr=0.1), cluster=mh.Cluster(workers=2), steps=30)
    strategy = with_mortal_server(mh.bsp_server(lr=0.1, replicas=2), rank=2, pushes=25)
    result = mh.train(task, strategy, workers=2, servers=2, link=link, steps=30)
    assert result.lost == [(2, KILLED)]
    assert result.weights_sha256 == whole.weights_sha256


@FAULTS
def test_in_lock_step_the_others_continue_without_a_neighbour(act, why, tmp_path, quickly):
    strike = Strike(act, tmp_path)
    result = mh.train("digits", struck(mh.d_psgd(), strike), workers=3, epochs=20)
    assert result.lost == [(1, why)]
    taken = taken_by(result)
    assert taken[0] == taken[2] == result.steps and taken[1] <= strike.step
    assert result.test_accuracy >= 0.93


# -- a worker that ends by itself ---------------------------------------------------------------------


def test_a_worker_that_ends_without_a_word_is_named(tmp_path, quickly):
    strike = Strike(end, tmp_path)
    with pytest.raises(mh.PeerLost, match=r"^rank 1 is lost: it exited without leaving the run \(exit code 0\)$"):
        mh.train(small(), struck(mh.bsp(lr=0.01), strike), workers=2, steps=MANY)
    assert_within(LIMIT, strike.seconds_ago())


@pytest.mark.parametrize(
    ("act", "text"),
    [(fail_in_the_model, "ZeroDivisionError: an error of my own"), (exit_in_the_model, "SystemExit: 0")],
)
def test_an_error_in_a_model_is_shown_once(act, text, tmp_path, capfd):
    strike = Strike(act, tmp_path)
    with pytest.raises(mh.ManyhandsError, match=f"^rank 1 failed: {text}$"):
        mh.train(small(), struck(mh.ssp(lr=0.01), strike), workers=2, steps=MANY)
    assert_within(LIMIT, strike.seconds_ago())
    said = capfd.readouterr().err
    assert said.count("Traceback") == 1 and said.rstrip().endswith(text)


# -- no numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [mh.bsp, mh.ssp])
def test_a_loss_that_is_no_number_stops_all_ranks(method, tmp_path, quickly):
    strike = Strike(no_number, tmp_path)
    with pytest.raises(mh.Diverged, match="the loss is nan on rank 1 at step 5") as caught:
        mh.train(small(), struck(method(lr=0.01), strike), workers=2, out=tmp_path, steps=MANY)
    assert (caught.value.rank, caught.value.step) == (1, 5)
    assert_within(LIMIT, strike.seconds_ago())


def test_it_is_an_error_in_the_launcher_and_nowhere_else(tmp_path, capfd):
    with pytest.raises(mh.Diverged):
        mh.train(small(), struck(mh.bsp(lr=0.01), Strike(no_number, tmp_path)), workers=2, steps=MANY)
    assert capfd.readouterr() == ("", "")


# -- the command line ---------------------------------------------------------------------------------

SCRIPT = """
import os, signal
import manyhands as mh
from real.tools import net, small
task, rank = small(), int(os.environ["RANK"])
with mh.join(net({width}), strategy=mh.{method}(lr=0.01), loss=task.loss) as hands:
    for step, (x, y) in enumerate(hands.share(task.data, 4, steps=10**6)):
        if (rank, step) == (1, 5):
            {act}
        try:
            hands.step(x, y)
        except Exception as error:
            print(type(error).__name__, error)
            raise
"""
"""A loop of one's own; each rank writes what it saw of the end."""


@pytest.mark.parametrize(
    ("method", "act", "code", "seen"),
    [
        ("bsp", "os.kill(os.getpid(), signal.SIGKILL)", 3, f"PeerLost rank 1 is lost: {KILLED}"),
        ("bsp", "x *= float('nan')", 4, "Diverged the loss is nan on rank 1 at step 5"),
        ("ssp", "x *= float('nan')", 4, "Diverged the loss is nan on rank 1 at step 5"),
    ],
)
def test_the_exit_code_and_every_survivor_say_why(method, act, code, seen, tmp_path, start):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(width=8, method=method, act=act))
    ended, out, said = start("-m", "manyhands.cli", "run", "-n", 3, script).ended()
    assert ended == code
    survivors = (0, 2) if code == 3 else (0, 1, 2)
    assert sorted(line[: len(seen) + 4] for line in out.splitlines()) == [f"[{rank}] {seen}" for rank in survivors]
    assert said.count(seen.split(" ", 1)[1]) == 1 and len(said.splitlines()) == 1


AFTERWARDS = """
import manyhands as mh
from real.tools import net, small
task = small()
with mh.join(net(), strategy=mh.ssp(lr=0.01), loss=task.loss) as hands:
    for x, y in hands.share(task.data, 4, steps=2):
        hands.step(x, y)
{act}
"""


def test_what_the_launcher_cannot_know_a_script_says_itself(tmp_path, start):
    script = tmp_path / "script.py"
    script.write_text(AFTERWARDS.format(act="hands.step(x, y) if hands.rank == 1 else None"))
    ended, _, said = start("-m", "manyhands.cli", "run", "-n", 2, script).ended()
    assert ended == 2
    assert said.splitlines() == [
        "[1] manyhands: step was called outside the with block of its hands, but must be called within",
        "manyhands: rank 1 failed after it had left: exit code 2",
    ]


LOOKS_BACK = """
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))
"""


@pytest.mark.parametrize("act", ["pass", "hands.step(x, y)"], ids=["well", "badly"])
def test_no_thread_is_at_work_when_python_takes_itself_down(act, tmp_path, start):
    """One that were could abort the process: it would seem to have been killed."""
    script = tmp_path / "script.py"
    script.write_text(LOOKS_BACK + AFTERWARDS.format(act=act))
    _, out, _ = start("-m", "manyhands.cli", "run", "-n", 2, script).ended()
    assert sorted(out.splitlines()) == ["[0] ['MainThread']", "[1] ['MainThread']"]


def test_an_error_of_the_scripts_own_is_shown_with_its_trace(tmp_path, start):
    script = tmp_path / "script.py"
    script.write_text(AFTERWARDS.format(act="1 / 0 if hands.rank == 1 else None"))
    ended, _, said = start("-m", "manyhands.cli", "run", "-n", 2, script).ended()
    assert ended == 1
    assert said.count("Traceback") == 1 and "ZeroDivisionError: division by zero" in said


# -- who cannot begin ---------------------------------------------------------------------------------


def test_another_model_is_refused_and_its_rank_named(tmp_path, quickly):
    own = functools.partial(net_of_its_own, os.getpid(), tmp_path)
    with pytest.raises(mh.Refused, match=r"^rank 1 has another model than rank 0: 0\.weight"):
        mh.train(small(own), mh.ssp(lr=0.01), workers=2, steps=MANY)


def test_another_model_is_refused_in_a_loop_of_ones_own(tmp_path, start):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(width="8 + 8 * (rank == 1)", method="ssp", act="pass"))
    ended, _, said = start("-m", "manyhands.cli", "run", "-n", 2, script).ended()
    assert ended == 2
    assert said.splitlines()[-1].startswith("manyhands: rank 1 has another model than rank 0: 0.weight [16, 4]")


def test_a_rank_that_never_comes_is_named(tmp_path, caplog):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1': time.sleep(3600)\n"
        "from manyhands.runtime.launch.join import connect\ntry: connect()\nexcept Exception: pass\n"
    )
    assert run_script(str(script), [], workers=2, deadline=1.0) == 1
    assert messages(caplog) == ["rank 1 has not joined within 1 s (--join-timeout or MANYHANDS_JOIN_TIMEOUT sets this)"]


class Elsewhere(str):
    """An address to listen on that says it is another."""

    def __format__(self, spec):
        return "127.0.0.1"


def nothing(transport):
    return None


def test_ranks_that_cannot_reach_each_other_are_named(monkeypatch):
    def specs(*numbers, **knobs):
        first, *others = whole(*numbers, **knobs)
        return [replace(first, bind=Elsewhere("127.0.0.2")), *others]

    whole = launching.rank_specs
    monkeypatch.setattr(launching, "rank_specs", specs)
    with pytest.raises(mh.Refused, match=r"^rank 1 cannot reach rank 0 at 127\.0\.0\.1:\d+: "):
        launch(nothing, workers=2, link="tcp")


def test_a_shortage_of_memory_is_an_error_that_says_how_much_there_is(monkeypatch, quickly):
    monkeypatch.setattr(memfd, "free_bytes", lambda: 1000)
    with pytest.raises(mh.ManyhandsError, match=r"^the shared memory '.*' needs .* MB: only 0\.0 MB are free$"):
        mh.train(small(functools.partial(net, 4000)), mh.ssp(lr=0.01), workers=2, steps=MANY)


def test_signals_are_handled_as_before(tmp_path, quickly):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    mh.train(small(), mh.bsp(lr=0.01), workers=1, steps=1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


def test_the_time_in_which_ranks_must_come_can_be_chosen(tmp_path, start):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1': time.sleep(3600)\n"
        "from manyhands.runtime.launch.join import connect\ntry: connect()\nexcept Exception: pass\n"
    )
    ended, _, said = start("-m", "manyhands.cli", "run", "-n", 2, "--join-timeout", 0.5, script).ended()
    assert ended == 1 and said.splitlines()[-1].startswith(
        "manyhands: rank 1 has not joined within 0.5 s (--join-timeout"
    )
    ended, _, said = start("-m", "manyhands.cli", "run", "--join-timeout=-1", script).ended()
    assert (ended, said) == (2, "manyhands: the join timeout is -1.0, but must be a number of seconds > 0\n")

"""Launching real processes: results, failures, signals, and never a process left behind."""

import multiprocessing
import multiprocessing.context
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from fake_ranks import FAKE_RANK

from manyhands.cli import main
from manyhands.core.errors import Diverged, ManyhandsError, PeerLost, Refused
from manyhands.core.port import Tag, recv
from manyhands.runtime.launch.launch import launch, run_script
from manyhands.runtime.launch.rank_processes import RankProcesses
from manyhands.runtime.membership.watcher import Watcher
from pace import assert_within

pytestmark = pytest.mark.timeout(120)


def start(program, workers=2, **knobs):
    return launch(program, workers=workers, context="forkserver", **knobs)


LOOKED = Tag("looked")


# Programs


def where(transport):
    return transport.rank, transport.role, transport.hosts, torch.get_num_threads(), os.getpgid(0) == os.getpid()


def much(transport):
    return torch.full((500_000,), float(transport.rank))


def fails(errors, transport):
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if transport.rank == 1:
        raise ValueError("no such thing")
    recv(transport, Tag("never"))


def diverges(errors, transport):
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if transport.rank == 1:
        raise Diverged(1, 7, float("inf"))
    recv(transport, Tag("never"))


def is_killed(transport):
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while transport.peers():
        time.sleep(0.01)
    return transport.lost


def needs_everyone(transport):
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while transport.peers():
        time.sleep(0.01)
    raise PeerLost(*transport.lost[0])


def tells(transport):
    transport.control.send_lines([{"rank": transport.rank}])


def returns_a_function(transport):
    return lambda: None


def dies_after_leaving(transport):
    transport.leave()
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def leaves_while_a_thread_fails(transport):
    """A thread has begun to report its failure, and has not finished, when the program leaves."""
    report, begun, go_on = transport.control.failed, threading.Event(), threading.Event()

    def report_slowly(error):
        begun.set()
        go_on.wait(30)
        report(error)

    transport.control.failed = report_slowly
    threading.Thread(target=transport.fail, args=(Diverged(0, 7, float("inf")),), daemon=True).start()
    begun.wait(30)
    threading.Thread(target=lambda: (time.sleep(0.1), go_on.set()), daemon=True).start()
    transport.leave()


def works(transport):
    os.write(1, f"{os.getpid()}\n".encode())  # in one piece: two ranks speak at once
    ends = time.monotonic() + 60
    while time.monotonic() < ends and not transport.control.finishing:
        transport.check()
        time.sleep(0.01)
    return transport.control.finishing


# launch


def test_results_come_back_by_rank():
    launched = start(where, workers=2, servers=1, hosts=(0, 1, 1))
    roles = ["worker", "worker", "server"]
    assert launched.results == [(rank, roles[rank], (0, 1, 1), 1, True) for rank in range(3)]
    assert launched.lost == []


def role(transport):
    """The role and the learners; the learner stays until both actors have looked."""
    learners = list(transport.peers("learner"))
    if transport.role == "learner":
        for actor in (0, 1):
            recv(transport, LOOKED, frm=actor)
    else:
        transport.send(2, LOOKED)
    return transport.role, learners


def test_roles_are_counted_in_rank_order():
    launched = launch(role, roles={"actor": 2, "learner": 1}, context="forkserver")
    assert launched.results == [("actor", [2]), ("actor", [2]), ("learner", [])]


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({}, "roles is None and workers is None, but exactly one of them must be given"),
        ({"roles": {"worker": 1}, "workers": 1}, "but exactly one of them must be given"),
        ({"roles": {"worker": 1, "server": -1}}, "servers is -1, but must be >= 0"),
        ({"roles": {"actor": 1}, "spares": 1}, "spares is 1, but must be 0 in a run without workers"),
        ({"workers": 0}, "workers is 0, but must be >= 1"),
        ({"roles": {}}, "the number of ranks is 0, but must be >= 1"),
    ],
)
def test_impossible_roles_are_refused(wanted, says):
    with pytest.raises(Refused, match=says):
        launch(where, **wanted)


def test_a_large_result_comes_back_whole():
    results = start(much).results
    assert [(float(x.min()), float(x.max()), len(x)) for x in results] == [(0, 0, 500_000), (1, 1, 500_000)]


def test_a_failure_is_raised_here_and_its_trace_shown_once(tmp_path):
    with pytest.raises(ManyhandsError, match=r"^rank 1 failed: ValueError: no such thing$"):
        start(partial(fails, tmp_path / "errors"))
    assert (tmp_path / "errors").read_text().count("Traceback") == 1


def test_an_error_of_ours_is_raised_as_it_was_without_any_trace(tmp_path):
    with pytest.raises(Diverged, match="rank 1 at step 7") as caught:
        start(partial(diverges, tmp_path / "errors"))
    assert (caught.value.rank, caught.value.step, caught.value.loss) == (1, 7, float("inf"))
    assert (tmp_path / "errors").read_text() == ""


def test_a_failure_is_reported_even_if_the_program_has_come_to_its_end():
    with pytest.raises(Diverged, match="step 7"):
        start(leaves_while_a_thread_fails, workers=1)


def test_a_lost_rank_is_an_event_and_the_others_continue():
    launched = start(is_killed)
    assert launched.lost == [(1, "it was killed by SIGKILL")]
    assert [list(map(tuple, launched.results[0])), launched.results[1]] == [launched.lost, None]


def test_a_program_that_cannot_continue_without_it_raises_the_loss():
    with pytest.raises(PeerLost, match="rank 1 is lost: it was killed by SIGKILL"):
        start(needs_everyone)


def test_rows_are_handed_over():
    rows = []
    start(tells, on_lines=rows.extend)
    assert sorted(row["rank"] for row in rows) == [0, 1]


def test_what_cannot_be_sent_is_refused_before_anything_is_started(monkeypatch):
    monkeypatch.setattr(multiprocessing.context.ForkServerProcess, "start", lambda _: pytest.fail("started"))
    with pytest.raises(Refused, match="cannot be sent to other processes"):
        start(partial(where, threading.Lock()))


def test_a_program_without_a_name_is_sent_by_value():
    shift = 10
    assert start(lambda transport: transport.rank + shift).results == [10, 11]


def test_a_result_that_cannot_be_sent_is_refused():
    with pytest.raises(Refused, match=r"the result of rank [01] cannot be pickled"):
        start(returns_a_function)


def test_a_result_that_never_comes_is_missed():
    with pytest.raises(PeerLost, match="rank 1 is lost: it left, but its result is missing: it was killed by SIGKILL"):
        start(dies_after_leaving)


def test_a_launch_that_fails_half_way_leaves_no_process(monkeypatch):
    begin, started = multiprocessing.context.ForkServerProcess.start, []

    def third_fails(process):
        if len(started) == 2:
            raise OSError("no more processes")
        begin(process)
        started.append(process.pid)

    monkeypatch.setattr(multiprocessing.context.ForkServerProcess, "start", third_fails)
    with pytest.raises(OSError, match="no more processes"):
        start(works, workers=3)
    assert len(started) == 2 and not any(map(is_there, started))


def is_there(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


# Signals to the launching process

LAUNCHES = """
import multiprocessing, signal, sys, time
sys.path[:0] = {folders!r}
multiprocessing.set_forkserver_preload(["torch", "manyhands.runtime.launch.join", "test_launch"])
from manyhands.runtime.launch.launch import launch
from test_launch import works
if __name__ == "__main__":
    before = signal.getsignal(signal.SIGTERM)
    try:
        print("results", launch(works, workers=2, context={context!r}).results)
    except KeyboardInterrupt:
        print("interrupted")
    assert signal.getsignal(signal.SIGTERM) is before
"""


def test_an_interrupt_while_the_watcher_starts_does_not_break_that_off(monkeypatch, capfd):
    """Begun half, its thread would find everything closed under its feet, and complain about it."""
    begin, process_starts = Watcher.start, []

    def interrupted(watcher, **knobs):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)  # where Python would notice
        begin(watcher, **knobs)

    def starting(processes, watcher):
        process_starts.append(watcher._thread.is_alive())

    monkeypatch.setattr(Watcher, "start", interrupted)
    monkeypatch.setattr(RankProcesses, "start", starting)
    with pytest.raises(KeyboardInterrupt):
        start(where)
    assert process_starts == [True]
    assert capfd.readouterr().err == ""


@pytest.fixture
def launcher(tmp_path):
    """A process that launches two ranks in a terminal's place, and the ranks' numbers once they work."""
    processes = []

    def begin(context):
        script = tmp_path / "launches.py"
        script.write_text(LAUNCHES.format(folders=[str(path) for path in Path(__file__).parents[:2]], context=context))
        process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, start_new_session=True)
        processes.append(process)
        return process, [int(process.stdout.readline()) for _ in range(2)]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def test_an_interrupt_ends_all_ranks_within_two_seconds(launcher):
    process, ranks = launcher("forkserver")
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"
    assert_within(2.0, time.monotonic() - began)
    assert not any(map(is_there, ranks))


def test_sigterm_lets_the_run_end_at_the_next_good_moment(launcher):
    process, _ = launcher("forkserver")
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "results [True, True]\n"
    assert process.wait() == 0


def test_ranks_die_with_their_launcher(launcher):
    process, ranks = launcher("spawn")
    process.kill()
    process.wait()
    ends = time.monotonic() + 10
    while any(map(is_there, ranks)) and time.monotonic() < ends:
        time.sleep(0.01)
    assert not any(map(is_there, ranks))


def test_a_launcher_needs_no_torch():
    code = "import sys, manyhands.runtime.launch.launch, manyhands.cli.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Scripts


@pytest.fixture
def script(tmp_path, caplog):
    """Run a script for some ranks; its exit code and what was said about it."""

    def run(text, workers=2, arguments=(), **knobs):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(text))
        code = run_script(str(path), arguments, workers=workers, deadline=20.0, **knobs)
        return code, [record.message for record in caplog.records if record.name == "manyhands"]

    return run


def printed(capfd):
    """The lines that the ranks have printed, by rank."""
    return sorted(capfd.readouterr().out.splitlines())


def test_a_script_that_never_joins_is_fine(script, capfd):
    code, said = script("import sys; print(sys.argv[1:])", arguments=["--epochs", "3"])
    assert (code, said) == (0, [])
    assert printed(capfd) == ["[0] ['--epochs', '3']", "[1] ['--epochs', '3']"]


def test_a_script_finds_the_names_that_torchrun_uses(script, capfd):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
    assert script(f"import os; print(*[os.environ[n] for n in {names}], int(os.environ['MASTER_PORT']) > 0)")[0] == 0
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    assert printed(capfd) == [f"[{rank}] {rank} 2 {rank} 2 127.0.0.1 {threads} True" for rank in range(2)]


def test_a_script_that_joins_and_leaves_is_fine(script):
    assert script(FAKE_RANK + "join(); channel.send('left')") == (0, [])


def test_its_own_exit_code_is_handed_on(script):
    code, said = script("import os, sys; sys.exit(7 * int(os.environ['RANK']))", workers=2)
    assert code == 7 and said == ["rank 1 failed: it ended before it had joined (exit code 7)"]


def test_so_is_that_of_a_failure_after_the_run(script):
    code, said = script(FAKE_RANK + "join(); channel.send('left'); sys.exit(5 * spec.rank)")
    assert code == 5 and said == ["rank 1 failed after it had left: exit code 5"]


def test_and_that_of_a_rank_that_reports_a_failure(script):
    text = """
join()
if spec.rank == 1:
    channel.send("failed", {"error": {"kind": "failed", "rank": 1, "text": "ValueError: no"}})
    sys.exit(9)
receive("abort")
sys.exit(1)
"""
    assert script(FAKE_RANK + text) == (9, ["rank 1 failed: ValueError: no"])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"kind": "diverged", "rank": 1, "step": 3, "loss": 1e9, "what": "the loss"}, 4),
        ({"kind": "refused", "text": "no"}, 2),
        ({"kind": "lost", "rank": 1, "why": "it is ill"}, 3),
    ],
)
def test_errors_of_ours_have_their_codes(script, error, code):
    text = f"join(); channel.send('failed', {{'error': {error}}}) if spec.rank else receive('abort'); sys.exit(1)"
    ended, said = script(FAKE_RANK + text)
    assert ended == code and len(said) == 1


def test_a_lost_rank_is_listed_and_the_run_continues(script):
    text = "join(); os.kill(os.getpid(), signal.SIGKILL) if spec.rank else receive('lost'); channel.send('left')"
    assert script(FAKE_RANK + text) == (0, ["rank 1 is lost: it was killed by SIGKILL"])


def test_a_loss_that_ends_the_run_is_said_once(script):
    text = """
join()
if spec.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
channel.send("failed", {"error": {"kind": "lost", **receive("lost")}})
sys.exit(1)
"""
    assert script(FAKE_RANK + text) == (3, ["rank 1 is lost: it was killed by SIGKILL"])


def test_a_rank_that_waits_for_one_that_ends_gets_an_error(script):
    text = "if spec.rank == 0: hello(); receive('abort'); sys.exit(1)"
    assert script(FAKE_RANK + text) == (3, ["rank 1 is lost: it ended without joining"])


def test_a_script_that_reads_its_input_is_not_stopped(script, capfd):
    assert script("import sys; print(repr(sys.stdin.read()))")[0] == 0
    assert printed(capfd) == ["[0] ''", "[1] ''"]


# The verb


def test_run_hands_everything_after_the_script_to_it(tmp_path, capfd):
    path = tmp_path / "mine.py"
    path.write_text("import os, sys; print(os.environ['WORLD_SIZE'], sys.argv[1:], flush=True)")
    assert main(["run", "-n", "2", "--servers=1", str(path), "-n", "9", "--link", "x"]) == 0
    assert printed(capfd) == [f"[{rank}] 3 ['-n', '9', '--link', 'x']" for rank in range(3)]


def test_debug_after_the_script_is_the_scripts(tmp_path, capfd):
    path = tmp_path / "mine.py"
    path.write_text("import sys; print(sys.argv[1:], flush=True)")
    assert main(["run", str(path), "--debug"]) == 0
    assert main(["--debug", "run", str(path), "--debug"]) == 0
    assert capfd.readouterr().out == "['--debug']\n" * 2


def test_run_says_how_it_went(tmp_path, capfd):
    path = tmp_path / "mine.py"
    path.write_text("import sys; sys.exit(6)")
    assert main(["run", str(path)]) == 6
    assert capfd.readouterr().err == "manyhands: rank 0 failed: it ended before it had joined (exit code 6)\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.py"], "there is no script nowhere.py"),
        (["-n", "0", __file__], "workers is 0, but must be >= 1"),
        (["--wrkers", "2", __file__], "no option of manyhands run '--wrkers': did you mean --workers"),
        ([], "the Python file that every rank runs"),
    ],
)
def test_run_refuses_what_cannot_work(words, says, capsys):
    assert main(["run", *words]) == 2
    assert says in capsys.readouterr().err


def test_run_has_help_with_examples(capsys):
    assert main(["run", "--help"]) == 0
    out = capsys.readouterr().out
    assert "usage: manyhands run" in out and "examples:" in out and "--servers" in out


JOINS_TWICE = """
from manyhands.core.errors import Refused
from manyhands.runtime.launch.join import connect
first = connect()
try:
    connect()
except Refused as error:
    assert "have not ended" in str(error)
else:
    raise SystemExit(1)
first.leave()
second = connect()
assert (first.spec.session, second.spec.session) == (0, 1)
second.leave()
"""


def test_a_process_joins_again_when_it_has_left_and_not_before(tmp_path):
    script = tmp_path / "twice.py"
    script.write_text(JOINS_TWICE)
    assert run_script(str(script), [], workers=2) == 0

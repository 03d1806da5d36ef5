"""The watcher of a host: who comes, dies, is stopped, fails or leaves, with real processes and signals."""

import errno
import logging
import socket
import time

import pytest

from manyhands.core.errors import PeerLost
from manyhands.runtime.membership import memfd
from manyhands.runtime.membership.error_codec import unpack
from manyhands.runtime.membership.secret import Stranger, introduce, new_key
from pace import assert_within

pytestmark = pytest.mark.timeout(60)

KNOB = "(--join-timeout or MANYHANDS_JOIN_TIMEOUT sets this)"
STAYS = "join(); said = receive('lost'); report(said['rank'], said['why']); channel.send('left')"


def knock(spec, key):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"\0{spec.watcher}")
        introduce(sock, key, b"")


# Coming together


def test_all_ranks_learn_where_all_are_and_then_begin(job):
    meeting = job(3)
    assert (
        meeting.run(*["report(join()); channel.send('left')"] * 3) == [str(((0, "at 0"), (1, "at 1"), (2, "at 2")))] * 3
    )
    assert (meeting.watcher.lost, meeting.watcher.cause) == ([], None)
    assert [meeting.watcher.endings[rank].code for rank in range(3)] == [0, 0, 0]


def test_no_rank_begins_before_all_have_reached_all(job):
    begins = "channel.send('connected'); receive('begin'); report(time.monotonic()); channel.send('left')"
    late = "time.sleep(0.3); report(time.monotonic())"
    first, second = job(2).run(
        f"hello(); receive('addresses'); {begins}", f"hello(); receive('addresses'); {late}; {begins}"
    )
    assert float(first) > float(second.split()[0])


def test_who_does_not_come_is_named(job):
    waiting = job(4, deadline=4.0)
    told = waiting.run(*["hello(); report(receive('abort')['error']['text'])"] * 2)
    assert told == [f"ranks 2, 3 have not joined within 4 s {KNOB}"] * 2
    assert str(unpack(waiting.watcher.cause)) == told[0]


def test_who_does_not_reach_all_others_is_named(job):
    waiting = job(2, deadline=4.0)
    told = waiting.run(
        "hello(); channel.send('connected'); receive('abort')", "hello(); report(receive('abort')['error']['text'])"
    )
    assert told[1] == f"rank 1 has not connected to all others within 4 s {KNOB}"


def test_a_patient_watcher_counts_from_the_first_hello(job):
    waiting = job(2, deadline=2.0)
    slow = "time.sleep(2.5); report(len(join())); channel.send('left')"
    assert waiting.run(slow, slow, patient=True) == ["2", "2"]


def test_a_death_before_the_beginning_ends_the_start(job):
    starting = job(2)
    told = starting.run("hello(); report(receive('abort')['error'])", "hello(); os.kill(os.getpid(), signal.SIGKILL)")
    assert told[0] == str({"kind": "lost", "rank": 1, "why": "it was killed by SIGKILL"})
    assert isinstance(unpack(starting.watcher.cause), PeerLost)


def test_a_refusal_of_one_ends_the_start_of_all(job):
    starting = job(2)
    refusal = {"kind": "refused", "text": "rank 0 cannot reach rank 1"}
    told = starting.run(
        f"hello(); channel.send('failed', {{'error': {refusal}}})", "hello(); report(receive('abort')['error'])"
    )
    assert told[1] == str(refusal) and starting.watcher.cause == refusal


def test_a_script_may_end_well_without_joining(job):
    idle = job(2)
    idle.run("report('done')", "report('done')")
    assert (idle.watcher.lost, idle.watcher.cause) == ([], None)


def test_but_not_if_another_waits_for_it(job):
    idle = job(2)
    idle.run("hello(); report(receive('abort')['error']['why'])", "time.sleep(0.2)")
    assert idle.watcher.lost == [(1, "it ended without joining")]
    later = job(2)
    told = later.run("time.sleep(0.5); hello(); report(receive('abort')['error']['why'])", "pass")
    assert told[0] == "it ended without joining" and later.watcher.lost == [(1, "it ended without joining")]


def test_an_exit_code_before_joining_is_the_cause(job):
    starting = job(2)
    starting.run("time.sleep(30)", "sys.exit(7)")
    assert str(unpack(starting.watcher.cause)) == "rank 1 failed: it ended before it had joined (exit code 7)"
    assert starting.watcher.endings[0].code == -9


# Losses


@pytest.mark.parametrize(
    ("end", "child", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", True, "it was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", True, "it was killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", True, "it was stopped (SIGSTOP) and has been killed"),
        ("sys.exit(3)", True, "it exited without leaving the run (exit code 3)"),
        ("sys.exit(0)", True, "it exited without leaving the run (exit code 0)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", False, "it died"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", False, "it was stopped (SIGSTOP) and has been killed"),
    ],
)
def test_a_lost_rank_is_named_to_all_others_who_continue(job, caplog, end, child, why):
    going_on = job(3)
    told = going_on.run(STAYS, f"join(); {end}", STAYS, child=child)
    assert told == [f"1 {why}", "", f"1 {why}"]
    assert going_on.watcher.lost == [(1, why)] and going_on.watcher.cause is None
    assert f"rank 1 is lost: {why}" in caplog.messages


def test_a_stopped_rank_is_dead_before_it_is_announced(job):
    fenced = job(2)
    looks = "join(); receive('lost'); report(open(f'/proc/{PID}/stat').read().split()[2]); channel.send('left')"
    with fenced.watcher:
        fenced.watcher.start()
        victim = "join(); os.kill(os.getpid(), signal.SIGSTOP)"
        fenced.start(victim)
        fenced.start(f"PID = {fenced.processes[0].pid}; {looks}")
        fenced.watcher.wait()
    assert fenced.outputs()[1] == "Z"


def test_news_of_a_death_takes_no_second(job):
    quick = job(2)
    dies = "join(); report(time.monotonic()); os.kill(os.getpid(), signal.SIGKILL)"
    told = quick.run(dies, "join(); receive('lost'); report(time.monotonic()); channel.send('left')")
    assert float(told[1]) >= float(told[0])
    assert_within(1.0, float(told[1]) - float(told[0]))


def test_last_words_count_however_fast_the_end_follows(job):
    for _ in range(3):
        leaving = job(6)
        leaving.run(*["join(); channel.send('left'); os._exit(5)"] * 6)
        assert (leaving.watcher.lost, leaving.watcher.cause) == ([], None)


def test_after_leaving_even_a_violent_end_is_no_loss(job):
    leaving = job(2)
    ends = "join(); channel.send('left'); os.kill(os.getpid(), signal.SIGKILL)"
    assert leaving.run("join(); time.sleep(0.3); channel.send('left'); report('left')", ends)[0] == "left"
    assert leaving.watcher.lost == [] and leaving.watcher.endings[1].code == -9


# The end of a run


def test_a_failure_ends_the_run_for_all_with_the_same_error(job):
    failing = job(3)
    diverged = {"kind": "diverged", "rank": 1, "step": 4, "loss": 9.5}
    second = {"kind": "error", "text": "second"}
    waits = f"join(); report(receive('abort')['error']); channel.send('failed', {{'error': {second}}})"
    told = failing.run(waits, f"join(); channel.send('failed', {{'error': {diverged}}})", waits)
    assert told == [str(diverged), "", str(diverged)]
    assert failing.watcher.cause == diverged and failing.watcher.lost == []


def test_who_does_not_end_after_an_abort_is_killed(job):
    deaf = job(2)
    told = deaf.run(
        "join(); report('here'); time.sleep(60)",
        "join(); channel.send('failed', {'error': {'kind': 'error', 'text': 'x'}})",
    )
    assert told[0] == "here" and deaf.watcher.endings[0].code == -9 and deaf.watcher.lost == []


def test_an_error_of_the_owner_leaves_no_process_behind(job):
    interrupted = job(2)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupted.watcher:
        interrupted.watcher.start()
        interrupted.start("join(); time.sleep(60)", "time.sleep(60)")
        raise KeyboardInterrupt
    assert_within(10.0, time.monotonic() - began)
    assert [process.wait() for process in interrupted.processes.values()] == [-9, -9]


def test_a_watcher_that_never_started_closes_too(job):
    unused = job(1)
    with unused.watcher:
        pass
    with pytest.raises(ConnectionRefusedError):
        knock(unused.rank_specs[0], unused.rank_specs[0].secret)


def test_finish_reaches_all_also_those_who_have_not_begun(job):
    asked = job(2)
    with asked.watcher:
        asked.watcher.start()
        asked.watcher.finish()
        asked.start(*["join(); receive('finish'); report('finish'); channel.send('left')"] * 2)
        asked.watcher.wait()
    assert asked.outputs() == ["finish", "finish"]


def test_what_cannot_be_taken_down_ends_the_run(job):
    def broken(rows):
        raise LookupError(f"no place for {rows}")

    watched = job(1, on_lines=broken)
    with pytest.raises(LookupError, match="no place for"):
        watched.run("join(); channel.send('lines', {'rows': [1]}); time.sleep(60)")
    assert watched.processes[0].wait() == -9


# What ranks ask for


def test_lines_are_handed_over_in_order(job):
    rows = []
    job(1, on_lines=rows.extend).run(
        "join(); [channel.send('lines', {'rows': [i, i]}) for i in range(50)]; channel.send('left')"
    )
    assert rows == [i for i in range(50) for _ in range(2)]


def test_no_more_is_granted_than_there_is(job):
    asks = """
join()
number = 0
while channel.send("grant", {"number": 100}) or receive("granted")["yes"]:
    number += 1
report(number)
channel.send("left")
"""
    told = job(3).run(*[asks] * 3)
    assert sum(map(int, told)) == 100


MAPS = """
import mmap
def memory(name, nbytes):
    channel.send("memory", {"name": name, "nbytes": nbytes})
    _, fields, file = channel.receive()
    assert fields["name"] == name
    return mmap.mmap(file, nbytes) if not fields["error"] else fields["error"]
join()
"""


def test_memory_of_one_name_is_the_same_for_a_host_and_for_that_host_alone(job):
    writes = MAPS + "m = memory('weights', 8192); m[0] = 1 + spec.rank; channel.send('connected')\n"
    reads = "while not m[0]: time.sleep(0.01)\nreport(m[0], len(m), m[8191]); channel.send('left')"
    told = job(3, hosts=(0, 0, 1)).run(
        MAPS + "m = memory('weights', 8192)\n" + reads, writes + "channel.send('left')", writes + reads
    )
    assert told == ["2 8192 0", "", "3 8192 0"]


def test_memory_of_another_size_is_refused_and_the_next_answer_is_right(job):
    asks = (
        MAPS
        + "memory('weights', 4096); report(memory('weights', 8192))\n"
        + "report(len(memory('other', 64))); channel.send('left')"
    )
    told = job(1).run(asks)
    assert told == ["the shared memory 'weights' has 4096 bytes, but 8192 were requested\n64"]


def test_an_error_and_a_file_that_come_together_are_distinguished(job):
    asks = MAPS + (
        "m = memory('a', 4096); m[0] = 7\n"
        "channel.send('memory', {'name': 'a', 'nbytes': 1}); channel.send('memory', {'name': 'a', 'nbytes': 4096})\n"
        "time.sleep(0.3)\n"
        "answers = [channel.receive() for _ in range(2)]\n"
        "errors = [bool(fields['error']) for _, fields, _ in answers]\n"
        "report(errors, answers[0][2], mmap.mmap(answers[1][2], 4096)[0])\n"
        "channel.send('left')"
    )
    assert job(1).run(asks) == ["[True, False] None 7"]


def test_too_little_memory_is_an_error_now_and_says_how_much_is_needed(job, monkeypatch):
    monkeypatch.setattr(memfd, "free_bytes", lambda: 2_000_000)
    asks = MAPS + "report(memory('big', 3_000_000)); report(len(memory('small', 2_000_000))); channel.send('left')"
    assert job(1).run(asks) == ["the shared memory 'big' needs 3.0 MB: only 2.0 MB are free\n2000000"]


def test_a_shortage_that_shows_only_when_taking_the_pages_is_reported_too(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    memories = memfd.Memories()
    assert memories.ask(0, "a", 1_500_000) == (None, "the shared memory 'a' needs 1.5 MB: No space left on device")
    memories.close()


def test_free_memory_is_that_of_the_machine_or_what_a_container_may_still_take(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       4000 kB\nMemAvailable:   1000 kB\n")
    assert memfd.free_bytes(meminfo, tmp_path) == 1_024_000
    for name, text in {"current": "900000", "max": "max", "stat": "anon 5\ninactive_file 100000\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert memfd.free_bytes(meminfo, tmp_path) == 1_024_000
    (tmp_path / "memory.max").write_text("1000000")
    assert memfd.free_bytes(meminfo, tmp_path) == 200_000


# Sessions

AGAIN = (
    MAPS
    + """
def join_again(number):
    global channel
    channel = connect()
    channel.send("hello", {"rank": spec.rank, "pid": os.getpid(), "address": "", "session": number})
    receive("addresses")
    channel.send("connected")
    return receive("begin")["at"]

def leave():
    channel.send("left")
    channel.close()
"""
)


def test_every_session_has_its_own_clock_and_memory(job):
    both = (
        AGAIN
        + """
joined = time.monotonic(); memory('weights', 4096); leave()
report(join_again(1) > joined, len(memory('weights', 8192))); leave()
"""
    )
    again = job(2)
    assert again.run(both, both) == ["True 8192"] * 2
    assert (again.watcher.lost, again.watcher.cause) == ([], None)


def test_a_rank_that_is_late_in_the_last_session_does_not_disturb_the_next(job):
    """Rank 0 waits in session 1 while rank 1 is lost in session 0, and is told so there."""
    waits = (
        AGAIN
        + """
leave()
channel = connect()
channel.send("hello", {"rank": 0, "pid": os.getpid(), "address": "", "session": 1})
report(receive("abort")["error"]["why"])
"""
    )
    dies = "join(); receive('memory'); os.kill(os.getpid(), signal.SIGKILL)"
    late = job(2)
    with late.watcher:
        late.watcher.start()
        late.start(waits, dies)
        while 1 not in late.watcher._sessions:
            time.sleep(0.01)
        late.watcher.loop.post(lambda: late.watcher._first.channels[1].send("memory"))
        late.watcher.wait()
    assert late.outputs() == ["it was killed by SIGKILL", ""]
    assert set(late.watcher.lost) == {(1, "it was killed by SIGKILL")}


def test_a_session_that_is_not_the_next_is_refused(job, caplog):
    skips = """
channel.send("hello", {"rank": 0, "pid": 1, "address": "", "session": 2})
try:
    receive("addresses")
except ChannelClosed:
    report("refused")
"""
    assert job(1).run(skips) == ["refused"]
    assert any("it joins session 2, but the next one is 1" in message for message in caplog.messages)


# Strangers


def test_a_second_hello_for_a_rank_is_refused(job, caplog):
    crowded = job(2)
    twice = (
        "join(); second = connect(); second.send('hello', {'rank': 1, 'pid': 1, 'address': ''})\n"
        "try: second.receive()\n"
        "except ChannelClosed: report('refused')\n"
        "channel.send('left')"
    )
    assert crowded.run(twice, "report(len(join())); time.sleep(0.5); channel.send('left')") == ["refused", "2"]
    assert any("rank 1, which is connected already" in message for message in caplog.messages)
    assert crowded.watcher.lost == []


def test_a_rank_that_does_not_exist_is_refused(job, caplog):
    stranger = """
channel.send("hello", {"rank": 9, "pid": 1, "address": ""})
try:
    receive("addresses")
except ChannelClosed:
    report("refused")
"""
    assert job(1).run(stranger) == ["refused"]
    assert any("rank 9, which is not a rank of this host" in message for message in caplog.messages)


def test_strangers_are_turned_away_and_hold_no_rank_up(job, caplog):
    meeting = job(1)
    with meeting.watcher:
        meeting.watcher.start()
        silent = socket.socket(socket.AF_UNIX)
        silent.connect(f"\0{meeting.rank_specs[0].watcher}")
        with pytest.raises(Stranger):
            knock(meeting.rank_specs[0], new_key())
        meeting.start("report(len(join())); channel.send('left')")
        meeting.watcher.wait()
    assert silent.recv(100).startswith(b"manyhands/1\n") and silent.recv(1) == b""
    silent.close()
    assert meeting.outputs() == ["1"]
    turned_away = [record for record in caplog.records if "rejected a connection" in record.message]
    assert [(r.name, r.levelno) for r in turned_away] == [("manyhands", logging.WARNING)]
    assert "does not know the secret" in turned_away[0].message


def test_a_rank_that_sends_nonsense_is_lost_alone(job):
    confused = job(2)
    told = confused.run(
        STAYS, "join(); channel.sock.sendall(b'\\x03\\0\\0\\0\\xc1\\xc1\\xc1'); time.sleep(0.3); sys.exit(1)"
    )
    assert told[0] == "1 it exited without leaving the run (exit code 1)"

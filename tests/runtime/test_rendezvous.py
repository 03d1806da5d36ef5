"""Joining a job that something else has started: real processes, torch's store, and a side process for each host."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manyhands.core.errors import Refused
from manyhands.engines.local import Local
from manyhands.runtime.launch import rendezvous
from manyhands.runtime.launch.rendezvous import rank_spec_from_torchrun
from manyhands.runtime.rank_spec import join_timeout

pytestmark = pytest.mark.timeout(150)

JOB = """
import json, os, signal, sys, time
from manyhands.runtime.launch import rendezvous
from manyhands.core.errors import ManyhandsError
from manyhands.runtime.launch.join import connect

if "HOST" in os.environ:
    rendezvous.host_identity = lambda: os.environ["HOST"]

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece: others write too

def joined():
    try:
        return connect()
    except ManyhandsError as error:
        tell(f"{type(error).__name__}: {error}")
        sys.exit(2)
"""
LEAVES = "t = joined(); tell(t.rank, t.hosts, t.roles, t.spec.bind); t.leave()"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def sides():
    """The side processes that run on this machine for jobs of ours."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"manyhands.runtime.membership.sidecar" in path.read_bytes():
                environment = (path.parent / "environ").read_bytes()
                found += [int(path.parent.name)] if f"TEST_OWNER={os.getpid()}".encode() in environment else []
        except OSError:
            continue  # it has just ended
    return found


@pytest.fixture
def ranks():
    """Start ranks as Slurm would: four variables each, and nothing else."""
    processes = []

    def start(programs, **variables):
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TEST_OWNER": str(os.getpid())}
        for rank, program in enumerate(programs):
            own = {name: values[rank] for name, values in variables.items() if values[rank] is not None}
            job = {"RANK": str(rank), "WORLD_SIZE": str(len(programs))}
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **common, **job, **own}
            command = [sys.executable, "-c", JOB + program]
            pipe = subprocess.PIPE
            processes.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
        return processes

    yield start
    for process in processes:
        process.kill()
        process.communicate()
    ends = time.monotonic() + 10
    while sides() and time.monotonic() < ends:
        time.sleep(0.05)
    assert sides() == []


def ends(processes):
    return [process.communicate(timeout=100)[0].strip() for process in processes]


def test_ranks_of_one_host_connect_and_listen_to_no_other(ranks):
    looks = """
t = joined()
listening = [line.split()[1] for line in open("/proc/net/tcp") if line.split()[3] == "0A"]
port = f"{int(os.environ['MASTER_PORT']):04X}"
tell([address for address in listening if address.endswith(":" + port)])
t.leave()
"""
    said = ends(ranks([looks, LEAVES, LEAVES], MANYHANDS_SERVERS=["1"] * 3))
    port = said[0].strip("[]'").partition(":")[2]
    assert said[0] == f"['0100007F:{port}']"
    roles = ("worker", "worker", "server")
    assert said[1:] == [f"{rank} (0, 0, 0) {roles} 127.0.0.1" for rank in (1, 2)]


def test_two_hosts_meet_through_the_hub_and_a_death_is_known_on_both(ranks):
    stays = """
t = joined()
while 2 in t.peers():
    time.sleep(0.01)
tell(t.hosts, t.spec.bind, list(map(tuple, t.lost)))
t.leave()
"""
    dies = "t = joined(); os.kill(os.getpid(), signal.SIGKILL)"
    said = ends(ranks([stays, stays, dies, stays], HOST=["a", "b", "b", "a"]))
    assert [said[rank] for rank in (0, 1, 3)] == ["(0, 1, 1, 0) 127.0.0.1 [(2, 'it died')]"] * 3


def test_the_side_process_survives_the_rank_that_started_it(ranks):
    dies = "t = joined(); os.kill(os.getpid(), signal.SIGKILL)"
    stays = """
import torch
t = joined()
while t.peers():
    time.sleep(0.01)
tell(t.shared("x", 10, torch.float32).numel())
t.leave()
"""
    assert ends(ranks([dies, stays])) == ["", "10"]


def test_the_side_process_ends_when_all_have_left_and_their_scripts_continue(ranks):
    """The scripts wait for the end of their side process, and join again with another one."""
    twice = """
def side(t):
    names = open("/proc/net/unix").read()
    return "@" + t.spec.watcher in names

first = joined()
first.leave()
while side(first):
    time.sleep(0.01)
second = joined()
tell(second.spec.session, side(second))
second.leave()
"""
    assert ends(ranks([twice, twice])) == ["1 True"] * 2


def test_a_process_group_of_the_scripts_own_can_use_the_same_port(ranks):
    both = """
t = joined()
import torch
torch.distributed.init_process_group("gloo")
x = torch.ones(1)
torch.distributed.all_reduce(x)
tell(x.item())
torch.distributed.destroy_process_group()
t.leave()
"""
    assert ends(ranks([both, both])) == ["2.0", "2.0"]


def test_who_does_not_come_is_named(ranks):
    said = ends(ranks([LEAVES, LEAVES, "pass"], MANYHANDS_JOIN_TIMEOUT=["5"] * 3))
    why = "rank 2 has not joined within 5 s (--join-timeout or MANYHANDS_JOIN_TIMEOUT sets this)"
    assert [words.partition(": its entry")[0] for words in said[:2]] == [f"ManyhandsError: {why}"] * 2


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf"])
def test_a_time_that_cannot_be_waited_for_is_refused(text, monkeypatch):
    monkeypatch.setenv("MANYHANDS_JOIN_TIMEOUT", text)
    bound = "a number of seconds > 0"
    with pytest.raises(Refused, match=f"^MANYHANDS_JOIN_TIMEOUT is {text}, but must be {bound}$"):
        join_timeout()
    assert join_timeout(5) == 5, "what a launcher says comes first"
    with pytest.raises(Refused, match=f"^the join timeout is 0, but must be {bound}$"):
        Local(join_timeout=0)


def test_a_secret_of_ones_own_must_be_everywhere(ranks):
    said = ends(ranks([LEAVES, LEAVES], MANYHANDS_SECRET=["pass", "pass"]))
    assert said == [f"{rank} (0, 0) ('worker', 'worker') 127.0.0.1" for rank in range(2)]


def test_or_is_missed(ranks):
    said = ends(ranks([LEAVES, LEAVES], MANYHANDS_SECRET=["pass", None], MANYHANDS_JOIN_TIMEOUT=["8"] * 2))
    assert said[1] == "Refused: MANYHANDS_SECRET is set on rank 0, but not on rank 1"


def test_under_torchrun(tmp_path, ranks):
    script = tmp_path / "train.py"
    script.write_text(JOB + LEAVES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TEST_OWNER": str(os.getpid())}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"{r} (0, 0) ('worker', 'worker') 127.0.0.1" for r in range(2)]


# What the environment says


@pytest.fixture
def environment(monkeypatch):
    for name in (*rendezvous.NAMES, "MANYHANDS_BIND", "MANYHANDS_LINK", "MANYHANDS_SERVERS", "MANYHANDS_SECRET"):
        monkeypatch.delenv(name, raising=False)

    def describe(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return describe


WHOLE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize("missing", [["RANK"], ["MASTER_ADDR", "MASTER_PORT"]])
def test_a_half_set_environment_is_refused_with_the_missing_names(environment, missing):
    environment(**{name: value for name, value in WHOLE.items() if name not in missing})
    with pytest.raises(Refused, match=f"{', '.join(missing)} not set$"):
        rank_spec_from_torchrun()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"RANK": "2"}, "RANK is 2, but must be >= 0 and < 2"),
        ({"RANK": "one"}, "RANK is one, but must be a number"),
        ({"MANYHANDS_SERVERS": "2"}, "servers is 2, but must be >= 0 and < 2"),
        ({"MANYHANDS_LINK": "ib"}, "link is ib, but must be shm or tcp"),
        ({"MASTER_ADDR": "192.0.2.1"}, "rank 0 cannot listen at MASTER_ADDR 192.0.2.1, MASTER_PORT 1"),
    ],
)
def test_a_wrong_environment_is_refused(environment, wrong, says):
    environment(**{**WHOLE, **wrong})
    with pytest.raises(Refused, match=says):
        rank_spec_from_torchrun()


def test_hosts_are_numbered_by_their_first_ranks():
    assert rendezvous._numbered(["b", "a", "b", "c"]) == (0, 1, 0, 2)


def test_each_host_listens_where_the_others_can_reach_it(environment):
    environment()
    assert rendezvous._bind(1, (0, 1), ["10.0.0.1", "10.0.0.2"]) == "10.0.0.2"
    assert rendezvous._bind(1, (0, 0), ["10.0.0.1", "10.0.0.1"]) == "127.0.0.1"
    with pytest.raises(Refused, match=r"rank 0 has the address 127\.0\.1\.1 on its route"):
        rendezvous._bind(1, (0, 1), ["127.0.1.1", "10.0.0.2"])
    environment(MANYHANDS_BIND="10.0.0.9")
    assert rendezvous._bind(1, (0, 0), ["", ""]) == "10.0.0.9" == rendezvous._address()

"""Several hosts, each with its watcher: what happens on one is known on all, and a host that falls silent is lost."""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
from fake_ranks import start_fake_rank

from manyhands.core.errors import ManyhandsError
from manyhands.runtime.membership.multi_host import SILENT, Hub, Uplink, reach_hub
from manyhands.runtime.membership.watcher import Watcher
from manyhands.runtime.rank_spec import rank_specs
from pace import assert_within

pytestmark = pytest.mark.timeout(60)


class Proxy:
    """A network between two hosts that can fall silent without closing anything."""

    def __init__(self, port):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_cut = threading.Event()
        self._ends = []
        self._threads = [threading.Thread(target=self._accept, args=(port,))]
        self._threads[0].start()

    def _accept(self, port):
        here, _ = self._listener.accept()
        there = socket.create_connection(("127.0.0.1", port))
        self._ends += [here, there]
        self._threads.append(threading.Thread(target=self._carry, args=(there, here)))
        self._threads[-1].start()
        self._carry(here, there)

    def _carry(self, frm, to):
        try:
            while data := frm.recv(2**16):
                if not self.is_cut.is_set():
                    to.sendall(data)
            if not self.is_cut.is_set():
                to.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self):
        self._listener.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()


class Hosts:
    """Ranks 0 and 1 on the hub's host, rank 2 on another, with a proxy between the two."""

    def __init__(self):
        self.rank_specs = [replace(spec, deadline=20.0) for spec in rank_specs({"worker": 3}, hosts=(0, 0, 1))]
        self.rank_specs[2] = replace(self.rank_specs[2], watcher=self.rank_specs[2].watcher + "-b")
        listener = socket.create_server(("127.0.0.1", 0))
        self.proxy = Proxy(listener.getsockname()[1])
        self.hub = Watcher(self.rank_specs[0], [0, 1], authority=partial(Hub, listener=listener))
        self.hub.start()
        sock = reach_hub(self.proxy.address, self.rank_specs[0].secret, [2], 5.0)
        self.other = Watcher(self.rank_specs[2], [2], authority=partial(Uplink, sock=sock))
        self.other.start()
        self.processes = []

    def start(self, *programs):
        for spec, program in zip(self.rank_specs, programs, strict=True):
            self.processes.append(start_fake_rank(spec, program))
            watcher = self.other if spec.rank == 2 else self.hub
            watcher.watch(spec.rank, self.processes[-1].pid, self.processes[-1].poll)

    def end(self):
        waiting = threading.Thread(target=self.other.wait)
        waiting.start()
        self.hub.wait()
        waiting.join()
        return [process.communicate(timeout=10)[0].strip() for process in self.processes]


@pytest.fixture
def hosts():
    made = Hosts()
    try:
        with made.hub, made.other:
            yield made
    finally:
        made.proxy.close()
        for process in made.processes:
            process.kill()
            process.communicate()


def test_ranks_of_all_hosts_meet_draw_from_one_budget_and_leave(hosts):
    asks = """
addresses = join()
number = 0
while channel.send("grant", {"number": 50}) or receive("granted")["yes"]:
    number += 1
report(len(addresses), number)
channel.send("left")
"""
    hosts.start(asks, asks, asks)
    told = [list(map(int, words.split())) for words in hosts.end()]
    assert [number for number, _ in told] == [3, 3, 3]
    assert sum(number for _, number in told) == 50
    assert hosts.hub.lost == hosts.other.lost == [] and hosts.hub.cause is hosts.other.cause is None


def test_the_hub_stays_as_long_as_another_host_needs_it(hosts):
    early = "join(); channel.send('left')"
    asks = "channel.send('grant', {'number': 1}); report(receive('granted')['yes']); channel.send('left')"
    late = f"join(); time.sleep(1.0); {asks}"
    hosts.start(early, early, late)
    assert hosts.end()[2] == "True"
    assert hosts.hub.lost == []


@pytest.mark.parametrize("victim", [1, 2])
def test_a_death_is_known_on_every_host(hosts, victim):
    programs = ["join(); said = receive('lost'); report(said['rank'], said['why']); channel.send('left')"] * 3
    programs[victim] = "join(); os.kill(os.getpid(), signal.SIGKILL)"
    hosts.start(*programs)
    told = hosts.end()
    assert [told[rank] for rank in range(3) if rank != victim] == [f"{victim} it was killed by SIGKILL"] * 2
    assert hosts.hub.lost == [(victim, "it was killed by SIGKILL")]


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_ends_the_run_on_every_host(hosts, failing):
    programs = ["join(); report(receive('abort')['error']['text'])"] * 3
    programs[failing] = "join(); channel.send('failed', {'error': {'kind': 'error', 'text': 'enough'}})"
    hosts.start(*programs)
    told = hosts.end()
    assert [told[rank] for rank in range(3) if rank != failing] == ["enough", "enough"]
    assert hosts.hub.cause == hosts.other.cause == {"kind": "error", "text": "enough"}


def test_a_silent_host_is_lost_with_its_ranks_and_ends_its_own(hosts):
    hears = "said = receive('lost'); report(said['rank'], said['why'], time.monotonic()); channel.send('left')"
    stays = f"join(); report('met'); {hears}"
    cut_off = "join(); report('met'); report(receive('abort')['error'])"
    hosts.start(stays, stays, cut_off)
    assert [process.stdout.readline() for process in hosts.processes] == ["met\n"] * 3
    began = time.monotonic()
    hosts.proxy.is_cut.set()
    told = hosts.end()
    for words in told[:2]:
        rank, why, at = words.partition(" ")[0], words[2:].rpartition(" ")[0], float(words.rpartition(" ")[2])
        assert (rank, why) == ("2", SILENT)
        assert at - began > 1.5
        assert_within(6.0, at - began)
    assert told[2] == str({"kind": "lost", "rank": 0, "why": SILENT})
    assert hosts.hub.lost == [(2, SILENT)] and hosts.hub.cause is None


def test_quiet_work_is_not_silence(hosts):
    works = "join(); time.sleep(3.0); channel.send('left')"
    hosts.start(works, works, works)
    hosts.end()
    assert hosts.hub.lost == hosts.other.lost == [] and hosts.other.cause is None


def test_a_hub_that_cannot_be_reached_is_named():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with pytest.raises(ManyhandsError, match=rf"host of rank 3, 4 cannot reach that of rank 0 at 127.0.0.1:{port}"):
        reach_hub(f"127.0.0.1:{port}", b"k" * 32, [3, 4], 1.0)

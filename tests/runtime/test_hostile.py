"""Running jobs under attack: strangers at their targets, members that send garbage, and where they listen at all."""

import logging
import os
import queue
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

import manyhands as mh
from manyhands.core.errors import PeerLost
from manyhands.core.port import Tag, recv
from manyhands.runtime.launch.launch import launch
from manyhands.runtime.membership import secret
from manyhands.runtime.membership.secret import Stranger, introduce
from manyhands.runtime.transport import wire
from manyhands.runtime.transport.wire import Head, TensorHeader

pytestmark = pytest.mark.timeout(120)

ROUND, GO, ANSWER, NEVER = Tag("round", carries="floats"), Tag("go"), Tag("answer"), Tag("never")
BARE, WHOLE = Tag("bare", carries="nothing"), Tag("whole", carries="vectors")
PATIENCE = 20


def start(program, workers=3, link="tcp", **knobs):
    return launch(program, workers=workers, link=link, context="forkserver", **knobs).results


class Noted(logging.Handler):
    """What this process logs."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("manyhands").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


# Where a process listens


def sockets(pid="self"):
    """State and local address of every TCP socket of a process."""
    held = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held.add(os.readlink(file))
        except OSError:  # just closed
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in held:
                found.append((fields[3], _address(fields[1])))
    return found


def _address(text):
    address, _, port = text.partition(":")
    kind = socket.AF_INET if len(address) == 8 else socket.AF_INET6
    words = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
    return socket.inet_ntop(kind, b"".join(words)), int(port, 16)


def listening(pid="self"):
    return [address for state, address in sockets(pid) if state == "0A"]


def talk_and_look(t):
    """Look for sockets once all ranks have exchanged messages."""
    for peer in t.peers():
        t.send(peer, GO, (), [torch.ones(10_000)])
    for _ in t.peers():
        recv(t, GO).keep()
    found = [host for host, _ in listening()], [host for _, (host, _) in sockets()]
    for peer in t.peers():
        t.send(peer, ANSWER)
    for _ in range(t.size - 1):
        recv(t, ANSWER)
    return found


def test_over_tcp_a_rank_listens_on_loopback_only():
    for found, every in start(talk_and_look):
        assert found == ["127.0.0.1"]
        assert set(every) == {"127.0.0.1"} and len(every) == 3


def test_inside_a_host_there_is_no_tcp_socket_at_all():
    assert start(talk_and_look, link="shm") == [([], [])] * 3


def test_a_rank_listens_on_the_given_address():
    for found, every in start(talk_and_look, bind="127.0.0.7"):
        assert found == ["127.0.0.7"]
        assert set(every) <= {"127.0.0.7", "127.0.0.1"}


def look_at_launcher(pid, t):
    return listening(pid)


def test_a_launcher_listens_to_no_network():
    before = listening()
    assert start(partial(look_at_launcher, os.getpid()), workers=1) == [before]


# Strangers


def pass_round(enough, t):
    """A number goes round until rank 0 finds that it is enough; each rank adds its own."""
    noted, secret.PATIENCE = Noted(), 0.5
    t.control.send_lines([{"rank": t.rank, "port": listening()[0][1], "key": t.spec.key}])
    total, turns, over = torch.zeros(3000), 0, False
    ahead, behind = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    while not over:
        turns += 1
        if t.rank > 0:
            message = recv(t, ROUND, frm=behind)
            (over,), (total,) = message.meta, message.keep()
        else:
            over = os.path.exists(enough)
        t.send(ahead, ROUND, (over,), [total + t.rank + 1])
        if t.rank == 0:
            (total,) = recv(t, ROUND, frm=behind).keep()
    return turns, total.unique().tolist(), list(t.peers()), noted.lines


class Target:
    """The listening socket of a rank, seen from outside."""

    def __init__(self, port, key):
        self.key = bytes.fromhex(key)
        self._port = port

    def dial(self):
        return socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE)

    def authenticate(self, sock, who=b"1", key=None):
        """Prove the secret, and remember all that was said."""
        told = Told(sock)
        introduce(told, key or self.key, who)
        sock.settimeout(PATIENCE)
        return told.said


class Told:
    """A socket that remembers what was sent."""

    def __init__(self, sock):
        self._sock, self.said = sock, b""
        self.recv, self.settimeout = sock.recv, sock.settimeout

    def sendall(self, data):
        self.said += data
        self._sock.sendall(data)


def is_closed(sock):
    """Whether the other side hangs up."""
    with suppress(ConnectionError):
        while sock.recv(2**16):
            pass
    return True


def say(*data):
    """Say these things without a proof."""

    def attack(target, sock):
        for one in data:
            sock.sendall(one)

    return attack


def wrong_secret(target, sock):
    with pytest.raises(Stranger):
        target.authenticate(sock, key=b"x" * 32)


def hang_up(target, sock):
    sock.shutdown(socket.SHUT_WR)


def replay(target, sock):
    """A genuine handshake was overheard."""
    with target.dial() as genuine:
        overheard = target.authenticate(genuine)
        assert is_closed(genuine)
    sock.sendall(overheard)


def drip(target, sock):
    """A byte now and then: always in time, never done."""
    with suppress(ConnectionError):
        while True:
            sock.sendall(b"x")
            time.sleep(0.1)


def member(who, frame=b""):
    """Authenticate with the secret as `who`, and send a frame as if admitted."""

    def attack(target, sock):
        target.authenticate(sock, who)
        with suppress(ConnectionError):
            sock.sendall(frame)

    return attack


def message(name, *pieces):
    return wire.pack(Head(name, 0, 1, 2, False, (), pieces, ())) + bytes(sum(wire.padded(p.nbytes) for p in pieces))


HUGE = wire.PREFIX.pack(wire.MAGIC, wire.MESSAGE, 20, 2**60)
UNPROVED = "it does not know the secret of this job"
TAKEN = "it claims to be rank '{}', which is not expected"
ATTACKS = {
    "wrong secret": (wrong_secret, [UNPROVED]),
    "garbage": (say(b"\xff" * 5000), ["its introduction has 65535 bytes"]),
    "another language": (say(b"GET / HTTP/1.1\r\nHost: localhost:80\r\n\r\n" * 9), ["its introduction has"]),
    "a frame of 2**60 bytes": (say(HUGE, b"\0" * 200), [UNPROVED]),
    "silence": (say(), ["timed out"]),
    "half a handshake": (say(bytes(32)), ["timed out"]),
    "a byte now and then": (drip, ["timed out"]),
    "nothing": (hang_up, ["it did not prove the secret: the connection was closed"]),
    "a replay": (replay, [TAKEN.format(1), UNPROVED]),
    "a taken rank": (member(b"1", message("never")), [TAKEN.format(1)]),
    "an unknown tag": (member(b"2", message("unheard-of")), [TAKEN.format(2)]),
    "a forbidden dtype": (member(b"1", message("round", TensorHeader(torch.int64, (4,)))), [TAKEN.format(1)]),
    "a rank that is none": (member(b"99"), [TAKEN.format(99)]),
    "a negative rank": (member(b"-1"), [TAKEN.format(-1)]),
    "no rank": (member(b"me"), [TAKEN.format("me")]),
}


class Attacker(threading.Thread):
    """Attacks every rank in every way, and then lets the job end."""

    def __init__(self, enough, ranks):
        super().__init__()
        self.rows = queue.Queue()
        self._enough, self._ranks = enough, ranks
        self.ended = False

    def run(self):
        try:
            rows = [self.rows.get(timeout=60)[0] for _ in range(self._ranks)]
            for row in rows:
                for name, (attack, _) in ATTACKS.items():
                    self._attack(name, attack, Target(row["port"], row["key"]))
            self.ended = True
        finally:
            self._enough.touch()

    def _attack(self, name, attack, target):
        with target.dial() as sock:
            attack(target, sock)
            assert is_closed(sock), name


def test_a_running_job_turns_every_stranger_away_and_comes_to_its_right_result(tmp_path):
    attacker = Attacker(tmp_path / "enough", ranks=3)
    attacker.start()
    try:
        results = start(partial(pass_round, str(tmp_path / "enough")), on_lines=attacker.rows.put)
    finally:
        attacker.join()
    assert attacker.ended
    turns = results[0][0]
    assert turns > 1
    assert [(result[0], result[1]) for result in results] == [
        (turns, [6.0 * turns]),
        (turns, [6.0 * turns - 5]),
        (turns, [6.0 * turns - 3]),
    ]
    reasons = [reason for _, expected in ATTACKS.values() for reason in expected]
    for rank, (*_, lines) in enumerate(results):
        assert len(lines) == len(reasons), lines
        for line, reason in zip(lines, reasons, strict=True):
            assert line.startswith(f"rank {rank} rejected a connection: ") and reason in line


# Members that send garbage


OFFENCES = {
    "noise": (b"x" * 100, "does not begin with the magic bytes of a frame"),
    "2**60 bytes": (HUGE, "its body claims 1152921504606846976 bytes"),
    "2**32 bytes of header": (wire.PREFIX.pack(wire.MAGIC, wire.MESSAGE, 2**32 - 1, 0), "its header claims"),
    "an unknown tag": (message("unheard-of"), "the tag 'unheard-of' is not known"),
    "a forbidden dtype": (
        message("round", TensorHeader(torch.int64, (4,))),
        "may carry floats, but this one has torch.int64",
    ),
    "a forbidden shape": (
        message("whole", TensorHeader(torch.int64, (2, 2))),
        "may carry vectors, but this one has",
    ),
    "something with nothing": (message("bare", TensorHeader(torch.float32, (1,))), "may carry nothing"),
    "memory of another host": (
        message("answer", TensorHeader(torch.uint8, (64,), "shared/x", 64)),
        "it refers to shared memory of another host",
    ),
}


def offend(offence, t):
    """Rank 1: a genuine member, with a genuine link, says this to rank 0; with rank 2 it gets on well."""
    recv(t, ANSWER, frm=0).release()
    t._links[0].send([OFFENCES[offence][0]])
    recv(t, GO, frm=2)
    t.send(2, ANSWER, ("from 1",), [torch.ones(2000)])
    return "went on"


def be_offended(t):
    noted = Noted()
    t.send(1, ANSWER, (), [torch.ones(5)])
    with pytest.raises(PeerLost) as caught:
        recv(t, NEVER, frm=1)
    for number in range(10):  # far more than its credit: they are dropped
        t.send(1, ANSWER, (number,), [torch.ones(5)])
    t.flush()
    peers = list(t.peers())  # as long as rank 2 waits for us: then it may leave
    t.send(2, GO)
    return caught.value.rank, caught.value.why, recv(t, ANSWER, frm=2).meta, peers, noted.lines


def go_between(t):
    recv(t, GO, frm=0)
    t.send(1, GO)
    message = recv(t, ANSWER, frm=1)
    right = message.tensors[0].sum().item() == 2000
    message.release()
    t.send(0, ANSWER, message.meta)
    return right, t.lost


def by_rank(programs, t):
    return programs[t.rank](t)


@pytest.mark.parametrize("offence", OFFENCES)
def test_a_rank_that_sends_garbage_is_lost_to_its_receiver_and_to_no_other_rank(offence):
    says = OFFENCES[offence][1]
    first, second, third = start(partial(by_rank, (be_offended, partial(offend, offence), go_between)))
    lost, why, answer, peers, lines = first
    assert (lost, answer, peers) == (1, ("from 1",), [2])
    assert why.startswith("it sent garbage: ") and says in why
    assert [line for line in lines if says in line and "closed the link to rank 1" in line] == lines and lines
    assert second == "went on"
    assert third == (True, [])


# A training under attack


KEYLESS = [ATTACKS[name][0] for name in list(ATTACKS)[:8]]
"""What a stranger can do who does not know the secret."""
STEPS = 3 * len(KEYLESS)


class Delayed:
    """A loss that waits in step n until attack n is over: there is an attack in every step."""

    def __init__(self, folder):
        self.folder, self.step = folder, 0

    def __call__(self, output, target):
        if self.step == 0:
            secret.PATIENCE = 0.3
            (self.folder / f"training {os.getpid()}").touch()
        while not (self.folder / str(min(self.step, STEPS - 1))).exists():
            time.sleep(0.01)
        self.step += 1
        return torch.nn.functional.mse_loss(output, target)


def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def task(folder):
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(60, 4, generator=generator), torch.ones(60, 2))
    return mh.Task(model=model, data=data, loss=Delayed(folder), batch_size=4)


def targets_of(folder, ranks):
    """Where the ranks listen, as soon as all of them train."""
    ends = time.monotonic() + 60
    while len(training := list(folder.glob("training *"))) < ranks:
        assert time.monotonic() < ends, training
        time.sleep(0.01)
    return [Target(port, "") for path in training for _, port in listening(path.name.split()[1])]


class Besieger(threading.Thread):
    """Attack n goes to rank n modulo 3, so that each rank suffers each kind."""

    def __init__(self, folder):
        super().__init__()
        self._folder, self.ended = folder, False

    def run(self):
        try:
            targets = targets_of(self._folder, 3)
            for number in range(STEPS):
                with targets[number % 3].dial() as sock:
                    KEYLESS[number % len(KEYLESS)](targets[number % 3], sock)
                    assert is_closed(sock)
                (self._folder / str(number)).touch()
            self.ended = True
        finally:
            for number in range(STEPS):
                (self._folder / str(number)).touch()


def test_a_training_with_an_attack_in_every_step_gives_the_same_weights_to_the_last_bit(tmp_path, capfd):
    besieger = Besieger(tmp_path)
    besieger.start()
    try:
        result = mh.train(task(tmp_path), mh.bsp(lr=0.1), workers=3, link="tcp", steps=STEPS)
    finally:
        besieger.join()
    assert besieger.ended and result.lost == []
    assert capfd.readouterr().err.count("rejected a connection") == STEPS
    calm = mh.train(task(tmp_path), mh.bsp(lr=0.1), cluster=mh.Cluster(workers=3), steps=STEPS)
    assert result.weights_sha256 == calm.weights_sha256

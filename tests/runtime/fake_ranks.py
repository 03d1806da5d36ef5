"""Ranks without a transport that talk to their watcher over the control channel: a few lines of Python each."""

import os
import subprocess
import sys

from manyhands.runtime.membership.watcher import Watcher
from manyhands.runtime.rank_spec import rank_specs

FAKE_RANK = """
import os, signal, socket, sys, time
from manyhands.runtime.membership.control_channel import ChannelClosed, ControlChannel
from manyhands.runtime.membership.secret import introduce
from manyhands.runtime.rank_spec import from_environment

spec = from_environment()

def connect():
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\\0" + spec.watcher)
    introduce(sock, spec.secret, b"")
    return ControlChannel(sock)

channel = connect()

def hello():
    channel.send("hello", {"rank": spec.rank, "pid": os.getpid(), "address": f"at {spec.rank}"})

def receive(kind):
    while (message := channel.receive())[0] != kind:
        pass
    return message[1]

def join():
    hello()
    addresses = receive("addresses")["addresses"]
    channel.send("connected")
    receive("begin")
    return addresses

def report(*words):
    print(*words, flush=True)
"""
"""What a fake rank's program can use. It imports no torch, so it starts in a tenth of a second."""


class Job:
    """A watcher and its fake ranks."""

    def __init__(self, size, *, deadline=20.0, on_lines=None, **knobs):
        self.rank_specs = rank_specs({"worker": size}, deadline=deadline, **knobs)
        self.watcher = Watcher(self.rank_specs[0], on_lines=on_lines)
        self.processes = {}

    def start(self, *programs, child=True):
        """Start ranks 0, 1, ... with these programs."""
        for rank, program in enumerate(programs, start=len(self.processes)):
            process = start_fake_rank(self.rank_specs[rank], program, child=child)
            self.processes[rank] = process
            if child:
                self.watcher.watch(rank, process.pid, process.poll)

    def run(self, *programs, child=True, patient=False):
        """Start these ranks, wait until all have ended, and return the output of each."""
        with self.watcher:
            self.watcher.start(patient=patient)
            self.start(*programs, child=child)
            self.watcher.wait()
        return self.outputs()

    def outputs(self):
        """What each rank has reported."""
        return [process.communicate(timeout=10)[0].strip() for process in self.processes.values()]


def start_fake_rank(spec, program, *, child=True):
    """Start one rank; with `child=False` as a grandchild, whose parent waits for it."""
    command = [sys.executable, "-c", FAKE_RANK + program]
    if not child:
        command = [sys.executable, "-c", f"import subprocess; subprocess.run({command!r})"]
    environment = {**os.environ, **spec.environment()}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

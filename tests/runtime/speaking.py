"""Ranks that speak to their watcher without a transport: a few lines of Python each."""

import os
import subprocess
import sys

from manyhands.runtime.seat import seats
from manyhands.runtime.watch import Watcher

SPEAKS = """
import os, signal, socket, sys, time
from manyhands.runtime.control import HungUp, Line
from manyhands.runtime.seat import from_environment
from manyhands.runtime.secret import introduce

seat = from_environment()

def dial():
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\\0" + seat.watcher)
    introduce(sock, seat.secret, b"")
    return Line(sock)

line = dial()

def hello():
    line.send("hello", {"rank": seat.rank, "pid": os.getpid(), "address": f"at {seat.rank}"})

def until(kind):
    while (said := line.receive())[0] != kind:
        pass
    return said[1]

def meet():
    hello()
    addresses = until("everyone")["addresses"]
    line.send("reached")
    until("begin")
    return addresses

def tell(*words):
    print(*words, flush=True)
"""
"""What a rank's program can use. It has no torch, so it starts in a tenth of a second."""


class Job:
    """A watcher and its ranks; each rank is a few lines of Python."""

    def __init__(self, size, *, deadline=20.0, on_lines=None, **knobs):
        self.seats = seats(size, deadline=deadline, **knobs)
        self.watcher = Watcher(self.seats[0], on_lines=on_lines)
        self.processes = {}

    def start(self, *programs, child=True):
        """Start ranks 0, 1, ... with these programs."""
        for rank, program in enumerate(programs, start=len(self.processes)):
            process = speak(self.seats[rank], program, child=child)
            self.processes[rank] = process
            if child:
                self.watcher.watch(rank, process.pid, process.poll)

    def run(self, *programs, child=True, patient=False):
        """Start these ranks, wait until all have ended, and give what each has told."""
        with self.watcher:
            self.watcher.start(patient=patient)
            self.start(*programs, child=child)
            self.watcher.wait()
        return self.told()

    def told(self):
        return [process.communicate(timeout=10)[0].strip() for process in self.processes.values()]


def speak(seat, program, *, child=True):
    """One rank; not a child of ours if so wished: then its parent waits for it."""
    command = [sys.executable, "-c", SPEAKS + program]
    if not child:
        command = [sys.executable, "-c", f"import subprocess; subprocess.run({command!r})"]
    environment = {**os.environ, **seat.environment()}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

"""Strategies that are struck at a given step, programs in a session of their own, and what may be left of them."""

import copy
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.servers.shard import Shard
from pace import assert_within

LIMIT = 2.0
"""Seconds within which everything must have ended."""
TESTS = Path(__file__).parent.parent


# -- faults ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strike:
    """What happens to one rank as it begins a step; the moment is noted in `folder`.

    Args:
        act: does it; gives the mini-batch to go on with.
    """

    act: Callable[[Any, Any], Any]
    folder: Path
    rank: int = 1
    step: int = 5

    def __call__(self, w, batch):
        if (w.rank, w.step) != (self.rank, self.step):
            return batch
        (self.folder / "moment").write_text(str(time.monotonic()))
        return self.act(w, batch)

    def seconds_ago(self):
        return time.monotonic() - float((self.folder / "moment").read_text())


def struck(strategy, strike):
    """The same strategy, whose steps begin with `strike(w, batch)`. Unlike a wrapper it is what it was."""
    kind = type(strategy)

    def step(self, w, batch):
        return kind.step(self, w, strike(w, batch))

    again = {"step": step, "__reduce__": lambda self: (struck, (strategy, strike))}
    found = copy.copy(strategy)
    found.__class__ = type(kind.__name__, (kind,), again)
    return found


def with_mortal_server(strategy, rank, pushes):
    """The same strategy, one of whose servers kills itself over the push that comes after so many."""
    kind = type(strategy)

    def serve(self, w):
        if w.rank == rank:
            push, left = Shard.push, iter(range(pushes))
            Shard.push = lambda *given, **named: push(*given, **named) if next(left, -1) >= 0 else kill(w, ())
        kind.serve(self, w)

    again = {"serve": serve, "__reduce__": lambda self: (with_mortal_server, (strategy, rank, pushes))}
    found = copy.copy(strategy)
    found.__class__ = type(kind.__name__, (kind,), again)
    return found


def kill(w, batch):
    os.kill(os.getpid(), signal.SIGKILL)


def stop(w, batch):
    os.kill(os.getpid(), signal.SIGSTOP)


def end(w, batch):
    os._exit(0)


def kill_the_last(w, batch):
    """The last rank to be started, seen from any other: a server, if there is one."""
    os.kill(children(os.getppid())[-1], signal.SIGKILL)
    return batch


def ask_to_stop(launcher, w, batch):
    """Whoever launched this rank is asked to stop; go on once it has passed that on."""
    os.kill(launcher, signal.SIGTERM)
    until(lambda: w.transport.control.finishing)
    return batch


def slow_down(factor, w, batch):
    """From now on this rank computes so many times slower; a backward pass takes twice as long as a forward pass."""
    began = {}

    def before(layer, _):
        began[layer] = time.thread_time()

    def after(layer, *_):
        time.sleep((factor - 1) * 3 * (time.thread_time() - began[layer]))

    for layer in w.model.modules():
        if not list(layer.children()):
            layer.register_forward_pre_hook(before)
            layer.register_forward_hook(after)
    return batch


def no_number(w, batch):
    return (batch[0] * float("nan"), *batch[1:])


def together(jobs, w, batch, *, folder):
    """Go on when as many jobs as that, each with a folder of its own beside ours, have come this far."""
    until(lambda: len(list(folder.parent.glob("*/moment"))) == jobs)
    return batch


def fail_in_the_model(w, batch):
    w.model.register_forward_pre_hook(_fail)
    return batch


def exit_in_the_model(w, batch):
    w.model.register_forward_pre_hook(_exit)
    return batch


def _fail(*_):
    raise ZeroDivisionError("an error of my own")


def _exit(*_):
    sys.exit(0)


# -- newcomers ---------------------------------------------------------------------------------------

SPARE = 2
"""The rank of the only spare of two workers."""


@dataclass(frozen=True)
class Awaited:
    """In step 10 rank 0 waits until a spare takes part, so that no test depends on how long that takes.

    Args:
        folder: where the spare leaves word.
        launcher: the process to be asked for it in step 5; if 0, rank 1 is killed in that step.
    """

    folder: Path
    launcher: int = 0

    def __call__(self, w, batch):
        came = self.folder / "came"
        if w.rank == SPARE:
            came.touch()
        elif (w.rank, w.step) == (1, 5):
            os.kill(*((self.launcher, signal.SIGUSR1) if self.launcher else (os.getpid(), signal.SIGKILL)))
        elif (w.rank, w.step) == (0, 10):
            until(came.exists)
        return batch


# -- what came of it -----------------------------------------------------------------------------------

KILLED = "it was killed by SIGKILL"


def messages(caplog):
    """What the library has said."""
    return [record.getMessage() for record in caplog.records if record.name == "manyhands"]


def taken_by(result):
    """How many mini-batches each rank has taken."""
    return Counter(line["rank"] for line in result.records if "loss" in line)


# -- small tasks --------------------------------------------------------------------------------------


def small(model=None, **settings):
    """A linear map, learned by a model of two layers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 4, generator=generator)
    y = x @ torch.randn(4, 2, generator=generator)
    return mh.Task(model=model or net, data=TensorDataset(x, y), loss=mse_loss, batch_size=4, **settings)


def net(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def net_of_its_own(launcher, folder):
    """Another model in the first rank that asks for one."""
    if os.getpid() == launcher:
        return net()
    first = folder / "first"
    with suppress(FileExistsError), open(first, "x") as file:
        file.write(str(os.getpid()))
    return net(16 if first.read_text() == str(os.getpid()) else 8)


# -- processes ----------------------------------------------------------------------------------------


def children(pid):
    """The processes that a process has started, in that order; none that serve multiprocessing."""
    found = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with suppress(OSError):  # a thread that has just ended
            found += [int(child) for child in (task / "children").read_text().split()]
    return sorted(child for child in found if not _serves(_command(child)))


def _serves(command):
    return b"resource_tracker" in command or b"forkserver" in command


def _command(pid):
    """Its command line; what is ending has none any more."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def members(session):
    """The living processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                found.append(int(stat.parent.name))
    return [pid for pid in found if (command := _settled(pid)) and not _serves(command)]


def _settled(pid):
    """Its command line; none if it has ended. What is ending has none any more, and what is beginning none yet."""
    ends = time.monotonic() + LIMIT
    while not (command := _command(pid)) and time.monotonic() < ends:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                time.sleep(1e-3)
                continue
        break
    return command


def sockets():
    """The named sockets of this library that this process holds."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@mh-" in line]
    named = {f"socket:[{line[6]}]": line[7] for line in lines}
    held = []
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            held.append(os.readlink(file))
    return [named[name] for name in held if name in named]


def memories():
    """Memory that this process holds, and files in the folder of shared memory that bear its name or ours."""
    held = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    files = [name for name in os.listdir("/dev/shm") if name.startswith("mh") or f"_{os.getpid()}_" in name]
    return sorted([name for name in held if "memfd:" in name] + files)


def until(holds, seconds=60.0):
    """Wait until something is so, and give it."""
    ends = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < ends, f"{holds} has not come true in {seconds} s"
        time.sleep(0.005)
    return found


class Started:
    """A program in a session of its own, as if started from a terminal."""

    def __init__(self, *words, **environment):
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def ranks(self):
        return children(self.pid)

    def others(self):
        """Whoever else of its session is alive."""
        return [pid for pid in members(self.pid) if pid != self.pid]

    def ended(self, seconds=60.0):
        """Wait for it and all whom it started: its exit code, what it said and what it complained about."""
        out, errors = self.process.communicate(timeout=seconds)
        began = time.monotonic()
        until(lambda: not self.others())
        assert_within(LIMIT, time.monotonic() - began)
        return self.process.returncode, out, errors

    def clear(self):
        for pid in members(self.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()

"""From the command to the end of the first step with 2 workers, over torchrun and DDP.

first-step-over-torchrun    `manyhands run -n 2` with bsp: our time over that of `torchrun --nproc-per-node 2` with DDP

Both scripts have the same model, data and optimizer, and the step ends when the slower rank has finished. There are ten
rounds, not thirty: a start takes seconds, mostly for loading libraries, and varies little once these are in the disk
cache, for which there is an uncounted first round.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from _ranks import RANKS, one_thread
from _side_by_side import say, slowness, take_turns

from manyhands.core.errors import ManyhandsError
from manyhands.report.progress import Progress

SCRIPTS = Path(__file__).parent / "scripts"
OURS = ["-m", "manyhands.cli", "run", "-n", str(RANKS), str(SCRIPTS / "first_step_ours.py")]
PEER = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), str(SCRIPTS / "first_step_ddp.py")]
"""`python -m torch.distributed.run` is torchrun."""
ROUNDS = 10
DEADLINE = 120.0
PATIENCE = 5.0
"""Seconds that a launcher has to end its workers before it is killed."""


def run(progress: Progress) -> list[dict[str, Any]]:
    """Both in turn. Rounds are printed to stderr, because `progress` counts samples."""
    return compare(OURS, PEER, ROUNDS)


def compare(ours: Sequence[str], peer: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Start each once for the disk cache, then in turn."""
    say(f"start: {rounds} rounds of torchrun, manyhands")
    sides = {"torchrun": lambda steps: first_step(peer), "manyhands": lambda steps: first_step(ours)}
    take_turns(sides, 1, 1)
    seconds = take_turns(sides, 1, rounds)
    return [slowness("first-step-over-torchrun", seconds["manyhands"], seconds["torchrun"], "<= 0.8")]


def first_step(command: Sequence[str]) -> float:
    """Seconds from the command to the end of the slowest rank's first step."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times"
        file.touch()
        began = time.time()
        output = launch(command, {"FIRST_STEP_FILE": str(file)})
        times = [float(line) for line in file.read_text(encoding="ascii").splitlines()]
    if len(times) != RANKS:
        raise ManyhandsError(f"{len(times)} ranks made a first step, but {RANKS} should: {' '.join(command)}\n{output}")
    return max(times) - began


def launch(command: Sequence[str], variables: dict[str, str]) -> str:
    """Run Python with these arguments, and return its output."""
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **one_thread(), **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # an interrupt from the keyboard reaches us only, and we end it
    )
    try:
        output = process.communicate(timeout=DEADLINE)[0]
    except subprocess.TimeoutExpired:
        raise ManyhandsError(f"no end within {DEADLINE:.0f} s: {' '.join(command)}") from None
    finally:
        end(process)
    if process.returncode:
        raise ManyhandsError(f"exit code {process.returncode}: {' '.join(command)}\n{output.rstrip()}")
    return output


def end(process: subprocess.Popen[str]) -> None:
    """Terminate it first: workers of a launcher may be in sessions of their own, which only it can end."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()

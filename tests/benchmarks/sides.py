"""Sides that do what a test asks of them; ranks load them by the path of this file."""

import os
import signal
import sys
import time

import torch


def told(commands):
    """Reports ten times its steps, and rank 1 a second more."""
    while (steps := commands.wait()) is not None:
        commands.report(10.0 * steps + int(os.environ["RANK"]))


def surroundings(folder, commands):
    """Writes down what it finds, then counts its steps."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "MASTER_PORT")
    with open(f"{folder}/{os.environ['RANK']}", "w") as file:
        file.write(" ".join([str(torch.get_num_threads()), *(os.environ[name] for name in names)]))
    done = []
    commands.repeat(lambda: done.append(1))
    with open(f"{folder}/{os.environ['RANK']}", "a") as file:
        file.write(f" {len(done)}")


def broken(commands):
    """Rank 1 fails in its second block, while rank 0 would wait for ever."""
    told_to = commands.wait()
    commands.report(1.0 * told_to)
    commands.wait()
    if os.environ["RANK"] == "1":
        raise RuntimeError("the gradient fell over")
    signal.pause()


def killed(commands):
    """Rank 0 dies without a word."""
    commands.wait()
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def silent(commands):
    """Never reports."""
    commands.wait()
    signal.pause()


def ends_badly(commands):
    """Works, and fails once told to stop."""
    told(commands)
    print("could not let go")
    sys.exit(5)


def needs_the_other(folder, commands):
    """Ends only after the other rank has been told to stop too."""
    told(commands)
    here = int(os.environ["RANK"])
    open(f"{folder}/{here}", "w").close()
    while not os.path.exists(f"{folder}/{1 - here}"):
        time.sleep(0.01)

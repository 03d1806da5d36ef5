"""Ordinary scripts with `hands.prepare`: few lines change, DDP's weights to the last bit, every method trains them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts_in_a_row import BATCH, SCRIPTS

pytestmark = pytest.mark.timeout(180)

NAMES = ("resnet_mnist", "gpt_shakespeare", "huggingface_style")
PEERS = ("ddp", "accelerate")
SMALL = {
    "resnet_mnist": ("--epochs", "2", "--width", "4"),
    "gpt_shakespeare": ("--epochs", "1", "--width", "16", "--context", "32"),
    "huggingface_style": ("--epochs", "2", "--width", "16", "--reviews", "1000"),
}
"""Arguments with which a script takes about a second."""
MANYHANDS = ("manyhands.cli", "run", "--no-prefix", "-n", "2")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def in_a_row(folder, launcher, scripts):
    """Run scripts on the ranks of one launcher; what each has written down, by rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("MANYHANDS_DATA", None)
    command = [sys.executable, "-m", *launcher, Path(__file__).with_name("scripts_in_a_row.py"), folder]
    done = subprocess.run([*command, *map(json.dumps, scripts)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [
        [json.loads(path.read_text()) for path in sorted(folder.glob(f"{number}-*.json"))]
        for number in range(len(scripts))
    ]


def small(prefix=""):
    return [[prefix + name, *SMALL[name], "--batch-size", str(BATCH)] for name in NAMES]


# -- lines -------------------------------------------------------------------------------------------


def changed(name, other):
    """Lines that were added and removed to make `other` of the plain script; a new indentation is no change."""
    command = ("git", "diff", "--no-index", "--numstat", "-w", f"plain_{name}.py", f"{other}.py")
    added, removed, _ = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True).stdout.split(maxsplit=2)
    return int(added), int(removed)


@pytest.mark.parametrize("name", NAMES)
def test_fewer_lines_change_than_for_ddp_and_accelerate(name):
    ours = changed(name, name)
    print(f"{name}: manyhands +{ours[0]} -{ours[1]}", end="")
    for peer in PEERS:
        theirs = changed(name, f"{peer}_{name}")
        print(f", {peer} +{theirs[0]} -{theirs[1]}", end="")
        assert 0 < ours[0] <= theirs[0] and ours[1] <= theirs[1]


# -- weights -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_ddp(tmp_path_factory):
    """The three scripts of DDP on two ranks."""
    return in_a_row(tmp_path_factory.mktemp("ddp"), TORCHRUN, small("ddp_"))


@pytest.mark.parametrize("launcher", [MANYHANDS, TORCHRUN], ids=["manyhands run", "torchrun"])
def test_the_weights_equal_those_of_ddp_after_every_step_to_the_last_bit(launcher, with_ddp, tmp_path):
    """With groups, schedules, clipping, bf16, accumulation and tied weights in force."""
    ours = in_a_row(tmp_path, launcher, small())
    for name, ranks, peers in zip(NAMES, ours, with_ddp, strict=True):
        first, second, *theirs = (one["digests"] for one in (*ranks, *peers))
        assert len(first) == len(set(first)) > 20, f"{name} took {len(first)} steps"
        assert [first] * 3 == [second, *theirs], name

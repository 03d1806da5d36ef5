"""Ordinary scripts with `hands.prepare`: few lines change, DDP's weights to the last bit, every method trains them."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from subprocess import PIPE

import pytest

from repeats import every
from scripts_in_a_row import BATCH, METHODS, SCRIPTS

pytestmark = pytest.mark.timeout(180)

NAMES = ("resnet_mnist", "gpt_shakespeare", "huggingface_style")
PEERS = ("ddp", "accelerate")
SMALL = {
    "resnet_mnist": ("--epochs", "2", "--width", "4"),
    "gpt_shakespeare": ("--epochs", "1", "--width", "16", "--context", "32"),
    "huggingface_style": ("--epochs", "4", "--width", "16", "--reviews", "1000", "--lr", "0.01"),
}
"""Arguments with which a script takes about a second."""
LONG = {
    "resnet_mnist": ("--epochs", "12", "--width", "8"),
    "gpt_shakespeare": ("--epochs", "12", "--width", "48", "--context", "32", "--lr", "0.005"),
    "huggingface_style": ("--epochs", "12", "--lr", "0.005"),
}
"""Arguments with which a script learns its task."""
LOSS_BELOW_CHANCE = {"resnet_mnist": 1.8, "gpt_shakespeare": 4.0, "huggingface_style": 0.68}
"""Less than chance has: ln 10, about ln 95, ln 2."""
MANYHANDS = ("manyhands.cli", "run", "--no-prefix", "-n", "2")
ALONE = ("manyhands.cli", "run", "-n", "1")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCHERS = {"manyhands run": MANYHANDS, "torchrun": TORCHRUN}


def alone():
    """The environment without data, so that what needs no download is used."""
    return {name: value for name, value in os.environ.items() if name != "MANYHANDS_DATA"} | {"OMP_NUM_THREADS": "1"}


def in_a_row(folder, launcher, scripts, seconds=80):
    """Run scripts on the ranks of one launcher; what each has written down, by rank."""
    command = [sys.executable, "-m", *launcher, Path(__file__).with_name("scripts_in_a_row.py"), folder]
    done = ran([*command, *map(json.dumps, scripts)], seconds)
    if scripts[0][0].startswith(PEERS) and done is None:  # gloo can abort or hang on a busy machine
        done = ran([*command, *map(json.dumps, scripts)], seconds)
    assert done is not None
    assert done.returncode == 0, done.stderr
    return [
        [json.loads(path.read_text()) for path in sorted(folder.glob(f"{number}-*.json"))]
        for number in range(len(scripts))
    ]


def ran(command, seconds):
    """The completed process; None if it did not end in time, or was aborted."""
    with subprocess.Popen(
        [*map(str, command)], stdout=PIPE, stderr=PIPE, text=True, env=alone(), start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None
    aborted = process.returncode and "terminate called" in err
    return None if aborted else subprocess.CompletedProcess(command, process.returncode, out, err)


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


def test_the_page_about_ddp_has_these_counts_and_diffs():
    page = (SCRIPTS.parents[1] / "docs" / "from-ddp.md").read_text(encoding="utf-8")
    for name in NAMES:
        cells = [
            f"+{added} -{removed}"
            for added, removed in (changed(name, f"{x}{name}") for x in ("", "ddp_", "accelerate_"))
        ]
        assert f"| {name} | {' | '.join(cells)} |" in page
        command = ("git", "diff", "--no-index", "-w", "-U1", f"plain_{name}.py", f"{name}.py")
        lines = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True).stdout.splitlines()[2:]
        assert "```diff\n" + "\n".join(lines) + "\n```" in page


# -- weights -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_ddp(tmp_path_factory):
    """The three scripts of DDP on two ranks."""
    return in_a_row(tmp_path_factory.mktemp("ddp"), TORCHRUN, small("ddp_"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_weights_equal_those_of_ddp_after_every_step_to_the_last_bit(launcher, with_ddp, tmp_path):
    """With groups, schedules, clipping, bf16, accumulation and tied weights in force."""
    ours = in_a_row(tmp_path, LAUNCHERS[launcher], small())
    for name, ranks, peers in zip(NAMES, ours, with_ddp, strict=True):
        first, second, *theirs = (one["digests"] for one in (*ranks, *peers))
        assert len(first) == len(set(first)) > 20, f"{name} took {len(first)} steps"
        assert [first] * 3 == [second, *theirs], name


@pytest.mark.soak
def test_the_scripts_of_accelerate_train_too(tmp_path):
    """The lines that are counted above are those of a script that works."""
    for script in small("accelerate_"):
        ((lead, other),) = in_a_row(tmp_path, TORCHRUN, [script])
        assert len(lead["lines"]) == int(script[2]) and not other["lines"], "one line for each epoch, by one rank"


# -- types -------------------------------------------------------------------------------------------


def test_a_typed_script_passes_mypy_strict():
    """torch's own functions are not all typed, such as `Tensor.backward`."""
    command = (
        "-m",
        "mypy",
        "--strict",
        "--untyped-calls-exclude",
        "torch",
        *(f"{SCRIPTS}/{name}.py" for name in NAMES),
    )
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=SCRIPTS.parents[1])
    assert done.returncode == 0, done.stdout


# -- methods -----------------------------------------------------------------------------------------


def result(ranks):
    """The last number that the lead has printed: an accuracy, or a loss."""
    return float(ranks[0]["lines"][-1].split()[-1])


@pytest.mark.parametrize("name", every(3, NAMES))
def test_other_methods_train_the_scripts(name, tmp_path):
    """They begin with a loss of about ln(classes), and end with a smaller one."""
    found = in_a_row(tmp_path, MANYHANDS, [[name, "--method", method, *SMALL[name]] for method in METHODS])
    for method, ranks in zip(METHODS, found, strict=True):
        print(f"{name} {method}: {ranks[0]['lines'][-1]}")
        loss = float(re.search(r"loss (\d+\.\d+)", ranks[0]["lines"][-1])[1])
        assert loss < LOSS_BELOW_CHANCE[name], method
        assert not ranks[1]["lines"], "only the lead prints"


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_other_methods_are_as_good_as_one_process_within_the_noise_of_seeds(name, tmp_path):
    """One process takes the mini-batches of both workers together; three seeds each."""
    sign = -1 if name == "gpt_shakespeare" else 1
    seeds = [("--seed", str(seed)) for seed in range(3)]
    folders = [tmp_path / method for method in ("plain", *METHODS)]
    for folder in folders:
        folder.mkdir()
    words = ("--batch-size", str(2 * BATCH))
    plain = in_a_row(folders[0], ALONE, [[f"plain_{name}", *LONG[name], *words, *seed] for seed in seeds], 900)
    known = [sign * result(ranks) for ranks in plain]
    print(f"{name}, one process: {known}")
    noise = max(stdev(known), 0.01 * abs(mean(known)))
    for method, folder in zip(METHODS, folders[1:], strict=True):
        words = ("--batch-size", str(BATCH))
        jobs = [[name, "--method", method, *LONG[name], *words, *seed] for seed in seeds]
        found = in_a_row(folder, MANYHANDS, jobs, 900)
        values = [sign * result(ranks) for ranks in found]
        print(f"{name}, {method}: {values}")
        assert mean(values) > mean(known) - 3 * noise, f"{method}: {values}, one process: {known}"

"""Scripts that join several times, such as for cross validation: every fold is a run of its own."""

import json

import pytest
import torch
from torch.utils.data import Subset

import manyhands as mh
from manyhands.run.join import Hands
from manyhands.virtual.world import simulate

from .tools import net, small

pytestmark = pytest.mark.timeout(60)

FOLDS = 3
MANYHANDS = ("-m", "manyhands.cli", "run", "--no-prefix", "-n", 2)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
BEGIN = """
import json, os, sys
import torch
import manyhands as mh
from torch.optim import SGD
from torch.utils.data import DataLoader
from real.test_join_again import FOLDS, error, model, part, train
from real.tools import small
task, rank = small(), int(os.environ.get("RANK", 0))

def sockets():
    files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(file) and os.readlink(file).startswith("socket:") for file in files)

def report(**facts):
    os.write(1, (json.dumps({"rank": rank, **facts}) + "\\n").encode())  # in one piece: torchrun has no lines
"""
CROSS_VALIDATION = """
for fold in range(FOLDS):
    net = model(fold)
    with mh.join(net, strategy=mh.{method}(lr=0.05), loss=task.loss) as hands:
        held = sockets()
        train(hands, fold)
    report(fold=fold, error=error(net), role=hands.role, sockets=held)
"""
PREPARED = """
for fold in range({folds}):
    net = model(fold)
    hands = mh.join(strategy=mh.{method}())
    loader = DataLoader(part(fold), 4)
    net, optimizer, loader = hands.prepare(net, SGD(net.parameters(), 0.05), loader)
    for x, y in loader:
        task.loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    {end}
    report(fold=fold, error=error(net))
"""


def model(fold):
    torch.manual_seed(fold)
    return net()


def part(fold):
    """The samples that a fold is trained on."""
    data = small().data
    return Subset(data, [index for index in range(len(data)) if index % FOLDS != fold])


def train(hands, fold):
    for x, y in hands.share(part(fold), 4, epochs=4):
        hands.step(x, y)


def error(net):
    x, y = small().data.tensors
    with torch.no_grad():
        return small().loss(net(x), y).item()


@pytest.fixture
def runs(tmp_path, start):
    """Run a script of several joins; its exit code, its reports and the lines of its stderr."""

    def run(launcher, text, words=(), **fields):
        script = tmp_path / "script.py"
        script.write_text(BEGIN + text.format(**fields))
        code, out, said = start(*launcher, *words, script).ended()
        return code, [json.loads(line) for line in out.splitlines()], said.splitlines()

    return run


def in_virtual_time(fold, workers=2):
    """The error after one fold of bsp."""

    def program(transport):
        found = model(fold)
        with Hands(transport, found, strategy=mh.bsp(lr=0.05), loss=small().loss) as hands:
            train(hands, fold)
        return error(found)

    return simulate(mh.Cluster(workers=workers), program).results[0]


def by_fold(reports, of):
    return [[report[of] for report in reports if report["fold"] == fold] for fold in range(FOLDS)]


@pytest.mark.parametrize(
    "launcher", [MANYHANDS, (*MANYHANDS, "--link", "tcp"), TORCHRUN], ids=["shm", "tcp", "torchrun"]
)
def test_every_fold_is_a_run_of_its_own(launcher, runs):
    code, reports, _ = runs(launcher, CROSS_VALIDATION, method="bsp")
    assert code == 0
    assert by_fold(reports, "error") == [[in_virtual_time(fold)] * 2 for fold in range(FOLDS)]
    assert len({report["sockets"] for report in reports}) == 1, "those of earlier folds are closed"


ALONE = "manyhands: no launcher, so this is a job of one worker; `manyhands run -n 4 script.py` starts four"


@pytest.mark.parametrize("method", ["bsp", "ssp"])
def test_a_process_without_a_launcher_is_a_job_of_one_worker_and_says_so_once(method, runs):
    code, reports, said = runs((), CROSS_VALIDATION, method=method)
    assert (code, said) == (0, [ALONE])
    found = [report["error"] for report in reports]
    if method == "bsp":
        assert found == [in_virtual_time(fold, workers=1) for fold in range(FOLDS)]
    assert all(after < 0.7 * error(model(fold)) for fold, after in enumerate(found))


def test_a_process_without_a_launcher_cannot_have_a_server(runs):
    code, _, said = runs((), "mh.join(strategy=mh.ssp(), servers=1)")
    assert code == 2
    assert said == ["manyhands: servers is 1, but must be 0 in a job of one process: start more with manyhands run"]


@pytest.mark.parametrize("servers", [0, 1])
def test_asynchronous_folds_train_too(servers, runs):
    code, reports, said = runs(MANYHANDS, CROSS_VALIDATION, ["--servers", servers], method="ssp")
    assert (code, said) == (0, [])
    for fold, errors in enumerate(by_fold(reports, "error")):
        assert len(errors) == 2 + servers and len(set(errors)) == 1, "all ranks have the same model"
        assert errors[0] < 0.7 * error(model(fold))
    assert [len(set(roles)) for roles in by_fold(reports, "role")] == [1 + servers] * FOLDS


def test_a_prepared_loop_joins_again_after_its_end(runs):
    code, reports, said = runs(MANYHANDS, PREPARED, method="bsp", folds="FOLDS", end="hands.end()")
    assert (code, said) == (0, [])
    assert [len(set(errors)) for errors in by_fold(reports, "error")] == [1] * FOLDS


def test_but_not_before_it(runs):
    code, reports, said = runs(MANYHANDS, PREPARED, method="bsp", folds="FOLDS", end="pass")
    assert (code, len(reports), len(said)) == (2, 2, 1)
    refusal = "joins again, but its former hands have not ended: leave their with block first, or call hands.end()"
    assert said[0] in [f"manyhands: rank {rank} {refusal}" for rank in range(2)]


AGAIN = (
    "is lost: it ended without joining again, but every rank must join equally often; a server rank joins again only"
)


@pytest.mark.parametrize(
    ("words", "folds", "lost"),
    [([], "FOLDS - rank", 1), (["--servers", 1], "FOLDS", 2)],
    ids=["a worker", "a server that has no with block"],
)
def test_a_rank_that_does_not_join_again_is_named(words, folds, lost, runs):
    code, _, said = runs(MANYHANDS, PREPARED, words, method="ssp", folds=folds, end="hands.end()")
    assert code == 3
    assert said == [f"manyhands: rank {lost} {AGAIN} if its script has `with mh.join(...)`"]


def test_a_failure_in_a_later_fold_is_that_of_the_run(runs):
    act = "hands.end(); rank == 1 and fold == 1 and sys.exit(7)"
    code, _, said = runs(MANYHANDS, PREPARED, method="bsp", folds="FOLDS", end=act)
    assert code == 7
    assert said == ["manyhands: rank 1 failed: it ended before it had joined (exit code 7)"]

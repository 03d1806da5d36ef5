"""The exit code of `manyhands run`: that of the script wherever it ends, and never 0 if no rank has trained."""

import re

import pytest

from repeats import diagonals, every

pytestmark = pytest.mark.timeout(60)

BEGIN = """
import atexit, os, sys, time
import manyhands as mh
from torch.optim import SGD
from torch.utils.data import DataLoader
from real.tools import net, small
task, rank, model = small(), int(os.environ["RANK"]), net()
"""
WITH = """
{before}
hands = mh.join(model, strategy=mh.{method}(lr=0.01), loss=task.loss)
{between}
with hands:
    for step, (x, y) in enumerate(hands.share(task.data, 4, steps=6)):
        hands.step(x, y)
        if step == 2:
            {inside}
{after}
"""
PREPARED = """
{before}
hands = mh.join(strategy=mh.{method}())
{between}
model, optimizer, loader = hands.prepare(model, SGD(model.parameters(), 0.01), DataLoader(task.data, 4))
for step, (x, y) in enumerate(loader):
    task.loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2:
        {inside}
{after}
"""
PLACES = ("before", "between", "inside", "after")
FORMS = {"with": WITH, "prepared": PREPARED}


@pytest.fixture
def ends(tmp_path, start):
    """Run a script of two workers that does `act` at one place; its exit code and the lines of its stderr."""

    def run(form, place, act, method="bsp", words=()):
        script = tmp_path / "script.py"
        script.write_text(BEGIN + form.format(method=method, **{**dict.fromkeys(PLACES, "pass"), place: act}))
        code, _, said = start("-m", "manyhands.cli", "run", "-n", 2, *words, script).ended()
        return code, said.splitlines()

    return run


def ours(lines):
    return [line for line in lines if line.startswith("manyhands: ")]


@pytest.mark.parametrize(("form", "place"), diagonals(2, FORMS, PLACES))
def test_the_exit_code_of_all_ranks_is_that_of_the_run(form, place, ends):
    code, _ = ends(FORMS[form], place, "sys.exit(7)")
    assert code == 7


@pytest.mark.parametrize(("form", "place"), diagonals(2, FORMS, ["between", "inside"]))
def test_one_rank_that_exits_ends_the_others_and_is_named(form, place, ends):
    assert ends(FORMS[form], place, "if rank == 1: sys.exit(7)") == (7, ["manyhands: rank 1 failed: SystemExit: 7"])


def test_so_does_one_that_fails_beside_a_server(ends):
    code, lines = ends(WITH, "inside", "if rank == 1: 1 / 0", "ssp", ["--servers", 1])
    assert code == 1
    assert lines.count("[1] ZeroDivisionError: division by zero") == 1
    assert ours(lines) == ["manyhands: rank 1 failed: ZeroDivisionError: division by zero"]


@pytest.mark.parametrize("place", every(2, ["between", "inside", "after"]))
def test_a_failure_in_a_prepared_script_is_said_once(place, ends):
    code, lines = ends(PREPARED, place, "if rank == 1: 1 / 0")
    assert code == 1
    assert [line for line in lines if "Traceback" in line] == ["[1] Traceback (most recent call last):"]
    assert ours(lines) == ["manyhands: rank 1 failed: ZeroDivisionError: division by zero"]


def test_an_exit_is_handed_on_even_if_the_process_must_be_killed(ends):
    act = "if rank == 1: atexit.register(time.sleep, 3600); sys.exit(7)"
    assert ends(WITH, "inside", act) == (7, ["manyhands: rank 1 failed: SystemExit: 7"])


@pytest.mark.parametrize(("act", "code"), [("raise SystemExit(7)", 7), ("os._exit(0)", 3)])
def test_a_run_that_every_rank_has_left_early_is_not_a_success(act, code, ends):
    assert ends(WITH, "between", act)[0] == code


@pytest.mark.parametrize("act", every(2, ["sys.exit()", "sys.exit(0)"]))
def test_a_prepared_script_may_end_by_sys_exit(act, ends):
    assert ends(PREPARED, "after", act) == (0, [])


def test_an_exit_that_the_script_catches_is_none(ends):
    assert ends(PREPARED, "inside", "\n        try: sys.exit(7)\n        except SystemExit: pass") == (0, [])


@pytest.mark.parametrize(("form", "method"), diagonals(2, FORMS, ["bsp", "diloco"]))
def test_a_rank_that_leaves_a_loop_in_lock_step_early_ends_the_run_and_is_named(form, method, ends):
    code, lines = ends(FORMS[form], "inside", "if rank == 1: break", method)
    assert code == 1
    found = re.fullmatch(
        r"manyhands: rank [01] .*, but rank [01] ended its loop after \d: workers in lock step .*", lines[-1]
    )
    assert found is not None and len(ours(lines)) == 1


def test_a_rank_that_leaves_early_where_servers_continue_does_no_harm(ends):
    assert ends(WITH, "inside", "if rank == 1: break", "bsp_server")[0] == 0

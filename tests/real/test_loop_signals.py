"""A user's own loop that is asked to stop: it learns of it after the same step on all ranks, or is saved and ended."""

import time

import pytest

import manyhands as mh
from manyhands.run.loop_signals import StopRequest
from manyhands.runtime.launch.launch import run_script
from manyhands.runtime.membership import watcher
from pace import assert_within

pytestmark = pytest.mark.timeout(100)

LOOP = """
import hashlib, os, signal, sys, time
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
import manyhands as mh

folder, form, until, whom = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
number = getattr(signal, whom.split()[0]) if whom else 0

def ask():
    if whom.endswith("launcher"):
        os.kill(os.getppid(), number)
    else:
        os.killpg(os.getpgid(0), number)

torch.manual_seed(0)
x = torch.randn(40, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
rank, step = int(os.environ["RANK"]), 0
"""
PREPARED = """
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
hands = mh.join(strategy=mh.{method}(), folder=folder if form == "folder" else None)
net, optimizer, scheduler, loader = hands.prepare(net, optimizer, scheduler, DataLoader(data, 4, shuffle=True))
if os.path.isdir(folder):
    step = hands.load(folder).get("step") or hands._training.worker.step
else:
    torch.manual_seed(rank)
while step < until:
    for a, b in loader:
        mse_loss(net(a), b).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if whom and rank == 1 and step == 7:
            ask()
        {look}
        if step == until:
            break
    else:
        continue
    break
hands.end()
print(rank, step, hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest())
"""
LOOKS = """if hands.stopping:
            hands.save(folder, extra={{"step": step}})
            break"""
NEVER_LOOKS = "pass"
STEPS = """
from torch.nn.functional import mse_loss
with mh.join(net, strategy=mh.{method}(lr=0.01), loss=mse_loss, folder=folder) as hands:
    if os.path.isdir(folder):
        hands.load(folder)
    for step, (a, b) in enumerate(hands.share(data, 4, steps=until), 1):
        hands.step(a, b)
        if whom and rank == 1 and step == 7:
            ask()
        {look}
print(rank, step)
"""
STEPS_LOOK = """if hands.stopping:
            hands.save(folder)
            break"""
FOREVER = 10**9
RUN = ("-m", "manyhands.cli", "run", "-n", 2, "--no-prefix")


@pytest.fixture
def script(tmp_path):
    def write(form=PREPARED, look=LOOKS, method="bsp"):
        path = tmp_path / "script.py"
        path.write_text((LOOP + form).format(method=method, look=look.format()))
        return path

    return write


@pytest.fixture
def ran(tmp_path, start):
    """Run a script of two workers; its exit code, the words that each rank has printed last, and its stderr."""

    def run(path, form="none", until=FOREVER, whom="", launcher=RUN, folder="saved"):
        program = start(*launcher, path, tmp_path / folder, form, until, whom)
        code, out, said = program.ended()
        return code, sorted(line.split() for line in out.splitlines()), said

    return run


# -- a loop that looks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("whom", ["SIGTERM launcher", "SIGUSR1 launcher", "SIGTERM rank", "SIGUSR1 rank"])
def test_a_loop_learns_of_a_signal_after_the_same_step_on_all_ranks(whom, script, ran, tmp_path):
    code, lines, said = ran(script(), whom=whom)
    assert (code, said) == (0, "")
    (_, first, one), (_, second, other) = lines
    assert (first, one) == (second, other)
    assert int(first) >= 7
    assert mh.load_checkpoint(tmp_path / "saved").facts["step"] == int(first)


def test_every_worker_of_another_method_learns_of_it_at_its_next_step(script, ran, tmp_path):
    path = script(method="ssp")
    code, _, said = ran(path, whom="SIGTERM launcher")
    assert (code, said) == (0, "")
    saved = mh.load_checkpoint(tmp_path / "saved")
    last = max(rank["step"] for rank in saved.facts["loop"]["ranks"].values())
    code, lines, said = ran(path, until=last + 20)
    assert (code, said) == (0, "")
    assert [steps for _, steps, _ in lines] == [str(last + 20)] * 2


def test_a_share_that_was_interrupted_grants_the_rest_when_it_is_resumed(script, ran, tmp_path):
    path = script(STEPS, STEPS_LOOK, "downpour")
    code, before, said = ran(path, until=10**4, whom="SIGTERM launcher")
    assert (code, said) == (0, "")
    taken = sum(int(steps) for _, steps in before)
    assert 7 <= taken < 2 * 10**4
    total = taken // 2 + 10
    code, after, said = ran(path, until=total)
    assert (code, said) == (0, "")
    assert sum(int(steps) for _, steps in after) == 2 * total - taken


# -- a loop that does not look -------------------------------------------------------------------------


@pytest.mark.parametrize("whom", ["SIGTERM launcher", "SIGUSR1 rank"])
def test_a_loop_that_never_looks_is_saved_and_ended_and_can_be_resumed_exactly(whom, script, ran, tmp_path):
    path = script(look=NEVER_LOOKS)
    began = time.monotonic()
    code, lines, said = ran(path, "folder", whom=whom)
    assert_within(10 + 10, time.monotonic() - began)  # it has also started
    saved = mh.load_checkpoint(tmp_path / "saved")
    step = saved.facts["step"]
    assert (code, lines) == (143, [])
    assert said == (
        f"manyhands: the run was asked to stop: ended after step {step}, saved in {saved.path}; "
        f"to resume, let the script call hands.load({str(tmp_path / 'saved')!r})\n"
    )
    assert step >= 7
    code, resumed, said = ran(path, until=step + 20)
    assert (code, said) == (0, "")
    assert resumed == ran(path, until=step + 20, folder="none")[1]


def test_without_a_folder_it_is_ended_and_says_what_would_have_saved_it(script, ran, tmp_path):
    code, lines, said = ran(script(look=NEVER_LOOKS), whom="SIGTERM launcher")
    assert (code, lines) == (143, [])
    words = "nothing was saved: pass folder=... to join, or save when hands.stopping is true\n"
    assert said.endswith(words)
    assert said.count("\n") == 1
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("method", ["bsp", "downpour"])
def test_a_loop_of_steps_is_saved_and_ended_too(method, script, ran, tmp_path):
    code, lines, said = ran(script(STEPS, NEVER_LOOKS, method), until=10**6, whom="SIGTERM launcher")
    assert (code, lines) == (143, [])
    assert f"saved in {mh.load_checkpoint(tmp_path / 'saved').path}; to resume" in said


def test_torchrun_passes_the_signal_on_to_every_rank(script, ran, tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 2)
    _, lines, _ = ran(script(), whom="SIGTERM rank", launcher=torchrun)
    (_, first, one), (_, second, other) = lines
    assert (first, one) == (second, other)
    assert mh.load_checkpoint(tmp_path / "saved").facts["step"] == int(first)


# -- patience ------------------------------------------------------------------------------------------

STUCK = "time.sleep(3600)"
KNOWS = """if hands.stopping:
            time.sleep(1.5)
            break"""


def test_a_loop_that_comes_to_no_next_step_is_ended(script, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(watcher, "LOOP_PATIENCE", 0.5)
    path = script(look=f"if whom and step == 7: {STUCK}")
    assert run_script(str(path), [str(tmp_path / "saved"), "none", str(FOREVER), "SIGTERM launcher"], workers=2) == 143
    assert "the run was asked to stop, but has not stopped within 0.5 s" in caplog.text


def test_a_loop_that_knows_of_the_stop_may_take_longer(script, tmp_path, monkeypatch):
    monkeypatch.setattr(watcher, "LOOP_PATIENCE", 0.5)
    words = [str(tmp_path / "saved"), "none", str(FOREVER), "SIGTERM launcher"]
    assert run_script(str(script(look=KNOWS)), words, workers=2) == 0


# -- the step that all agree on ------------------------------------------------------------------------


class Control:
    """The watcher's answers, by hand."""

    finishing = False

    def on_finish(self, freeze, stop_at):
        self.freeze, self.stop_at = freeze, stop_at

    def check(self):
        raise AssertionError("it waits for an answer that is not there")


@pytest.mark.parametrize(("looked", "others", "last"), [(5, 6, 7), (6, 6, 7), (6, 2, 7), (0, 9, 10)])
def test_all_ranks_stop_after_the_largest_step_that_one_can_still_stop_after(looked, others, last):
    controls = [Control(), Control()]
    ranks = [StopRequest(control, lockstep=True) for control in controls]
    for request, until in zip(ranks, (looked, others), strict=True):
        assert not any(request.holds_after(step) for step in range(until + 1))
    found = [control.freeze() for control in controls]
    assert found == [looked + 1, others + 1]
    for control in controls:
        control.stop_at(max(found))
    for request in ranks:
        assert [request.holds_after(step) for step in range(last - 2, last + 2)] == [False, False, True, True]


def test_a_rank_that_has_looked_after_this_step_does_not_stop_after_it():
    control = Control()
    request = StopRequest(control, lockstep=True)
    assert not request.holds_after(4)
    control.freeze()
    assert not request.holds_after(4)  # without waiting: all will stop later

"""The life cycle of a rank: the same calls in the same order, whether `mh.train` or the user's own loop drives it."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.core.gather import gather
from manyhands.core.strategy import OPTIONAL, Strategy, Traits
from manyhands.run.join import Hands
from manyhands.virtual.world import simulate

DATA = TensorDataset(torch.zeros(8, 1), torch.zeros(8, 1))
SILENT = {"traits", "kind", "with_rule", "programs", "check", "remarks", "replicas", "notes", "share_budget"}
"""Asked about the strategy, not part of the life of a rank."""
CALLS: list[tuple[int, str]] = []
"""Filled by `Spy`: module-level, since each rank has a copy of its strategy."""


class Spy(Strategy):
    """Records its calls. It trains nothing."""

    def __init__(self, **traits):
        self._traits = Traits(lockstep=True, on_worker_loss="ends", **traits)

    @property
    def traits(self):
        return self._traits

    def setup(self, w):
        w.flat.groups[0].weights.zero_()

    def step(self, w, batch):
        return 0.0

    def answer(self, w):
        return None if gather(w) is None else w.named()

    def peek(self, w):
        return w.named()


def watched(name):
    method = getattr(Spy, name)

    def call(self, w, *rest):
        CALLS.append((w.rank, name))
        return None if name == "serve" else method(self, w, *rest)

    return call


for name in (Strategy.__abstractmethods__ | OPTIONAL) - SILENT:
    setattr(Spy, name, watched(name))


@pytest.fixture(autouse=True)
def _no_calls():
    CALLS.clear()


def calls(rank=0):
    return [name for who, name in CALLS if who == rank]


def task():
    return mh.Task(
        lambda: nn.Linear(1, 1),
        DATA,
        nn.functional.mse_loss,
        batch_size=2,
        test=DATA,
        metric=lambda outputs, targets: outputs.mean().item(),
    )


def test_a_managed_run_begins_steps_and_ends():
    mh.train(task(), Spy(), cluster=mh.Cluster(workers=2), steps=3)
    assert calls(0) == calls(1) == ["setup", "step", "step", "step", "finish", "answer"]


def test_an_own_loop_is_the_same_life():
    def run(transport):
        with Hands(transport, nn.Linear(1, 1), strategy=Spy(), loss=nn.functional.mse_loss) as hands:
            for x, y in hands.share(DATA, 2, steps=3):
                hands.step(x, y)

    simulate(mh.Cluster(workers=2), run)
    assert calls(0) == calls(1) == ["setup", "step", "step", "step", "finish", "answer"]


def test_a_pause_that_saves_quiesces_and_resumes(tmp_path):
    mh.train(task(), Spy(), cluster=mh.Cluster(workers=2), steps=2, out=tmp_path, checkpoint_every=1)
    saved = ["quiesce", "declared_state", "answer", "resume"]
    assert calls(0) == calls(1) == ["setup", "step", *saved, "step", *saved, "finish", "answer"]


def test_an_evaluation_quiesces_unless_weights_can_be_read_at_any_time():
    for peekable, paused in {False: ["quiesce", "answer", "resume"], True: ["peek"]}.items():
        CALLS.clear()
        mh.train(task(), Spy(peekable=peekable), cluster=mh.Cluster(workers=2), steps=2, evaluate_every=1)
        assert calls(0) == ["setup", "step", *paused, "step", "finish", "answer"]
        assert ("peek" in calls(1)) is False, "the lead alone reads them"


def test_a_resumed_run_restores_after_its_setup(tmp_path):
    mh.train(task(), Spy(), cluster=mh.Cluster(workers=2), steps=1, out=tmp_path, checkpoint_every=1)
    CALLS.clear()
    mh.train(task(), Spy(), cluster=mh.Cluster(workers=2), steps=2, resume=tmp_path)
    assert calls(0) == calls(1) == ["setup", "declared_state", "restored", "step", "finish", "answer"]


def test_the_program_of_a_rank_is_that_of_its_role():
    mh.train(task(), Spy(servers=True), cluster=mh.Cluster(workers=1, servers=2), steps=1)
    assert [calls(rank) for rank in range(3)] == [["setup", "step", "finish", "answer"], ["serve"], ["serve"]]

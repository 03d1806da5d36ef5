"""Declared state: each scope is saved under its names, and loaded by the right workers, however many there are."""

import pytest
import torch
from torch import nn

from manyhands.core.declared_state import CustomState, NumberState, RuleState, VectorState, load_state, save_state
from manyhands.core.errors import PeerLost
from manyhands.core.flat import Span
from manyhands.core.rule import UpdateContext
from manyhands.core.strategy import Strategy, Traits
from manyhands.core.task import Task
from manyhands.core.vector_ops import UNCHARGED
from manyhands.core.weight_slice import WeightSlice
from manyhands.core.worker import Worker
from manyhands.rules import Momentum
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.faults import Die
from manyhands.virtual.world import simulate

TASK = Task(model=lambda: nn.Linear(3, 1), data=[(torch.zeros(3), torch.zeros(1))])
"""Four weights: weight 3, bias 1."""


class Declared(Strategy):
    """A strategy whose state is a vector, a number and a list under one scope."""

    def __init__(self, scope, on_worker_loss="ends"):
        self.scope = scope
        self.loss = on_worker_loss
        self.number = 0
        self.listed = None
        self.log = []

    @property
    def traits(self):
        return Traits(lockstep=True, on_worker_loss=self.loss)

    def setup(self, w):
        self.vector = torch.zeros(4)

    def fill(self, w):
        self.vector += w.rank + 1
        self.number = 10 * (w.rank + 1)
        self.listed = float(w.rank)

    def step(self, w, batch):
        return None

    def answer(self, w):
        return None

    def declared_state(self, w):
        return {
            "vector": VectorState(w.flat.slots, [self.vector], self.scope),
            "number": NumberState(self, "number", self.scope),
            "listed": CustomState(self.scope, lambda: {"": torch.tensor(self.listed)}, self.log.append),
        }

    def restored(self, w):
        self.log.append("restored")


def worker(t):
    return Worker(t, TASK, TASK.build(0), seed=0, steps=1, batch_size=1)


def saved_by(workers, scope, *faults, on_worker_loss="ends"):
    """What each of so many workers gets from saving."""

    def program(t):
        w, strategy = worker(t), Declared(scope, on_worker_loss)
        strategy.setup(w)
        strategy.fill(w)
        saved = save_state(w, strategy)
        return saved and {name: x.clone() for name, x in saved.items()}

    return simulate(Cluster(workers=workers, faults=faults), program).results


def loaded_by(workers, scope, saved):
    """Each worker's vector, number and list after loading."""

    def program(t):
        w, strategy = worker(t), Declared(scope)
        strategy.setup(w)
        load_state(w, strategy, saved)
        *lists, last = strategy.log
        assert last == "restored" and len(lists) <= 1
        listed = [{name: x.item() for name, x in one.items()} for one in lists[0]] if lists else None
        return strategy.vector.tolist(), strategy.number, listed

    return simulate(Cluster(workers=workers), program).results


PARTS = ["listed", "number", "vector/bias", "vector/weight"]
PER_WORKER = sorted(f"worker{rank}/{part}" for rank in range(3) for part in PARTS)


@pytest.mark.parametrize("scope", ["shared", "lead", "own", "inherited", "all"])
def test_names_in_a_checkpoint(scope):
    first, *others = saved_by(3, scope)
    assert sorted(first) == (PARTS if scope in ("shared", "lead") else PER_WORKER)
    assert others == [None, None], "only the lead has it"


def listed(*values):
    return [{"": float(value)} for value in values]


EXPECTED = {
    "shared": [(1, 10, listed(0))] * 4,
    "lead": [(1, 10, listed(0)), (0, 0, None), (0, 0, None), (0, 0, None)],
    "own": [(1, 10, listed(0)), (2, 20, listed(1)), (3, 30, listed(2)), (0, 0, [])],
    "inherited": [(1, 10, listed(0)), (2, 20, listed(1)), (3, 30, listed(2)), (0, 0, [])],
}


@pytest.mark.parametrize("scope", EXPECTED)
def test_four_workers_continue_from_three(scope):
    found = loaded_by(4, scope, saved_by(3, scope)[0])
    assert found == [([float(x)] * 4, number, values) for x, number, values in EXPECTED[scope]]


def test_two_workers_inherit_from_three():
    """Old rank k goes to new rank k mod 2: ranks 0 and 2 are added up."""
    found = loaded_by(2, "inherited", saved_by(3, "inherited")[0])
    assert found == [([4.0] * 4, 40, listed(0, 2)), ([2.0] * 4, 20, listed(1))]


def test_every_worker_gets_the_states_of_all():
    saved = saved_by(3, "all")[0]
    assert [values for *_, values in loaded_by(2, "all", saved)] == [listed(0, 1, 2)] * 2


@pytest.mark.parametrize("scope", ["own", "inherited"])
def test_a_lost_worker_is_left_out_or_ends_the_run(scope):
    first, _, _ = saved_by(3, scope, Die(1), on_worker_loss="continues")
    assert not any(name.startswith("worker1/") for name in first)
    found = loaded_by(3, scope, first)
    assert found[1] == ([0.0] * 4, 0, []), "a worker of its rank starts afresh"
    with pytest.raises(PeerLost):
        saved_by(3, scope, Die(1))


def test_divided_state_is_joined_and_cut_again():
    """Three workers hold slices of the momentum, cut anywhere; two workers with other slices continue from them."""
    gradient = torch.arange(4.0)

    class Divided(Declared):
        def setup(self, w):
            edges = {3: [0, 1, 2, 4], 2: [0, 3, 4]}[len(w.workers)]
            span = Span(0, edges[w.rank], edges[w.rank + 1])
            self.slices = [WeightSlice(UNCHARGED, span, w.flat.weights(span), w.flat.slots, Momentum(0.1))]

        def declared_state(self, w):
            return {"rule": RuleState(w.flat.slots, self.slices, "divided")}

    def momentum(t, saved=None):
        w, strategy = worker(t), Divided("divided")
        strategy.setup(w)
        (one,) = strategy.slices
        if saved is None:
            one.update(gradient[one.span.start : one.span.stop].clone(), UpdateContext(one.weights))
            return save_state(w, strategy)
        load_state(w, strategy, saved)
        return one.states[0]["m"].tolist()

    saved, *others = simulate(Cluster(workers=3), momentum).results
    assert sorted(saved) == ["rule/bias/:updates", "rule/bias/m", "rule/weight/:updates", "rule/weight/m"]
    assert others == [None, None]
    whole = torch.cat([saved["rule/weight/m"], saved["rule/bias/m"]])
    assert torch.equal(whole.abs(), gradient)
    found = simulate(Cluster(workers=2), lambda t: momentum(t, saved)).results
    assert found == [whole[:3].tolist(), whole[3:].tolist()]

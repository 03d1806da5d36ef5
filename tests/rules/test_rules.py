"""What only some rules promise; tests/contracts/test_rule_contract.py has what all do."""

import copy
import math
import pickle

import pytest
import torch

from manyhands.core.errors import ManyhandsError, Refused
from manyhands.core.rule import UpdateContext
from manyhands.rules import Adagrad, Adam, Momentum, Nesterov, RmsProp, Sgd, Torch, TotalMomentum, WeightDecay, chain
from manyhands.rules.chain import with_step


def apply(rule, w, *gs, **at):
    w = torch.tensor(w, dtype=torch.float64)
    state = rule.init(w)
    for t, g in enumerate(gs):
        w += rule(torch.tensor(g, dtype=torch.float64), UpdateContext(w, state, updates=t + 1, **at))
    return w.tolist()


def test_negative_momentum_by_hand():
    # m: 1, -0.5 + 1, -0.25 + 1
    assert apply(Momentum(0.5, -0.5), [0.0], [1.0]) == [-0.5]
    assert apply(Momentum(0.5, -0.5), [0.0], [1.0], [1.0]) == [-0.75]
    assert apply(Momentum(0.5, -0.5), [0.0], [1.0], [1.0], [1.0]) == [-1.125]


def test_adagrad_without_eps():
    assert apply(Adagrad(0.1), [1.0], [2.0], [2.0]) == pytest.approx([0.8292893218813453], abs=1e-15)
    # the first step is exactly lr long; gradients of 0, or with a square of 0, move nothing
    assert apply(Adagrad(0.5), [1.0] * 5, [3e-9, -7.0, 0.0, -0.0, 1e-200]) == [0.5, 1.5, 1.0, 1.0, 1.0]
    assert apply(Adagrad(0.5), [1.0], [0.0], [4.0], [0.0]) == [0.5]
    assert math.isnan(apply(Adagrad(0.5), [1.0], [math.nan])[0])


def test_adam_counts_updates_of_the_weights():
    rule, w, g = Adam(0.1), torch.zeros(1), torch.ones(1)
    first = rule(g.clone(), UpdateContext(w, rule.init(w), updates=1))
    late = rule(g.clone(), UpdateContext(w, rule.init(w), updates=100_000))
    assert first.item() == pytest.approx(-0.1)
    assert late.item() == pytest.approx(-0.1 * 0.1 / math.sqrt(0.001))


def test_schedules_are_functions_of_samples():
    def warm_up(samples):
        return min(samples, 100) / 100

    assert [apply(Sgd(warm_up), [0.0], [1.0], samples=n)[0] for n in (0, 25, 100, 1000)] == [0.0, -0.25, -1.0, -1.0]


class Double:
    """A link without state: twice the gradient."""

    elementwise = True
    needs = frozenset({"seen"})

    def init(self, weights):
        return {}

    def __call__(self, g, at):
        return g.mul_(2)


class Total:
    """A link that replaces its state instead of changing it."""

    elementwise = False
    needs = frozenset({"lag"})

    def init(self, weights):
        return {"m": torch.zeros_like(weights)}

    def __call__(self, g, at):
        at.state["m"] = at.state["m"] + g
        return at.state["m"].clone()


def test_chain_hands_gradients_on():
    assert apply(chain(Double(), Sgd(0.5)), [1.0], [3.0]) == [-2.0]
    # totals 1, 3; doubled 2, 6; heavy ball 2, 7; steps 1, 3.5
    rule = chain(Total(), Double(), Momentum(0.5, 0.5))
    assert apply(rule, [0.0], [1.0], [2.0]) == [-4.5]


def test_chain_keeps_states_apart():
    rule = chain(chain(Total(), Momentum(0.1)), *[Double() for _ in range(9)], Adam(0.1, beta1=0.5))
    w = torch.zeros(1, dtype=torch.float64)
    state = rule.init(w)
    assert set(state) == {"0.0.m", "0.1.m", "10.m", "10.v"}
    rule(torch.full_like(w, 5), UpdateContext(w, state))
    g = -0.5 * 2**9  # what the last link was given
    assert {key: x.item() for key, x in state.items()} == {
        "0.0.m": 5,
        "0.1.m": 5,
        "10.m": 0.5 * g,
        "10.v": pytest.approx(0.001 * g * g),
    }


def test_chain_is_as_cuttable_and_needy_as_its_links():
    assert chain(Double(), Sgd(0.1)).elementwise
    assert not chain(Double(), Total(), Sgd(0.1)).elementwise
    assert chain(Double(), Total(), Sgd(0.1)).needs == {"seen", "lag"}
    assert chain(Sgd(0.1)).needs == frozenset()


def test_only_the_last_of_a_chain_may_move_the_weights():
    w = torch.zeros(2)
    rule = chain(Double(), Torch("SGD", lr=0.5))
    assert rule(torch.ones(2), UpdateContext(w, rule.init(w))) is None
    assert w.tolist() == [-1.0, -1.0]
    wrong = chain(Torch("SGD", lr=0.5), Sgd(0.1))
    with pytest.raises(Refused, match=r"rule 0 .* only the last \(rule 1\) may"):
        wrong(torch.ones(2), UpdateContext(w, wrong.init(w)))


def test_another_step_leaves_the_links_that_correct_a_gradient():
    class Correct(Double):
        uphill = True

    sgd, adam, decay = Sgd(0.1), Adam(0.1), WeightDecay(0.1, 0.1)
    first, second = Correct(), Correct()
    assert with_step(chain(first, second, sgd, decay), adam).links == (first, second, adam)
    assert with_step(chain(sgd, decay), adam) is adam
    assert with_step(sgd, adam) is adam
    assert with_step(chain(first, sgd), Torch("SGD", lr=0.1)).needs == {"seen", "owner"}


@pytest.mark.parametrize(
    ("workers", "count", "added"), [(1, 1, 0.9), (2, 1, 0.4), (4, 1, 0.15), (10, 1, 0.0), (8, 8, 0.9), (8, 2, 0.15)]
)
def test_total_momentum_adds_what_asynchrony_does_not_bring(workers, count, added):
    assert TotalMomentum(0.1, 0.9)._added(UpdateContext(torch.zeros(1), workers=workers, count=count)) == pytest.approx(
        added
    )


def test_many_workers_bring_more_than_wanted():
    assert TotalMomentum(0.1, 0.5)._added(UpdateContext(torch.zeros(1), workers=100)) == pytest.approx(-0.49)
    assert TotalMomentum(0.1, 0.5, lowest=-0.2)._added(UpdateContext(torch.zeros(1), workers=100)) == -0.2


def test_torch_rule_keeps_one_optimizer_per_weights():
    w = torch.zeros(4)
    rule = Torch("SGD", lr=1.0, momentum=0.5)
    rule.init(w[:2])
    rule.init(w[2:])
    before = w._version
    rule(torch.ones(2), UpdateContext(w[:2]))
    rule(torch.ones(2), UpdateContext(w[:2]))  # a new view of the same memory
    rule(torch.ones(2), UpdateContext(w[2:]))
    assert w.tolist() == [-2.5, -2.5, -1.0, -1.0]
    assert w._version == before + 3
    rule.init(w[2:])  # forgets
    rule(torch.ones(2), UpdateContext(w[2:]))
    assert w.tolist() == [-2.5, -2.5, -2.0, -2.0]
    with pytest.raises(ManyhandsError, match="not initialised"):
        rule(torch.ones(4), UpdateContext(w))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda rule: pickle.loads(pickle.dumps(rule))])
def test_copies_of_a_torch_rule_start_fresh(copied):
    w, v = torch.zeros(1), torch.zeros(1)
    rule = Torch(torch.optim.SGD, lr=1.0, momentum=0.5)
    rule.init(w)
    rule(torch.ones(1), UpdateContext(w))
    other = copied(rule)
    with pytest.raises(ManyhandsError, match="not initialised"):
        other(torch.ones(1), UpdateContext(w))
    other.init(v)
    other(torch.ones(1), UpdateContext(v))
    rule(torch.ones(1), UpdateContext(w))
    assert (w.item(), v.item()) == (-2.5, -1.0)


def test_which_torch_optimizers_may_be_cut():
    class Adam(torch.optim.Adam):
        """Not torch's own, so it is unknown whether it is elementwise."""

    assert {
        name
        for name in dir(torch.optim)
        if name[0].isupper() and name not in ("LBFGS", "SparseAdam", "Optimizer")
        if Torch(name, lr=0.1).elementwise
    } == {
        "SGD",
        "Adam",
        "AdamW",
        "Adagrad",
        "RMSprop",
        "Adadelta",
        "Adamax",
        "NAdam",
        "RAdam",
        "Rprop",
        "ASGD",
    }
    assert not Torch(Adam, lr=0.1).elementwise


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sgd(-1), "lr is -1, but must be > 0"),
        (lambda: Sgd(0.1, weight_decay=-2), "weight_decay is -2, but must be >= 0"),
        (lambda: Momentum(0), "lr is 0, but must be > 0"),
        (lambda: Momentum(0.1, 1), "momentum is 1, but must be > -1 and < 1"),
        (lambda: Momentum(0.1, -1), "momentum is -1, but must be > -1 and < 1"),
        (lambda: Momentum(0.1, weight_decay=-2), "weight_decay is -2, but must be >= 0"),
        (lambda: Nesterov(math.nan), "lr is nan, but must be > 0"),
        (lambda: Adagrad(-1), "lr is -1, but must be > 0"),
        (lambda: Adagrad(0.1, eps=-1), "eps is -1, but must be >= 0"),
        (lambda: RmsProp(-1), "lr is -1, but must be > 0"),
        (lambda: RmsProp(0.1, alpha=1), "alpha is 1, but must be >= 0 and < 1"),
        (lambda: RmsProp(0.1, eps=0), "eps is 0, but must be > 0"),
        (lambda: RmsProp(0.1, weight_decay=-2), "weight_decay is -2, but must be >= 0"),
        (lambda: Adam(-1), "lr is -1, but must be > 0"),
        (lambda: Adam(0.1, beta1=1), "beta1 is 1, but must be >= 0 and < 1"),
        (lambda: Adam(0.1, beta2=-1), "beta2 is -1, but must be >= 0 and < 1"),
        (lambda: Adam(0.1, eps=0), "eps is 0, but must be > 0"),
        (lambda: Adam(0.1, weight_decay=-2), "weight_decay is -2, but must be >= 0"),
        (lambda: TotalMomentum(0), "lr is 0, but must be > 0"),
        (lambda: TotalMomentum(0.1, 1), "total is 1, but must be >= 0 and < 1"),
        (lambda: TotalMomentum(0.1, lowest=-1), "lowest is -1, but must be > -1 and < 1"),
        (lambda: WeightDecay(-1, 0.1), "decay is -1, but must be >= 0"),
        (lambda: WeightDecay(0.1, 0), "lr is 0, but must be > 0"),
        (lambda: chain(), "the number of rules in a chain is 0, but must be >= 1"),
        (lambda: Torch("SGD", lr=-1), "lr is -1, but must be > 0"),
        (lambda: Torch("SGB", lr=0.1), "the optimizer is SGB, but must be a class of torch.optim"),
        (lambda: Torch("LBFGS", lr=0.1), "the optimizer is LBFGS, but must be one that needs no closure"),
        (lambda: Torch(torch.optim.SparseAdam, lr=0.1), "the optimizer is SparseAdam, but must be one for dense"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(Refused) as refused:
        make()
    assert str(refused.value).startswith(message)


def test_torch_rule_refuses_a_misspelt_knob():
    with pytest.raises(TypeError, match="momentun"):
        Torch("SGD", lr=0.1, momentun=0.9)

"""What a worker trains: the whole model, or what `lay_out` chose before the flat model was used."""

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.core.task import Task
from manyhands.core.worker import Worker
from manyhands.virtual.world import simulate


def model():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


TASK = Task(model=model, data=[(torch.zeros(2), torch.zeros(1))])


def names(program):
    """The parameters in the flat model of one worker, after a program has prepared it."""

    def run(transport):
        w = Worker(transport, TASK, TASK.build(0), seed=0, steps=1, batch_size=1)
        program(w)
        return [slot.name for slot in w.flat.slots]

    (found,) = simulate(mh.Cluster(workers=1), run).results
    return found


def test_the_whole_model_is_trained_by_default():
    assert names(lambda w: None) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_module_without_some_parameters_can_be_chosen():
    assert names(lambda w: w.lay_out(w.model[1])) == ["1.weight", "1.bias"]
    assert names(lambda w: w.lay_out(exclude={"0.weight"})) == ["0.bias", "1.weight", "1.bias"]
    assert names(lambda w: w.lay_out(w.model[0], {"0.bias"})) == ["0.weight"]


@pytest.mark.parametrize("before", [lambda w: w.flat, lambda w: w.lay_out()], ids=["use", "choice"])
def test_a_choice_that_comes_too_late_is_refused(before):
    with pytest.raises(mh.Refused, match="lay_out was called after flat had been used"):
        names(lambda w: (before(w), w.lay_out(w.model[1])))


@pytest.mark.parametrize("layer", [lambda: nn.LazyLinear(3), lambda: nn.LazyBatchNorm1d(affine=False)])
def test_a_layer_without_a_shape_is_refused_wherever_the_model_comes_from(layer):
    lazy = Task(model=lambda: nn.Sequential(layer(), nn.Linear(3, 1)), data=TASK.data * 4)
    refusal = "^0[.](weight|running_mean) has no shape yet, but must have one: run one forward pass where the model is"
    with pytest.raises(mh.Refused, match=refusal):
        mh.train(lazy, mh.ssp(), steps=1)
    with pytest.raises(mh.Refused, match=refusal):
        simulate(mh.Cluster(workers=1), lambda t: Worker(t, lazy, lazy.model(), seed=0, steps=1, batch_size=1))


def test_a_lazy_layer_trains_after_a_forward_pass():
    def ready():
        made = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
        made(torch.zeros(1, 2))
        return made

    lazy = Task(model=ready, data=TASK.data * 2, loss=nn.functional.mse_loss, batch_size=1)
    result = mh.train(lazy, mh.bsp(), cluster=mh.Cluster(workers=2), steps=1)
    assert result.weights["0.weight"].shape == (3, 2)

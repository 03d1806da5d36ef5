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

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


# --- the time of the passes


def firing(task, samples=4):
    """The virtual time of the end of the gradient, and when each parameter's bucket was fired."""
    seconds = {}

    def run(transport):
        w = Worker(transport, task, task.build(0), seed=0, steps=1, batch_size=samples)
        slots = {slot.span: slot.name for slot in w.flat.slots}
        w.gradient(
            torch.utils.data.default_collate([task.data[0]] * samples),
            lambda span: seconds.update({slots[span]: w.transport.now()}),
        )
        return transport.now()

    return *simulate(mh.Cluster(workers=1), run).results, seconds


def test_a_bucket_fires_when_its_part_of_the_backward_pass_is_over(monkeypatch):
    """Nearly all bytes are ready before most of the work: the linear layer is last in the model and cheap."""
    monkeypatch.setattr("manyhands.core.flat.Flat.buckets.__defaults__", (1,))
    data = [(torch.zeros(1, 8, 8), torch.zeros(10))]

    def make():
        layers = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Linear(512, 10)
        return nn.Sequential(*layers)

    whole, seconds = firing(Task(make, data, nn.functional.mse_loss))
    first, second, linear = 2 * 8 * 9 * 64, 2 * 8 * 8 * 9 * 64, 2 * 512 * 10
    reference = 4 / 50e9
    forward = first + second + linear
    assert list(seconds) == ["3.bias", "3.weight", "1.bias", "1.weight", "0.bias", "0.weight"]
    assert seconds["3.weight"] == pytest.approx((forward + 2 * linear) * reference)
    assert seconds["1.weight"] == pytest.approx((forward + 2 * linear + 2 * second) * reference)
    assert whole == seconds["0.weight"] == pytest.approx((forward + 2 * linear + 2 * second + first) * reference)


def test_a_real_worker_counts_nothing():
    class Real:
        rank, size, pending_ranks, roles, is_simulated = 0, 1, (), ["worker"], False

        def now(self):
            return 0.0

        waited = sending = now

    w = Worker(Real(), TASK, TASK.build(0), seed=0, steps=1, batch_size=1)
    assert w.work is None and w.share_of(w.model).total == 0
    w.charge_passes(1)

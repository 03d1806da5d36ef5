"""Work is counted exactly, module by module and pass by pass, and without any trace in the model."""

import pickle
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear, mse_loss, scaled_dot_product_attention
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import manyhands as mh
from manyhands.core.errors import Refused
from manyhands.core.work import ModelWork, Work, work_of
from manyhands.tasks import load


def task_of(model, *fields, loss=lambda outputs, _: outputs.sum(), **settings):
    """A task whose samples have these fields and a target."""
    count = len(fields[0])
    return mh.Task(lambda: model, TensorDataset(*fields, torch.zeros(count)), loss, **settings)


def counted(model, *fields, **settings):
    work = work_of(task_of(model, *fields, **settings).build(0))
    assert work.why_estimated == ""
    return work


def parts(work, name):
    one = work.modules[name]
    return one.forward, one.to_input, one.to_weights


class Block(nn.Module):
    """Attention with one projection for queries, keys and values, as in a transformer."""

    def __init__(self, width):
        super().__init__()
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.project(x).unsqueeze(1).chunk(3, -1)
        return self.out(scaled_dot_product_attention(q, k, v).squeeze(1))


class Tied(nn.Module):
    """The embedding is also the output layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)

    def forward(self, tokens):
        return linear(self.embedding(tokens), self.embedding.weight)


# --- counting


def test_a_chain_of_linear_layers():
    work = counted(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(5, 4))
    assert parts(work, "0") == (2 * 4 * 8, 0, 2 * 4 * 8), "the data needs no gradient"
    assert parts(work, "2") == (2 * 8 * 3,) * 3
    assert set(work.modules) == {"0", "2"}
    assert work.total == 2 * 2 * 4 * 8 + 3 * 2 * 8 * 3


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_with_groups(groups):
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=groups), nn.Conv2d(8, 6, 3, stride=2, padding=1, groups=groups))
    work = counted(model, torch.zeros(2, 4, 9, 9))
    first, second = (2 * (8 * 4 // groups * 9) * 7 * 7, 2 * (6 * 8 // groups * 9) * 4 * 4)
    assert parts(work, "0") == (first, 0, first)
    assert parts(work, "1") == (second, second, second)


def test_a_transposed_convolution():
    work = counted(nn.Sequential(nn.Linear(6, 6), nn.ConvTranspose2d(3, 5, 4, stride=2)), torch.zeros(2, 3, 6, 6))
    assert parts(work, "1") == (2 * (3 * 5 * 4 * 4) * 6 * 6,) * 3


def test_frozen_layers_have_no_backward_pass_below_the_first_trained_one():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for p in [*model[0].parameters(), *model[2].parameters()]:
        p.requires_grad_(False)
    work = counted(model, torch.zeros(2, 4))
    assert [parts(work, str(n)) for n in range(4)] == [(32, 0, 0), (32, 0, 32), (32, 32, 0), (32, 32, 32)]


def test_a_module_that_is_called_twice_counts_twice():
    layer = nn.Linear(4, 4)
    work = counted(nn.Sequential(layer, nn.Tanh(), layer), torch.zeros(2, 4))
    assert parts(work, "0") == (64, 32, 64) and len(work.modules) == 1


def test_attention_is_two_products_without_weights():
    work = counted(nn.Sequential(nn.Linear(8, 8), Block(8)), torch.zeros(2, 5, 8))
    product = 2 * 5 * 5 * 8
    assert parts(work, "1") == (2 * product, 4 * product, 0)
    assert parts(work, "1.project") == (2 * 5 * 8 * 24,) * 3
    assert parts(work, "1.out") == (2 * 5 * 8 * 8,) * 3


def test_torchs_own_attention_module_counts_the_layer_that_it_does_not_call():
    work = counted(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.zeros(2, 5, 8))
    assert parts(work, "self_attn")[0] == 2 * 5 * 8 * 24 + 2 * (2 * 5 * 5 * 8)
    assert parts(work, "self_attn.out_proj") == (2 * 5 * 8 * 8,) * 3


@pytest.mark.parametrize(("kind", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_a_recurrent_layer_counts_every_time_step(kind, gates):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.memory = kind(6, 5, batch_first=True)

        def forward(self, x):
            return self.memory(x)[0]

    work = counted(Reader(), torch.zeros(2, 4, 6))
    by_input, by_state = 2 * 4 * gates * 6 * 5, 2 * 4 * gates * 5 * 5
    first = 2 * gates * 5 * 5  # the first state is zero, and needs no gradient
    assert parts(work, "memory") == (by_input + by_state, by_state - first, by_input + by_state)


def test_tied_weights_belong_to_the_first_of_their_modules():
    work = counted(Tied(), torch.zeros(2, 3, dtype=torch.long))
    assert parts(work, "embedding") == (2 * 3 * 5 * 7,) * 3 and len(work.modules) == 1


def test_a_model_that_returns_its_own_loss_gets_all_fields():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x, y):
            return mse_loss(self.layer(x)[:, 0], y)

    assert parts(counted(Loss(), torch.zeros(2, 4), loss=None), "layer") == (8, 0, 8)


def test_torchs_counter_agrees_where_it_is_right():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 9, 10))
    x = torch.zeros(4, 3, 8, 8)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert counted(model, x).total == counter.get_total_flops() / 4


# --- estimates


def test_modules_with_parameters_and_no_product_are_estimated():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 3))
    work = counted(model, torch.zeros(2, 3, dtype=torch.long))
    assert parts(work, "0") == (2 * 40,) * 3
    assert parts(work, "2") == (2 * 24,) * 3
    assert parts(work, "3") == (2 * 36,) * 3


def refuses_numbers(model, x, y):
    raise AssertionError("not called")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda model: task_of(model, torch.zeros(2, 5)), "failed: RuntimeError: mat1 and mat2 shapes cannot"),
        (lambda model: mh.Task(lambda: model, [None] * 3, mse_loss), "failed: TypeError"),
        (lambda model: mh.Task(lambda: model, [None], gradient=refuses_numbers), "computes its gradient without"),
    ],
)
def test_what_cannot_be_counted_is_estimated_and_says_why(make, why):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    work = work_of(make(model).build(0))
    assert why in work.why_estimated
    assert [parts(work, name) for name in "01"] == [(2 * 40,) * 3, (2 * 27,) * 3]
    assert work.total == 6 * 67 and work.share().forward == 1 / 3


def test_a_model_that_no_task_has_built_is_estimated():
    assert "not built by a task" in work_of(nn.Linear(2, 2)).why_estimated


def test_the_total_of_the_task_is_in_force_and_layers_have_their_shares():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    work = counted(model, torch.zeros(2, 4), work=1000.0)
    assert work.total == 1000.0
    assert work.share(["0"]) == Work(64 / 272, 0, 64 / 272) and work.share().total == pytest.approx(1)
    with pytest.raises(Refused, match="work is 0, but must be > 0, or None: counted"):
        task_of(model, torch.zeros(2, 4), work=0)


def test_the_backward_pass_is_divided_over_parameters():
    work = ModelWork({"a": Work(1, 3, 3), "b.c": Work(1, 1, 1), "none": Work(5, 5, 5)})
    shares = work.backward_shares({"a.weight": 9, "a.bias": 1, "b.c.weight": 2})
    assert shares == pytest.approx({"a.weight": 0.675, "a.bias": 0.075, "b.c.weight": 0.25})
    assert ModelWork({}).backward_shares({"x": 3, "y": 1}) == {"x": 0.75, "y": 0.25}


# --- side effects


def test_counting_leaves_no_trace():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    model.calls = []
    model.register_forward_hook(lambda module, *_: module.calls.append(1))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    task = task_of(model, torch.randn(6, 4), loss=cross_entropy)
    model = task.build(0)
    torch.manual_seed(3)
    state = torch.default_generator.get_state()
    with torch.no_grad():
        work_of(model)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.default_generator.get_state(), state)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert model.calls == [] and all(p.grad is None for p in model.parameters())


def test_a_task_counts_once_and_its_copies_count_again():
    calls = []

    class Watched(nn.Linear):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    data = TensorDataset(torch.zeros(3, 4), torch.zeros(3, 2))
    task = mh.Task(lambda: Watched(4, 2), data, mse_loss)
    assert work_of(task.build(0)) is work_of(task.build(1))
    mh.train(task, mh.bsp(), cluster=mh.Cluster(workers=2), steps=1, batch_size=1)
    assert calls == [2, 1, 1], "two samples to count, then one step of two workers"
    assert work_of(replace(task, work=7.0).build(0)).total == 7.0


def test_copies_and_files_of_a_model_have_no_data():
    task = task_of(nn.Linear(4, 2), torch.zeros(100_000, 4))
    model = task.build(0)
    assert len(pickle.dumps(model)) < 10_000
    assert "not built by a task" in work_of(deepcopy(model)).why_estimated
    work_of(model)
    assert pickle.loads(pickle.dumps(load("digits"))).counted_work(load("digits").build(0)).total == 184_064


def test_counting_does_not_import_the_compiler():
    code = (
        "import sys\nfrom manyhands.tasks import load\nfrom manyhands.core.work import work_of\n"
        "print(work_of(load('digits').build(0)).total, 'torch._dynamo' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "184064.0 False\n"

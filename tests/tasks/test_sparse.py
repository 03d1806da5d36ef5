"""Sparse logistic regression: its samples, and that the model goes down by itself as autograd and SGD would."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from manyhands.core.kernels import compiled
from manyhands.strategies.shared_memory.descent import Descends
from manyhands.tasks import load, sparse_kernels
from manyhands.tasks.sparse import AGREES, FEATURES, PRESENT, Logistic, samples

KERNELS = ("manyhands_dots", "manyhands_scatter")


@pytest.fixture(params=["the kernels", "torch"])
def with_or_without_kernels(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(sparse_kernels, "compiled", lambda *_: None)
    elif any(compiled(name, None) is None for name in KERNELS):
        pytest.skip("the kernels are not compiled here")


BOTH = pytest.mark.usefixtures("with_or_without_kernels")


def mini_batch(rows=7, columns=5, features=12, dtype=torch.float32):
    """Features come twice, in a row and in several rows; some never do."""
    random = torch.Generator().manual_seed(rows)
    v = torch.randint(1, features - 1, (rows, columns), generator=random)
    x = torch.randn(rows, columns, generator=random).to(dtype)
    return v, x, (torch.arange(rows) % 2).to(dtype)


def trained(features=12, dtype=torch.float32):
    """A model whose weights are not all 0."""
    model = Logistic(features).to(dtype)
    with torch.no_grad():
        model.table.weight.normal_(generator=torch.Generator().manual_seed(3))
    return model


# --- samples


def test_samples_are_the_same_each_time_and_differ_by_seed():
    one, same, other = (samples(20, seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, one, same)) and not torch.equal(one[0], other[0])
    v, x, y = one
    assert v.shape == x.shape == (20, PRESENT) and (v.dtype, x.dtype, y.dtype) == (torch.int64, *[torch.float32] * 2)


def test_features_speak_for_the_label_and_few_are_frequent():
    v, _, y = samples(2000)
    assert v.min() >= 0 and v.max() < FEATURES
    assert 0.45 < y.mean() < 0.55
    assert abs(((v % 2) == y.unsqueeze(1)).float().mean() - AGREES) < 0.01
    assert abs((v < FEATURES / 4).float().mean() - 0.5) < 0.01, "half of those present are of the first quarter"


def test_the_task_keeps_samples_for_the_test():
    task = load("sparse")
    assert (len(task.data), len(task.test), task.work) == (16_384, 2_048, 6 * PRESENT)
    assert not torch.equal(task.data.tensors[0][:2048], task.test.tensors[0])
    assert task.metric(torch.tensor([-1.0, 2.0, 3.0, -4.0]), torch.tensor([0.0, 1.0, 0.0, 0.0])) == 0.75


# --- kernels


@BOTH
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("columns", [1, 5, 64])
def test_dots_are_sums_over_what_is_present(rows, columns):
    v, x, _ = mini_batch(rows, columns)
    w = torch.randn(12, generator=torch.Generator().manual_seed(0))
    expected = (w.double()[v] * x.double()).sum(1).float()
    torch.testing.assert_close(sparse_kernels.dots(w, v, x), expected, rtol=1e-5, atol=1e-5)


def test_what_is_scattered_has_the_same_bits_with_and_without_kernels(monkeypatch):
    (v, x, _), r = mini_batch(50), torch.linspace(-1, 1, 50)
    one, two = (torch.linspace(-3, 2, 12) for _ in range(2))
    sparse_kernels.scatter(one, v, x, r, -0.3)
    monkeypatch.setattr(sparse_kernels, "compiled", lambda *_: None)
    sparse_kernels.scatter(two, v, x, r, -0.3)
    assert torch.equal(one, two) and not torch.equal(one, torch.linspace(-3, 2, 12))


@BOTH
def test_scattering_by_hand():
    w = torch.tensor([1.0, 2.0, 3.0, 4.0])
    v, x = torch.tensor([[0, 2], [2, 2]]), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    sparse_kernels.scatter(w, v, x, torch.tensor([1.0, 10.0]), 0.5)
    assert w.tolist() == [1.5, 2.0, 3 + 1 + 20 + 40, 4.0]


@BOTH
@pytest.mark.parametrize("wrong", [12, -1, 2**40])
def test_a_feature_that_does_not_exist_is_an_error_and_nothing_is_written(wrong):
    model, (v, x, y) = trained(), mini_batch()
    before = model.table.weight.detach().clone()
    v[3, 2] = wrong
    with pytest.raises((RuntimeError, IndexError)):
        model.descend(v, x, y)
    assert torch.equal(model.table.weight, before)


# --- going down


@BOTH
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=["float32", "float64"]
)
def test_going_down_is_a_step_of_sgd(dtype, tolerance):
    model, twin, batch = trained(dtype=dtype), trained(dtype=dtype), mini_batch(dtype=dtype)
    step = model.descend(*batch)
    assert torch.equal(model.table.weight, twin.table.weight), "nothing is written yet"
    step.write(-0.5)
    loss = binary_cross_entropy_with_logits(twin(*batch[:-1]), batch[-1])
    loss.backward()
    assert twin.table.weight.grad.is_sparse
    torch.optim.SGD(twin.parameters(), lr=0.5).step()
    torch.testing.assert_close(step.loss, loss.detach(), rtol=0, atol=tolerance)
    torch.testing.assert_close(model.table.weight, twin.table.weight, rtol=0, atol=tolerance)
    assert step.touches == batch[0].numel()


@BOTH
def test_views_that_no_kernel_could_walk_are_as_good():
    model, twin, (v, x, y) = trained(), trained(), mini_batch(14, 10)
    model.descend(v[::2, ::2], x[::2, ::2], y[::2]).write(-0.5)
    twin.descend(v[::2, ::2].contiguous(), x[::2, ::2].contiguous(), y[::2]).write(-0.5)
    torch.testing.assert_close(model.table.weight, twin.table.weight, rtol=0, atol=1e-6)


@BOTH
@pytest.mark.parametrize("other", [5.0, torch.nan])
def test_nothing_but_the_support_is_read_or_written(other):
    """Whatever the other weights are, they stay; NaN would be in the loss, had one been read."""
    model, (v, x, y) = trained(), mini_batch()
    w = model.table.weight.detach().view(-1)
    outside = torch.ones(12, dtype=torch.bool).index_fill(0, v.flatten(), False)
    w[outside] = other
    before = w.clone()
    step = model.descend(v, x, y)
    step.write(-0.5)
    assert step.loss.isfinite() and w[~outside].isfinite().all() and outside.any()
    assert torch.equal(w[outside].view(torch.int32), before[outside].view(torch.int32))
    assert (w != before)[~outside].all(), "and all of it is"


def test_it_goes_down_no_other_loss_and_not_if_it_is_frozen():
    model = Logistic(4)
    assert isinstance(model, Descends) and model.can_descend(binary_cross_entropy_with_logits)
    assert not model.can_descend(torch.nn.functional.mse_loss) and not model.can_descend(None)
    model.requires_grad_(False)
    assert not model.can_descend(binary_cross_entropy_with_logits)

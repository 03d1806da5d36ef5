"""Flat: gradients of any model are stored in their slots; models that cannot be flat are refused."""

import copy
import re
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from manyhands.core.errors import ManyhandsError, Refused
from manyhands.core.flat import Flat, Span
from manyhands.core.released import release


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def flat_of(model, groups=()):
    return Flat(dict(model.named_parameters()), groups)


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data(rows=5, columns=3):
    return torch.randn(rows, columns, dtype=torch.float64)


def loss_of(model, x):
    return model(x).square().sum()


def gradients(flat):
    return {slot.name: flat.gradient_of(slot).clone() for slot in flat.slots}


def expected(model, *losses):
    """The gradients torch itself gives, summed over some backward passes; None where there is none."""
    twin = copy.deepcopy(model)
    for loss in losses:
        loss(twin).backward()
    return {name: p.grad for name, p in twin.named_parameters() if p.requires_grad}


def step(flat, model, *losses):
    """One step of as many backward passes."""
    flat.open()
    for loss in losses:
        flat.begin_backward()
        loss(model).backward()
    flat.close()


def assert_same(flat, reference):
    found = gradients(flat)
    assert list(found) == [slot.name for slot in flat.slots]
    assert found.keys() == reference.keys()
    for name, g in reference.items():
        torch.testing.assert_close(found[name], torch.zeros_like(found[name]) if g is None else g, rtol=1e-12, atol=0)


def untouched_names(flat):
    return {slot.name for slot in flat.slots if slot.param_id in flat.untouched()}


# -- gradients ----------------------------------------------------------------------------------------


def test_hooks_fill_the_flat_gradient_and_drop_the_parameters_own():
    model, x = mlp(), data()
    reference = expected(model, lambda m: loss_of(m, x))
    flat = flat_of(model)
    for _ in range(2):
        step(flat, model, lambda m: loss_of(m, x))
        assert_same(flat, reference)
        assert all(p.grad is None for p in model.parameters())
        assert flat.untouched() == frozenset()
    (group,) = flat.groups
    assert torch.equal(group.grad, torch.cat([g.flatten() for g in reference.values()]))
    assert group.touch_counts.tolist() == [1.0] * 4
    assert torch.equal(group.outgoing, torch.cat([group.grad, group.touch_counts]))


def test_a_second_backward_pass_in_one_step_adds():
    model, x, y, z = mlp(), data(), data(), data()
    losses = [lambda m: loss_of(m, x), lambda m: loss_of(m, y), lambda m: 3 * loss_of(m, z)]
    reference = expected(model, *losses)
    flat = flat_of(model)
    step(flat, model, *losses)
    assert_same(flat, reference)
    step(flat, model, losses[0])
    assert_same(flat, expected_of_fresh(model, losses[0]))


def expected_of_fresh(model, loss):
    """Like `expected`, for a model that is flat already: its hooks must not be copied."""
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    return expected(twin, loss)


class Tied(nn.Module):
    """An encoder and a decoder that share one matrix."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 4, bias=False)
        self.decoder = nn.Linear(4, 3)
        self.decoder.weight = nn.Parameter(torch.randn(3, 4))
        self.again = nn.Linear(3, 4, bias=False)
        self.again.weight = self.encoder.weight

    def forward(self, x):
        return self.again(self.decoder(torch.tanh(self.encoder(x))))


def test_a_tied_parameter_has_one_slot_and_gets_the_sum():
    model, x = Tied().double(), data()
    reference = expected(model, lambda m: loss_of(m, x))
    flat = flat_of(model)
    assert [slot.name for slot in flat.slots] == ["encoder.weight", "decoder.weight", "decoder.bias"]
    step(flat, model, lambda m: loss_of(m, x))
    assert_same(flat, reference)
    flat.groups[0].weights.zero_()
    assert model.again.weight is model.encoder.weight
    assert not model.again.weight.any()


def test_a_frozen_parameter_is_left_out():
    model, x = mlp(), data()
    model[0].weight.requires_grad_(False)
    before, memory = model[0].weight.clone(), model[0].weight.data_ptr()
    reference = expected(model, lambda m: loss_of(m, x))
    flat = flat_of(model)
    assert [slot.name for slot in flat.slots] == ["0.bias", "2.weight", "2.bias"]
    assert flat.numel == 4 + 8 + 2
    step(flat, model, lambda m: loss_of(m, x))
    assert_same(flat, reference)
    flat.groups[0].weights.zero_()
    assert model[0].weight.data_ptr() == memory
    assert torch.equal(model[0].weight, before)
    assert "0.weight" not in flat.named()


def test_a_model_of_frozen_parameters_has_nothing_flat():
    flat = flat_of(mlp().requires_grad_(False))
    flat.open()
    flat.close()
    assert (flat.groups, flat.slots, flat.numel, flat.buckets(), flat.untouched()) == ([], [], 0, [], frozenset())


class Branches(nn.Module):
    """Uses the branch that it is given."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(3, 2)
        self.right = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x, branch="right"):
        return self.scale * getattr(self, branch)(x)


def test_an_unused_parameter_is_zero_and_untouched():
    model, x = Branches().double(), data()
    flat = flat_of(model)
    assert [slot.name for slot in flat.slots] == ["scale", "left.weight", "left.bias", "right.weight", "right.bias"]
    flat.groups[0].outgoing.fill_(7.0)
    for used, unused in [("right", "left"), ("left", "right"), ("right", "left")]:
        step(flat, model, lambda m, used=used: m(x, used).sum())
        assert untouched_names(flat) == {f"{unused}.weight", f"{unused}.bias"}
        found = gradients(flat)
        assert not found[f"{unused}.weight"].any()
        assert not found[f"{unused}.bias"].any()
        assert torch.equal(found[f"{used}.bias"], torch.full((2,), 10.0, dtype=torch.float64))
    assert flat.groups[0].touch_counts.tolist() == [1.0, 0.0, 0.0, 1.0, 1.0]


def test_a_step_without_any_backward_pass_touches_nothing():
    model = mlp()
    flat = flat_of(model)
    flat.groups[0].outgoing.fill_(7.0)
    flat.open()
    flat.close()
    assert not flat.groups[0].outgoing.any()
    assert flat.untouched() == frozenset(range(4))


def test_a_gradient_of_zeros_is_touched():
    model, x = Branches().double(), data()
    flat = flat_of(model)
    step(flat, model, lambda m: (m(x, "left") * 0 + m(x, "right")).sum())
    assert flat.untouched() == frozenset()
    assert not gradients(flat)["left.weight"].any()


def test_summed_touch_counts_are_the_number_of_workers_that_touched_a_parameter():
    models, x = [Branches().double() for _ in range(3)], data()
    flats = [flat_of(model) for model in models]
    for model, flat, branch in zip(models, flats, ["left", "left", "left"], strict=True):
        step(flat, model, lambda m, branch=branch: m(x, branch).sum())
    flats[0].groups[0].outgoing += flats[1].groups[0].outgoing
    assert flats[0].groups[0].touch_counts.tolist() == [2.0, 2.0, 2.0, 0.0, 0.0]
    assert untouched_names(flats[0]) == {"right.weight", "right.bias"}


class TwoTypes(nn.Module):
    """Single inside, double outside."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4).double()
        self.inner = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2).double()

    def forward(self, x):
        return self.last(self.inner(self.first(x).float()).double())


def test_every_dtype_has_a_part_of_its_own():
    model, x = TwoTypes(), data()
    reference = expected(model, lambda m: loss_of(m, x))
    flat = flat_of(model)
    assert [group.weights.dtype for group in flat.groups] == [torch.float64, torch.float32]
    assert [[slot.name for slot in group.slots] for group in flat.groups] == [
        ["first.weight", "first.bias", "last.weight", "last.bias"],
        ["inner.weight", "inner.bias"],
    ]
    assert [slot.param_id for slot in flat.slots] == [0, 1, 2, 3, 4, 5]
    assert flat.slots == [slot for group in flat.groups for slot in group.slots]
    step(flat, model, lambda m: loss_of(m, x))
    assert_same(flat, reference)
    step(flat, model, lambda m: m.last(m.first(x)).sum())
    assert untouched_names(flat) == {"inner.weight", "inner.bias"}
    assert flat.groups[1].untouched() == frozenset({4, 5})
    assert flat.groups[0].untouched() == frozenset()


def test_parameters_of_a_group_are_contiguous_and_the_rest_is_a_group_too():
    model, x = mlp(), data()
    reference = expected(model, lambda m: loss_of(m, x))
    flat = flat_of(model, groups=[["0.bias", "2.bias"], ["2.weight"]])
    assert [[slot.name for slot in group.slots] for group in flat.groups] == [
        ["0.weight"],
        ["0.bias", "2.bias"],
        ["2.weight"],
    ]
    assert [slot.span for slot in flat.slots] == [Span(0, 0, 12), Span(1, 0, 4), Span(1, 4, 6), Span(2, 0, 8)]
    step(flat, model, lambda m: loss_of(m, x))
    assert {name: g.tolist() for name, g in gradients(flat).items()} == {n: g.tolist() for n, g in reference.items()}


@pytest.mark.parametrize("passes", [1, 2])
def test_a_sparse_gradient_is_added_up_row_by_row(passes):
    model = nn.Embedding(6, 2, sparse=True).double()
    flat = flat_of(model)
    flat.groups[0].outgoing.fill_(7.0)
    tokens = torch.tensor([4, 1, 4, 4, 0])
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)[:, None]
    step(flat, model, *[lambda m: (m(tokens) * weights).sum()] * passes)
    rows = torch.tensor([5.0, 2.0, 0.0, 0.0, 1 + 3 + 4.0, 0.0], dtype=torch.float64) * passes
    assert torch.equal(gradients(flat)["weight"], rows[:, None].expand(6, 2))
    assert flat.untouched() == frozenset()
    assert model.weight.grad is None


@pytest.mark.parametrize("passes", [1, 2])
def test_rows_are_kept_on_request_and_the_flat_gradient_is_not_changed(passes):
    model = nn.Embedding(6, 2, sparse=True).double()
    flat = flat_of(model)
    flat.keep_rows()
    flat.groups[0].outgoing.fill_(7.0)
    tokens = torch.tensor([4, 1, 4])
    for _ in range(2):
        step(flat, model, *[lambda m: m(tokens).sum()] * passes)
        (rows,) = flat.rows.values()
        assert (rows.indices().tolist(), rows.values().tolist()) == ([[1, 4]], [[passes] * 2, [2 * passes] * 2])
        assert flat.groups[0].grad.tolist() == [7.0] * 12
        assert flat.untouched() == frozenset()
    step(flat, model)
    assert flat.rows == {} and flat.untouched() == {0}


def test_rows_are_added_to_a_dense_gradient_of_the_same_step():
    model = nn.Embedding(3, 2, sparse=True).double()
    flat = flat_of(model)
    flat.keep_rows()
    tokens = torch.tensor([1, 1])
    for first, second in ((lambda m: m(tokens).sum(), lambda m: m.weight.sum()), (lambda m: m.weight.sum(),) * 2):
        step(flat, model, first, second)
        dense = gradients(flat)["weight"].tolist()
        assert dense == ([[1.0, 1.0], [3.0, 3.0], [1.0, 1.0]] if first is not second else [[2.0, 2.0]] * 3)
        assert flat.rows == {}
    step(flat, model, lambda m: m.weight.sum(), lambda m: m(tokens).sum())
    assert gradients(flat)["weight"].tolist() == [[1.0, 1.0], [3.0, 3.0], [1.0, 1.0]] and flat.rows == {}


def test_a_gradient_may_be_put_by_hand():
    model = mlp()
    flat = flat_of(model)
    flat.open()
    slot = flat.slots[2]
    for value in (1.0, 2.0):
        flat.put(slot, torch.full((2, 4), value, dtype=torch.float64))
    flat.close()
    assert gradients(flat)["2.weight"].tolist() == [[3.0] * 4] * 2
    assert untouched_names(flat) == {"0.weight", "0.bias", "2.bias"}


# -- refused ------------------------------------------------------------------------------------------


def test_channels_last_is_refused():
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(
        Refused, match=re.escape("weight is laid out with strides (27, 1, 9, 3), but must be contiguous")
    ):
        flat_of(model)


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_in_one_memory_are_refused(frozen):
    """They would be untied; one parameter in two modules is fine."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[0].weight.data, requires_grad=not frozen)
    with pytest.raises(
        Refused, match=r"^[01]\.weight overlaps [01]\.weight in memory, but must have its own memory, or be"
    ):
        flat_of(model)
    memory = torch.zeros(6)
    apart = {"a": nn.Parameter(memory[:3]), "b": nn.Parameter(memory[3:])}
    assert [slot.name for slot in Flat(apart).slots] == ["a", "b"]


def test_a_gradient_of_an_earlier_loop_is_dropped():
    model, x = mlp(), data()
    reference = expected(model, lambda m: loss_of(m, x))
    loss_of(model, x).backward()
    flat = flat_of(model)
    step(flat, model, lambda m: loss_of(m, x))
    assert_same(flat, reference)


def test_a_parameter_that_thaws_is_refused():
    model, x = mlp(), data()
    model[0].weight.requires_grad_(False)
    flat = flat_of(model)
    step(flat, model, lambda m: loss_of(m, x))
    model[0].weight.requires_grad_(True)
    with pytest.raises(Refused, match=r"^0\.weight was frozen when training began, but is to be trained now"):
        step(flat, model, lambda m: loss_of(m, x))


def test_a_second_join_is_refused():
    model = mlp()
    flat_of(model)
    with pytest.raises(Refused, match=r"^0.weight already has gradient hooks, but a model can be joined only once$"):
        flat_of(model)


class Checkpointed(nn.Module):
    """The same layer twice, each time recomputed in the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.reentrant = reentrant

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=self.reentrant)
        return x


def test_reentrant_checkpointing_is_refused():
    model, x = Checkpointed(reentrant=True).double(), data().requires_grad_()
    flat = flat_of(model)
    flat.open()
    with pytest.raises(ManyhandsError, match=r"layer\.\w+ got two gradients in one backward pass.*use_reentrant=False"):
        loss_of(model, x).backward()


def test_checkpointing_that_is_not_reentrant_is_fine():
    model, x = Checkpointed(reentrant=False).double(), data()
    reference = expected(model, lambda m: loss_of(m, x))
    flat = flat_of(model)
    step(flat, model, lambda m: loss_of(m, x))
    assert_same(flat, reference)


def test_the_private_attribute_of_torch_that_we_rely_on_tells_of_hooks():
    p = nn.Parameter(torch.ones(1))
    assert not p._post_accumulate_grad_hooks
    p.register_post_accumulate_grad_hook(lambda p: None)
    assert p._post_accumulate_grad_hooks


# -- buckets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 40, 100, 200, 10**9])
@pytest.mark.parametrize("make", [mlp, TwoTypes, lambda: nn.Sequential(*[nn.Linear(n, n) for n in range(1, 9)])])
def test_buckets_cover_everything_once_in_whole_parameters_the_last_layer_first(make, nbytes):
    flat = flat_of(make())
    buckets = flat.buckets(nbytes)
    for number, group in enumerate(flat.groups):
        mine = [bucket for bucket in buckets if bucket.group == number]
        edges = [slot.span.stop for slot in group.slots]
        assert mine[0].stop == group.weights.numel()
        assert mine[-1].start == 0
        assert all(after.stop == before.start for before, after in pairwise(mine))
        assert all(bucket.stop in edges for bucket in mine)
        for bucket in mine:
            inside = [p for p in group.slots if bucket.start <= p.span.start < bucket.stop]
            assert len(inside) == 1 or bucket.numel * group.weights.element_size() <= nbytes
    order = [name for name, _ in make().named_parameters()]
    first = [next(p.name for p in flat.slots if p.span[:2] == bucket[:2]) for bucket in buckets]
    assert first == sorted(first, key=order.index, reverse=True), "whichever is complete first, of any group"


def test_buckets_are_as_large_as_allowed():
    flat = flat_of(mlp())  # 96, 32, 64 and 16 bytes
    assert flat.buckets(80) == [Span(0, 16, 26), Span(0, 12, 16), Span(0, 0, 12)]
    assert flat.buckets(112) == [Span(0, 12, 26), Span(0, 0, 12)]
    assert flat.buckets() == [Span(0, 0, 26)]


# -- weights ------------------------------------------------------------------------------------------


def test_flat_weights_and_the_model_are_the_same_memory():
    model = mlp()
    before = {name: p.clone() for name, p in model.named_parameters()}
    flat = flat_of(model)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.is_leaf and p.requires_grad for p in model.parameters())
    flat.groups[0].weights.copy_(torch.arange(26.0))
    assert model[0].bias.tolist() == [12.0, 13.0, 14.0, 15.0]
    assert model[2].weight.tolist() == [[16.0, 17.0, 18.0, 19.0], [20.0, 21.0, 22.0, 23.0]]
    with torch.no_grad():
        model[2].bias.fill_(-1.0)
    assert flat.groups[0].weights[24:].tolist() == [-1.0, -1.0]
    assert flat.weights(Span(0, 23, 25)).tolist() == [23.0, -1.0]
    model.load_state_dict(before)
    assert torch.equal(flat.groups[0].weights, torch.cat([p.flatten() for p in before.values()]))


def test_a_span_of_the_gradient_is_a_view():
    flat = flat_of(mlp())
    flat.grad(Span(0, 11, 13)).fill_(5.0)
    assert gradients(flat)["0.weight"].flatten()[-1] == 5.0
    assert gradients(flat)["0.bias"].tolist() == [5.0, 0.0, 0.0, 0.0]
    assert flat.groups[0].outgoing.count_nonzero() == 2


def test_named_weights_are_copies():
    model = mlp()
    flat = flat_of(model)
    named = flat.named()
    assert list(named) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    flat.groups[0].weights.zero_()
    assert all(value.any() and not value.requires_grad for value in named.values())
    assert [value.shape for value in named.values()] == [p.shape for p in model.parameters()]


def test_move_to_other_memory_takes_what_is_there():
    model, x = mlp(), data()
    flat = flat_of(model)
    old = flat.groups[0].weights
    memory = torch.linspace(-1, 1, 30, dtype=torch.float64)[2:28]
    before = memory.clone()
    flat.move_to([memory])
    assert torch.equal(memory, before)
    assert flat.groups[0].weights is memory
    assert torch.equal(model[0].weight.flatten(), before[:12])
    memory[12:16] = 3.0
    assert model[0].bias.tolist() == [3.0] * 4
    old.fill_(9.0)
    assert torch.equal(model[2].bias, before[24:])
    step(flat, model, lambda m: loss_of(m, x))
    assert_same(flat, expected_of_fresh(model, lambda m: loss_of(m, x)))
    with pytest.raises(ValueError, match="zip"):
        flat.move_to([memory, memory])


def test_memory_that_is_let_go_leaves_its_sizes():
    model = mlp()
    flat = flat_of(model)
    slots, sizes = list(flat.slots), {name: p.shape for name, p in model.named_parameters()}
    release(flat)
    weight_slice = [flat.groups[0].weights, flat.groups[0].outgoing, *(p.data for p in model.parameters())]
    assert all(x.untyped_storage().nbytes() == x.element_size() for x in weight_slice)
    assert flat.slots == slots and flat.numel == sum(size.numel() for size in sizes.values())
    assert {name: p.shape for name, p in model.named_parameters()} == sizes
    assert flat.weights(slots[0].span).shape == (slots[0].span.numel,)


def test_training_by_the_flat_weights_equals_training_the_model():
    model, x = mlp(), data()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    flat = flat_of(model)
    for _ in range(5):
        step(flat, model, lambda m: loss_of(m, x))
        flat.groups[0].weights.sub_(flat.groups[0].grad, alpha=0.01)
        optimizer.zero_grad()
        loss_of(twin, x).backward()
        optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=0)


# -- sizes only ---------------------------------------------------------------------------------------


def test_a_model_of_sizes_only_has_slots_and_no_numbers():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 10))
    flat = flat_of(model)
    assert flat.is_meta
    assert flat.numel == 1_001_000 + 10_010
    assert [slot.span.numel for slot in flat.slots] == [1_000_000, 1000, 10_000, 10]
    assert flat.buckets(10**5) == [Span(0, 1_000_000, 1_011_010), Span(0, 0, 1_000_000)]
    flat.open()
    flat.close()
    assert flat.untouched() == frozenset()
    assert flat_of(model).numel == flat.numel, "sizes may be joined more than once"


def test_a_model_with_numbers_is_not_of_sizes_only():
    assert not flat_of(mlp()).is_meta


def test_odd_shapes_are_laid_out_too():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.deep = nn.Parameter(torch.randn(2, 1, 3))

        def forward(self, x):
            return self.scalar * (self.deep * x).sum() + self.empty.sum()

    model = Odd().double()
    x = torch.randn(2, 1, 3, dtype=torch.float64)
    reference = expected(model, lambda m: m(x))
    flat = flat_of(model)
    step(flat, model, lambda m: m(x))
    assert_same(flat, reference)
    assert flat.untouched() == frozenset()
    assert [slot.span for slot in flat.slots] == [Span(0, 0, 1), Span(0, 1, 1), Span(0, 1, 7)]


def test_a_real_model_gives_what_torch_gives():
    def make():
        return nn.Sequential(
            nn.Embedding(10, 4), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 3)
        ).double()

    model, x, y = make(), torch.randint(10, (6, 3)), torch.randint(3, (6,))
    reference = expected(model, lambda m: F.cross_entropy(m(x), y))
    flat = flat_of(model)
    step(flat, model, lambda m: F.cross_entropy(m(x), y))
    assert_same(flat, reference)

"""WeightSlice: an update in blocks, or in one pass, has the bits of the plain one; merging is the mean in order."""

import copy

import pytest
import torch
from torch import nn

from manyhands.core import vector_ops
from manyhands.core import weight_slice as module
from manyhands.core.flat import Flat, ParamSlot, Span
from manyhands.core.rule import UpdateContext
from manyhands.core.vector_ops import UNCHARGED
from manyhands.core.weight_slice import WeightSlice, replica_slices
from manyhands.rules import Adagrad, Adam, Momentum, Nesterov, RmsProp, Sgd, Torch, chain

SMALL = 512
"""Bytes of a block: 128 float32 or 64 float64."""


def fading(samples):
    return 0.1 / (1 + samples)


class Uphill:
    """A link for the front of a chain, with a memory: the gradient plus a tenth of the last one."""

    elementwise, needs = True, frozenset()

    def init(self, weights):
        return {"last": torch.zeros_like(weights)}

    def __call__(self, g, at):
        last = at.state["last"].clone()
        at.state["last"].copy_(g)
        return g.add_(last, alpha=0.1)


RULES = {
    "sgd": Sgd(0.1),
    "sgd with a schedule": Sgd(fading),
    "sgd with decay": Sgd(0.1, weight_decay=0.03),
    "momentum": Momentum(0.1),
    "momentum with decay": Momentum(0.1, 0.8, weight_decay=0.03),
    "nesterov": Nesterov(0.1),
    "adagrad": Adagrad(0.1),
    "adagrad with eps": Adagrad(0.1, eps=1e-8),
    "rmsprop": RmsProp(0.01, weight_decay=0.03),
    "adam": Adam(0.01),
    "adam with decay": Adam(0.01, weight_decay=0.03),
    "adamw": Adam(0.01, weight_decay=0.03, decoupled=True),
    "chain": chain(Uphill(), Adam(0.01)),
    "chain ending in sgd": chain(Uphill(), Sgd(0.1)),
    "torch": Torch("Adam", lr=0.01),
}
RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)

SIZES = [301, 7, 200, 64, 131]
"""Parameters that begin and end anywhere in and between blocks; 703 numbers, so the last block is odd."""
SPAN = Span(0, 5, 698)
SKIPPED = [(), (), (0, 2), (), (1, 3, 4)]
"""What is untouched, update by update: the second parameter reaches over several blocks of 128 and 64."""


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", SMALL)


def noise(n, dtype, seed):
    """Numbers of very different sizes, some of them 0, so that rounding shows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator, dtype=dtype)
    x *= 10.0 ** torch.randint(-6, 3, (n,), generator=generator).to(dtype)
    return x.masked_fill_(torch.rand(n, generator=generator) < 0.05, 0)


def slots(sizes, dtype):
    return Flat({str(n): nn.Parameter(torch.zeros(size, dtype=dtype)) for n, size in enumerate(sizes)}).slots


def slice_of(rule, sizes, span, dtype):
    return WeightSlice(UNCHARGED, span, noise(span.numel, dtype, 0), slots(sizes, dtype), copy.deepcopy(rule))


class Plain:
    """The update as in the equation, on whole slices."""

    def __init__(self, rule, sizes, span, dtype):
        self.rule = copy.deepcopy(rule)
        self.w = noise(span.numel, dtype, 0)
        ends = torch.tensor(sizes).cumsum(0).tolist()
        starts = [end - size for end, size in zip(ends, sizes, strict=True)]
        self.cuts = [
            slice(max(a, span.start) - span.start, min(b, span.stop) - span.start)
            for a, b in zip(starts, ends, strict=True)
        ]
        self.counts = [0] * len(sizes)
        self.whole = "owner" not in rule.needs
        self.state = self.rule.init(self.w) if self.whole else [self.rule.init(self.w[cut]) for cut in self.cuts]

    def update(self, gs, samples, untouched):
        g = gs[0].clone()
        for other in gs[1:]:
            g += other
        if len(gs) > 1:
            g /= len(gs)
        touched = [n for n in range(len(self.cuts)) if n not in untouched]
        at_once = self.whole and not untouched and len(set(self.counts)) == 1
        for n in touched:
            self.counts[n] += 1
        for n in touched[:1] if at_once else touched:
            cut = slice(None) if at_once else self.cuts[n]
            state = {key: x[cut] for key, x in self.state.items()} if self.whole else self.state[n]
            step = self.rule(g[cut], UpdateContext(self.w[cut], state, updates=self.counts[n], samples=samples))
            if step is not None:
                self.w[cut] += step


def assert_same_bits(weight_slice, plain):
    assert torch.equal(weight_slice.weights, plain.w)
    assert list(weight_slice.counts) == plain.counts
    if plain.whole:
        assert weight_slice._states[0].keys() == plain.state.keys()
        for key, x in plain.state.items():
            assert torch.equal(weight_slice._states[0][key], x), key


def compare(rule, sizes, span, dtype, skipped, workers, merges=True):
    weight_slice, plain = slice_of(rule, sizes, span, dtype), Plain(rule, sizes, span, dtype)
    before = weight_slice.weights.clone()
    for step, untouched in enumerate(skipped):
        gs = [noise(span.numel, dtype, 100 * step + k + 1) for k in range(workers)]
        kept = [g.clone() for g in gs]
        at = UpdateContext(weight_slice.weights, samples=step)
        weight_slice.apply_mean(gs, at, untouched) if merges else weight_slice.update(gs[0], at, untouched)
        plain.update(kept, step, untouched)
        assert not merges or all(torch.equal(g, k) for g, k in zip(gs, kept, strict=True)), "they are only read"
        assert_same_bits(weight_slice, plain)
    assert not torch.equal(weight_slice.weights, before)


@RULE
@DTYPE
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_merging_in_blocks_has_the_bits_of_the_mean_applied_at_once(small_blocks, rule, dtype, workers):
    compare(rule, SIZES, SPAN, dtype, SKIPPED, workers)


@RULE
@DTYPE
def test_updating_in_blocks_has_the_bits_of_an_update_at_once(small_blocks, rule, dtype):
    compare(rule, SIZES, SPAN, dtype, SKIPPED, 1, merges=False)


@RULE
@pytest.mark.parametrize("numel", [1, 63, 127, 128, 129, 256, 257, 1003])
def test_every_length_rounds_in_the_same_way(small_blocks, rule, numel):
    for workers in (1, 2):
        compare(rule, [numel], Span(0, 0, numel), torch.float32, [(), ()], workers)


@RULE
@pytest.mark.parametrize("workers", [1, 3])
def test_blocks_of_the_usual_size_have_the_same_bits(rule, workers):
    numel = 2 * module.BLOCK_BYTES // 4 + 1003
    compare(rule, [numel - 70_001, 70_001], Span(0, 0, numel), torch.float32, [(), (0,), ()], workers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("workers", [1, 2])
def test_half_precision_rounds_as_the_plain_step_does(small_blocks, dtype, workers):
    compare(Sgd(0.1), SIZES, SPAN, dtype, SKIPPED, workers)


def test_blocks_are_whole_runs_of_torchs_vectors():
    for size in (1, 2, 4, 8, 16):
        assert module.BLOCK_BYTES // size % 64 == 0


class Spy:
    """A rule that notes what it is given."""

    elementwise, needs = True, frozenset()

    def __init__(self):
        self.given = []

    def init(self, weights):
        return {"memory": torch.zeros_like(weights)}

    def __call__(self, g, at):
        sizes = [len(x) for x in (g, at.weights, at.state["memory"])] + ([] if at.seen is None else [len(at.seen)])
        self.given.append((sizes[0], at.updates))
        assert len(set(sizes)) == 1, "everything is cut alike"
        return torch.zeros_like(g) if at.seen is None else at.seen - at.weights


@pytest.fixture
def spied(small_blocks):
    """A weight slice of 300 + 100 elements with a spy."""
    weight_slice = slice_of(Spy(), [300, 100], Span(0, 0, 400), torch.float32)
    return weight_slice, weight_slice.rule.given


def test_a_rule_sees_one_block_after_the_other_of_the_same_update(spied):
    weight_slice, given = spied
    weight_slice.update(torch.zeros(400), UpdateContext(weight_slice.weights))
    assert given == [(128, 1), (128, 1), (128, 1), (16, 1)]
    assert list(weight_slice.counts) == [1, 1]


def test_a_parameter_that_is_updated_alone_has_blocks_of_its_own(spied):
    weight_slice, given = spied
    weight_slice.update(torch.zeros(400), UpdateContext(weight_slice.weights), {1})
    weight_slice.update(torch.zeros(400), UpdateContext(weight_slice.weights))
    assert given == [(128, 1), (128, 1), (44, 1), (128, 2), (128, 2), (44, 2), (100, 1)]


def test_the_weights_a_gradient_was_computed_at_are_cut_like_the_rest(spied):
    weight_slice, _ = spied
    seen = noise(400, torch.float32, 7)
    weight_slice.weights.zero_()
    weight_slice.update(torch.zeros(400), UpdateContext(weight_slice.weights, seen=seen))
    assert torch.equal(weight_slice.weights, seen)


def test_a_rule_that_needs_whole_tensors_gets_the_mean_in_whole_tensors(small_blocks):
    class Whole(Spy):
        elementwise = False

        def __call__(self, g, at):
            self.given.append(tuple(g.shape))
            return g - g.mean()

    rule = Whole()
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 2))
    flat = Flat(dict(model.named_parameters()))
    (weight_slice,) = replica_slices(UNCHARGED, flat, rule)
    before, gs = flat.named(), [noise(flat.numel, torch.float32, k) for k in range(3)]
    weight_slice.apply_mean(gs, UpdateContext(weight_slice.weights))
    assert rule.given == [(30, 20), (30,), (2, 30), (2,)]
    mean = ((gs[0] + gs[1]) + gs[2]) / 3
    for place in flat.slots:
        g = mean[place.span.start : place.span.stop].view(place.shape)
        assert torch.equal(flat.weights(place.span).view(place.shape), before[place.name] + (g - g.mean()))


def test_sgd_passes_once_over_one_gradient_and_in_blocks_over_a_mean(small_blocks, monkeypatch):
    passes = []
    monkeypatch.setattr(Sgd, "move", lambda rule, g, at, into: passes.append(len(g)))
    weight_slice = slice_of(Sgd(0.1), [300, 100], Span(0, 0, 400), torch.float32)
    g = torch.ones(400)
    weight_slice.apply_mean([g], UpdateContext(weight_slice.weights))
    weight_slice.update(g, UpdateContext(weight_slice.weights))
    assert passes == [400, 400]
    assert torch.equal(g, torch.ones(400))
    passes.clear()
    weight_slice.apply_mean([g, g], UpdateContext(weight_slice.weights), {1})
    assert passes == [128, 128, 44]


def test_sgd_with_decay_or_in_half_precision_cannot_move_in_one_pass():
    w = torch.zeros(3)
    assert Sgd(0.1).can_move(w)
    assert Sgd(0.1).can_move(w.double())
    assert not Sgd(0.1, weight_decay=0.1).can_move(w)
    assert not Sgd(0.1).can_move(w.half())
    assert not Sgd(0.1).can_move(w.bfloat16())
    assert not Sgd(0.1).can_move(w.to("meta"))


def test_sizes_only_are_not_merged():
    (weight_slice,) = replica_slices(UNCHARGED, Flat({"w": nn.Parameter(torch.empty(3, device="meta"))}), Spy())
    weight_slice.apply_mean([torch.empty(3, device="meta")] * 2, UpdateContext(weight_slice.weights))
    assert list(weight_slice.counts) == [0]


@pytest.mark.parametrize("numel", [1, 63, 1000, 300_001])
@pytest.mark.parametrize("rule", [Sgd(0.1), Adam(0.1)], ids=lambda rule: type(rule).__name__)
def test_weights_are_copied_in_the_same_pass_bit_for_bit(rule, numel):
    noise = torch.Generator().manual_seed(numel)
    weights, g, into = (torch.randn(numel, generator=noise) for _ in range(3))
    place = ParamSlot("w", Span(0, 0, numel), torch.Size([numel]), 0)
    weight_slice = WeightSlice(UNCHARGED, Span(0, 0, numel), weights, [place], rule)
    other = torch.empty_like(into)
    weight_slice.apply_mean([g], UpdateContext(weights), into=[into, other])
    assert torch.equal(into, weights) and torch.equal(other, weights)
    into.zero_()
    weight_slice.apply_mean([g], UpdateContext(weights), untouched=[0], into=[into])
    assert torch.equal(into, weights), "what was not moved is copied too"


@pytest.fixture(params=["the kernels", "torch"])
def with_or_without_kernels(request, monkeypatch):
    """However little it is; and what there is without a compiler."""
    monkeypatch.setattr(vector_ops, "LITTLE", 0)
    if request.param == "torch":
        monkeypatch.setattr(vector_ops, "compiled", lambda *_: None)


@pytest.mark.usefixtures("with_or_without_kernels")
@pytest.mark.parametrize("start", range(0, 20, 3))
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 1000])
def test_streaming_copies_every_byte_and_no_other(start, numel):
    x, memory = torch.arange(numel, dtype=torch.uint8) + 1, torch.zeros(numel + 64, dtype=torch.uint8)
    vector_ops.stream(x, memory[start : start + numel])
    assert torch.equal(memory[start : start + numel], x)
    assert int(memory.sum()) == int(x.sum(dtype=torch.int64))


@pytest.mark.usefixtures("with_or_without_kernels")
@pytest.mark.parametrize("start", range(5))
@pytest.mark.parametrize("numel", [0, 1, 3, 16, 17, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_that_also_copies_has_the_bits_of_a_step_and_a_copy(start, numel, dtype):
    torch.manual_seed(numel)
    w, g = torch.randn(numel + 4, dtype=dtype)[start % 3 :][:numel], torch.randn(numel, dtype=dtype)
    memory = torch.zeros(numel + 16, dtype=dtype)
    expected = w + g * -0.1
    vector_ops.step(w, g, -0.1, memory[start : start + numel])
    assert torch.equal(w, expected)
    assert torch.equal(memory[start : start + numel], expected)
    assert not memory[:start].any() and not memory[start + numel :].any()


@pytest.mark.usefixtures("with_or_without_kernels")
@pytest.mark.parametrize("start", range(5))
@pytest.mark.parametrize("numel", [0, 1, 3, 16, 17, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_mean_has_the_bits_of_a_sum_in_order_that_is_divided(start, numel, dtype, count):
    torch.manual_seed(numel)
    gs = [torch.randn(numel + 4, dtype=dtype)[k % 3 :][:numel] for k in range(count)]
    memory = torch.zeros(numel + 16, dtype=dtype)
    expected = gs[0].clone()
    for g in gs[1:]:
        expected += g
    expected /= count
    vector_ops.mean(gs, memory[start : start + numel])
    assert torch.equal(memory[start : start + numel], expected)
    assert not memory[:start].any() and not memory[start + numel :].any()

"""Links for stale gradients: by hand, cut and uncut, in blocks, and the gradients that they do not change."""

import math

import pytest
import torch

from manyhands.core import weight_slice as blocks
from manyhands.core.errors import Refused
from manyhands.core.flat import ParamSlot, Span
from manyhands.core.rule import UpdateContext
from manyhands.core.vector_ops import UNCHARGED
from manyhands.core.weight_slice import WeightSlice
from manyhands.rules import AdaptiveDamping, AgeAware, DelayCompensation, Sgd, StalenessAware, chain

N = 1003
LINKS = {
    "compensation": DelayCompensation(0.04),
    "adaptive": DelayCompensation(2, adaptive=True),
    "one mean square per worker": DelayCompensation(2, adaptive=True, mean_squares=3),
    "staleness": StalenessAware(),
    "age": AgeAware(),
    "damping": AdaptiveDamping(0.1),
}
LINK = pytest.mark.parametrize("link", LINKS.values(), ids=LINKS.keys())


def noise(seed, dtype=torch.float64, n=N):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def apply(link, g, w, seen, lag=1, rank=0, state=None):
    w, seen, g = (torch.tensor([x], dtype=torch.float64) for x in (w, seen, g))
    at = UpdateContext(w, link.init(w) if state is None else state, lag=lag, rank=rank, seen=seen)
    return link(g, at).item()


def test_compensation_by_hand():
    assert apply(DelayCompensation(0.04), -6.0, 0.1, 0.0) == pytest.approx(-6 + 0.04 * 36 * 0.1, abs=1e-14)
    s = 0.05 * 36
    adaptive = -6 + 2 / math.sqrt(s + 1e-7) * 36 * 0.1
    assert apply(DelayCompensation(2, adaptive=True), -6.0, 0.1, 0.0) == pytest.approx(adaptive, abs=1e-14)


def test_without_memory_the_adaptive_one_multiplies_by_the_size_of_the_gradient():
    """m = 0: λ g² ≈ λ0 |g|."""
    link = DelayCompensation(2, adaptive=True, decay=0)
    assert apply(link, -6.0, 0.1, 0.0) == pytest.approx(-6 + 2 * 6 * 0.1, abs=1e-7)


def test_damping_by_hand():
    assert apply(AdaptiveDamping(0.1), -6.0, 0.2, 0.0) == pytest.approx(-6 / 1.4, abs=1e-14)


@pytest.mark.parametrize(("lag", "staleness", "age"), [(0, 1, 1), (1, 1, 2), (2, 2, 3), (9, 9, 10)])
def test_division_by_staleness_and_by_age(lag, staleness, age):
    assert apply(StalenessAware(), -6.0, 1.0, 0.0, lag=lag) == -6.0 / staleness
    assert apply(AgeAware(), -6.0, 1.0, 0.0, lag=lag) == -6.0 / age


@LINK
def test_a_gradient_that_is_not_stale_stays_as_it_is(link):
    g, w = noise(1), noise(2)
    at = UpdateContext(w, link.init(w), lag=0, seen=w.clone())
    assert torch.equal(link(g.clone(), at), g)


@pytest.mark.parametrize("link", [DelayCompensation(0), DelayCompensation(0, adaptive=True), AdaptiveDamping(math.inf)])
def test_a_strength_of_nothing_changes_nothing(link):
    g, w = noise(1), noise(2)
    at = UpdateContext(w, link.init(w), lag=3, seen=noise(3))
    assert torch.equal(link(g.clone(), at), g)


def test_each_worker_may_have_a_mean_square_of_its_own():
    link = DelayCompensation(2, adaptive=True, mean_squares=2)
    w = torch.zeros(1, dtype=torch.float64)
    state = link.init(w)
    for rank, g in [(0, 1.0), (1, 2.0), (2, 3.0)]:
        link(torch.full_like(w, g), UpdateContext(w, state, rank=rank, seen=w.clone()))
    assert state["s0"].item() == pytest.approx(0.95 * 0.05 * 1 + 0.05 * 9)
    assert state["s1"].item() == pytest.approx(0.05 * 4)


@LINK
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_cut_is_bit_equal_to_uncut(link, dtype):
    w, seen = noise(1, dtype), noise(2, dtype)
    spans = [(0, 7), (7, 420), (420, N)]
    states = [link.init(w[a:b]) for a, b in spans]
    state = link.init(w)
    for step in range(5):
        g = noise(10 + step, dtype)
        where = {"lag": step, "rank": step}
        cut = [
            link(g[a:b].clone(), UpdateContext(w[a:b], one, seen=seen[a:b], **where))
            for (a, b), one in zip(spans, states, strict=True)
        ]
        assert torch.equal(link(g.clone(), UpdateContext(w, state, seen=seen, **where)), torch.cat(cut))


@LINK
def test_blocks_and_copies_do_not_change_an_update(link, monkeypatch):
    """The weights may be copied into what was seen, block by block, as soon as each block has been read."""
    ends = []
    for nbytes in (2**20, 256):
        monkeypatch.setattr(blocks, "BLOCK_BYTES", nbytes)
        weights, seen = noise(1, torch.float32), noise(2, torch.float32)
        slot = ParamSlot("w", Span(0, 0, N), torch.Size([N]), 0)
        weight_slice = WeightSlice(UNCHARGED, Span(0, 0, N), weights, [slot], chain(link, Sgd(0.1)), knows_seen=True)
        for step in range(4):
            g, into = noise(10 + step, torch.float32), torch.zeros(N)
            weight_slice.apply_mean([g], UpdateContext(weights, lag=step, rank=step, seen=seen), into=(into, seen))
            assert torch.equal(into, weights) and torch.equal(seen, weights)
            seen = noise(20 + step, torch.float32)
        ends.append(weights.clone())
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DelayCompensation(-1), "strength is -1, but must be >= 0 and finite"),
        (lambda: DelayCompensation(math.nan), "strength is nan, but must be >= 0 and finite"),
        (lambda: DelayCompensation(decay=1), "decay is 1, but must be >= 0 and < 1"),
        (lambda: DelayCompensation(eps=0), "eps is 0, but must be > 0"),
        (lambda: DelayCompensation(mean_squares=0), "mean_squares is 0, but must be >= 1"),
        (lambda: AdaptiveDamping(0), "gamma is 0, but must be > 0"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(Refused, match=message):
        make()

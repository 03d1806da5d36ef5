"""Buffers of workers that have come differently far are merged by what each has seen."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from manyhands.core.buffers import merge_buffers
from manyhands.core.running_statistics import running_statistics

MEAN, STD = 100.0, 4.0
DRAW = torch.Generator().manual_seed(5)
BATCHES = [MEAN + STD * torch.randn(16, 3, generator=DRAW, dtype=torch.float64) for _ in range(40)]


def norm(momentum=0.1):
    return nn.BatchNorm1d(3, momentum=momentum, affine=False).double()


def after(batches, model):
    for batch in batches:
        model(batch)
    return model


def merged(begun, models, steps):
    """What the lead makes of the models of its workers, all of which began as `begun`."""
    w = SimpleNamespace(statistics=running_statistics(begun))
    named = [dict(model.named_buffers()) for model in models]
    parts = zip(named, steps, strict=True)
    return merge_buffers(w, {rank: ((0, n, *one), tuple(one.values())) for rank, (one, n) in enumerate(parts)})


def test_after_equally_many_batches_it_is_their_mean_to_the_last_bit():
    models = [after(BATCHES[k : k + 7], norm()) for k in range(3)]
    found = merged(norm(), models, [7, 7, 7])
    for name in ("running_mean", "running_var"):
        assert torch.equal(found[name], torch.stack([getattr(one, name) for one in models]).mean(0))
    assert found["num_batches_tracked"] == 7


@pytest.mark.parametrize("few", [1, 2, 7])
def test_what_a_worker_with_few_batches_has_not_seen_does_not_count(few):
    """Every mini-batch has the same statistics here, so the result is that of the worker with the most batches."""
    fast, slow = (after(BATCHES[:1] * n, norm()) for n in (30, few))
    found = merged(norm(), [fast, slow], [30, few])
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(found[name], getattr(fast, name), rtol=1e-12, atol=0)
    assert found["num_batches_tracked"] == 30


def test_the_measured_statistics_are_weighted_by_steps():
    """By hand: without the weight 0.9^n of the initial value, 0 or 1."""
    fast, slow = after(BATCHES[:20], norm()), after(BATCHES[20:25], norm())
    found, q = merged(norm(), [fast, slow], [20, 5]), [0.9**20, 0.9**5]
    for name, first in ("running_mean", 0.0), ("running_var", 1.0):
        e = [(getattr(one, name) - n * first) / (1 - n) for one, n in zip([fast, slow], q, strict=True)]
        expected = q[0] * first + (1 - q[0]) * (0.8 * e[0] + 0.2 * e[1])
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=0)


def test_the_result_is_a_state_to_continue_from():
    """A worker that takes over the merged buffers is, merged with the others later, one that has seen as much."""
    fast, slow = after(BATCHES[:1] * 12, norm()), after(BATCHES[:1] * 2, norm())
    joins = norm()
    joins.load_state_dict(merged(norm(), [fast, slow], [12, 2]))
    models = [after(BATCHES[:1] * n, one) for one, n in ((fast, 3), (slow, 1), (joins, 1))]
    found = merged(norm(), models, [15, 3, 1])
    torch.testing.assert_close(found["running_mean"], fast.running_mean, rtol=1e-12, atol=0)


def test_statistics_of_a_trained_model_count_as_what_the_run_began_with():
    begun = after([batch - 50 for batch in BATCHES], norm())
    fast, slow = norm(), norm()
    for one in (fast, slow):
        one.load_state_dict(begun.state_dict())
    after(BATCHES[:1] * 30, fast)
    after(BATCHES[:1] * 2, slow)
    assert slow.running_mean.mean() < 70
    torch.testing.assert_close(merged(begun, [fast, slow], [30, 2])["running_mean"], fast.running_mean)


def test_without_a_momentum_it_is_the_mean_over_all_batches():
    fast, slow, alone = after(BATCHES[:30], norm(None)), after(BATCHES[30:], norm(None)), after(BATCHES, norm(None))
    found = merged(norm(None), [fast, slow], [30, 10])
    torch.testing.assert_close(found["running_mean"], alone.running_mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(found["running_var"], alone.running_var, rtol=1e-12, atol=0)


def test_statistics_that_no_worker_has_moved_stay_as_they_are():
    frozen = after(BATCHES[:3], norm()).eval()
    assert torch.equal(merged(frozen, [frozen, frozen], [30, 2])["running_mean"], frozen.running_mean)


class Sums(nn.Module):
    """Buffers that are no running statistics."""

    def __init__(self, value, count):
        super().__init__()
        self.register_buffer("value", torch.tensor([value, 3.0]))
        self.register_buffer("count", torch.tensor(count))


def test_of_other_buffers_it_is_the_mean_by_steps_or_the_maximum():
    found = merged(Sums(0.0, 0), [Sums(1.0, 5), Sums(5.0, 9), Sums(100.0, 99)], [30, 10, 0])
    assert found["value"].tolist() == [2.0, 3.0], "who has taken no step has no part in it"
    assert found["count"] == 9
    assert merged(Sums(0.0, 0), [Sums(1.0, 5), Sums(5.0, 9)], [0, 0])["value"].tolist() == [3.0, 3.0]

"""Every sample once per pass, every batch full, every position reachable at once."""

from itertools import chain

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from manyhands.core.errors import Refused
from manyhands.splits.data import Share


def numbered(count):
    return TensorDataset(torch.arange(count))


def draw(share, batches):
    return [share.next_batch()[0].tolist() for _ in range(batches)]


def walk(share, samples):
    assert samples % share.batch_size == 0
    return list(chain(*draw(share, samples // share.batch_size)))


class Listed(Dataset):
    """Samples that can only be asked for one by one."""

    def __init__(self, samples):
        self.samples = samples
        self.asked = []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.samples[index]


def test_ranks_own_every_pth_sample():
    owned = [sorted(walk(Share(numbered(11), rank, 3, 1, seed=0), n)) for rank, n in enumerate((4, 4, 3))]
    assert owned == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]


@pytest.mark.parametrize(("count", "size", "batch_size"), [(8, 1, 2), (11, 3, 4), (7, 2, 5), (5, 4, 3), (3, 3, 2)])
def test_every_sample_once_per_pass_and_every_batch_full(count, size, batch_size):
    for rank in range(size):
        share = Share(numbered(count), rank, size, batch_size, seed=1)
        mine = list(range(rank, count, size))
        batches = draw(share, 3 * len(mine))
        assert {len(batch) for batch in batches} == {batch_size}
        samples = list(chain(*batches))
        passes = [samples[i : i + len(mine)] for i in range(0, len(samples), len(mine))]
        assert len(passes) == 3 * batch_size
        assert all(sorted(once) == mine for once in passes)


def test_passes_ranks_and_seeds_differ_in_order():
    def orders(rank, seed):
        samples = walk(Share(numbered(128), rank, 2, 64, seed), 128)
        return [[sample // 2 for sample in samples[i : i + 64]] for i in (0, 64)]

    found = [order for rank in (0, 1) for seed in (0, 1, 2**32, -1) for order in orders(rank, seed)]
    assert len({tuple(order) for order in found}) == len(found) == 16


def test_the_order_depends_on_nothing_else():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = draw(Share(numbered(20), 1, 2, 4, seed=5), 6)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert draw(Share(numbered(20), 1, 2, 4, seed=5), 6) == first


def test_the_order_is_pinned():
    assert draw(Share(numbered(10), 0, 2, 3, seed=0), 3) == [[0, 8, 4], [6, 2, 2], [8, 0, 6]]


@pytest.mark.parametrize("position", [0, 1, 2, 3, 7, 12])
def test_position_continues_where_another_stopped(position):
    whole = Share(numbered(17), 2, 3, 4, seed=9)
    expected = draw(whole, 15)
    resumed = Share(numbered(17), 2, 3, 4, seed=9)
    resumed.position = position
    assert draw(resumed, 15 - position) == expected[position:]
    assert resumed.position == whole.position == 15
    resumed.position = 1  # and back
    assert draw(resumed, 2) == expected[1:3]


def test_a_far_position_is_not_replayed():
    data = Listed([torch.tensor(i) for i in range(6)])
    share = Share(data, 0, 2, 2, seed=0)
    share.position = 10**12
    share.next_batch()
    assert len(data.asked) == 2
    assert share.position == 10**12 + 1


def test_tensors_are_indexed_at_once_and_agree_with_item_access():
    x, y = torch.randn(10, 3), torch.arange(10)
    fast = Share(TensorDataset(x, y), 1, 2, 4, seed=2)
    slow = Share(Listed(list(zip(x, y.tolist(), strict=True))), 1, 2, 4, seed=2)
    for _ in range(4):
        for a, b in zip(fast.next_batch(), slow.next_batch(), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


def test_a_tensor_data_set_that_changes_its_samples_is_asked():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            return tuple(2 * field for field in super().__getitem__(index))

    share = Share(Doubled(torch.arange(4)), 0, 1, 4, seed=0)
    assert sorted(draw(share, 1)[0]) == [0, 2, 4, 6]


def test_a_sample_that_is_no_tuple_becomes_one():
    batch = Share(Listed([torch.zeros(3), torch.ones(3)]), 0, 1, 2, seed=0).next_batch()
    assert isinstance(batch, tuple)
    assert [field.shape for field in batch] == [(2, 3)]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"x": 1}, "a sample is a dict, but must be a tuple of fields, the last one the target"),
        ((torch.zeros(1), "cat"), "field 1 of a sample is a str, but must be a tensor or a number"),
    ],
)
def test_samples_that_are_no_tensors_are_refused(sample, message):
    share = Share(Listed([sample, sample]), 0, 1, 2, seed=0)
    with pytest.raises(Refused) as refused:
        share.next_batch()
    assert str(refused.value) == message
    assert share.position == 0


@pytest.mark.parametrize(
    ("rank", "size", "batch_size", "message"),
    [
        (0, 4, 1, "a data set of 3 samples cannot be shared by 4 workers"),
        (0, 1, 0, "batch_size is 0, but must be >= 1"),
        (0, 0, 1, "size is 0, but must be >= 1"),
        (2, 2, 1, "rank is 2, but must be >= 0 and < 2"),
        (-1, 2, 1, "rank is -1, but must be >= 0 and < 2"),
    ],
)
def test_what_cannot_work_is_refused(rank, size, batch_size, message):
    with pytest.raises(Refused) as refused:
        Share(numbered(3), rank, size, batch_size, seed=0)
    assert str(refused.value) == message


def test_a_negative_position_is_refused():
    share = Share(numbered(3), 0, 1, 1, seed=0)
    with pytest.raises(Refused, match="position is -1, but must be >= 0"):
        share.position = -1


def test_a_mini_batch_can_be_put_together_in_another_way():
    data = TensorDataset(torch.arange(6))
    plain, listed = Share(data, 0, 2, 2, seed=4), Share(data, 0, 2, 2, seed=4, put_together=list)
    for _ in range(4):
        assert [sample.item() for (sample,) in listed.next_batch()] == plain.next_batch()[0].tolist()
    assert listed.position == 4

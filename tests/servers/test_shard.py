"""Shards: how gradients wait, how they are applied, when a push reads; the size of blocks changes no number."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.codecs import Feedback, Half, Raw, TopK
from manyhands.consistency import Bulk, Free, Stale
from manyhands.core import weight_slice as blocks
from manyhands.core.flat import Flat, Span
from manyhands.core.vector_ops import UNCHARGED
from manyhands.core.weight_slice import WeightSlice
from manyhands.rules import Adagrad, Adam, Momentum, Sgd
from manyhands.servers.clock_table import ClockTable
from manyhands.servers.pending_gradients import PendingGradients, decode_when_applied
from manyhands.servers.shard import ReadOnPush, Shard
from manyhands.virtual.transport import VirtualTransport

SPANS = [Span(0, 0, 150), Span(0, 150, 307)]
WORKERS = 3


def model_flat():
    torch.manual_seed(1)
    return Flat({name: nn.Parameter(torch.randn(size)) for name, size in [("a", 100), ("b", 7), ("c", 200)]})


def pending_of(kind, flat, codec, slots):
    """Of a server, where messages are kept until they are applied, or of a shard in memory that processes share."""
    codecs, weights = [codec] * len(SPANS), [flat.weights(span) for span in SPANS]
    if kind == "lent" or not slots:
        return PendingGradients(UNCHARGED, codecs, weights, decode_when_applied(codecs))
    shared = {}

    def memory(name, like):
        return shared.setdefault(name, torch.zeros(like.numel(), dtype=like.dtype))

    return PendingGradients(UNCHARGED, codecs, weights, "on_push", len(flat.slots), slots, memory)


def shard_of(kind, when, rule, codec):
    flat = model_flat()
    slices = [WeightSlice(UNCHARGED, span, flat.weights(span).clone(), flat.slots, rule) for span in SPANS]
    pending = pending_of(kind, flat, codec, slots=0 if when.ready(1, 2) else WORKERS)
    return Shard(UNCHARGED, slices, when, ClockTable(WORKERS, 0), pending, batch_size=1)


def gradient(seed):
    g = torch.randn(307, generator=torch.Generator().manual_seed(seed))
    return [g[span.start : span.stop] for span in SPANS]


def encoded(codec, gs):
    memories = [codec.memory(g) for g in gs]
    return [codec.encode(g, memory) for g, memory in zip(gs, memories, strict=True)]


def decoded(codec, gs):
    found = [torch.empty_like(g) for g in gs]
    for payload, out in zip(encoded(codec, gs), found, strict=True):
        codec.decode(payload, out)
    return torch.cat(found)


def weights_of(shard):
    return torch.cat([h.weights for h in shard.slices])


CODECS = pytest.mark.parametrize("codec", [Raw(), Half(), TopK(0.1), Feedback(Raw())], ids=repr)
KIND = pytest.mark.parametrize("kind", ["lent", "shared"])


@KIND
@CODECS
@pytest.mark.parametrize("when", [Free(), Stale(2)], ids=repr)
def test_a_gradient_that_is_applied_at_once_moves_the_weights_and_stays_as_it_is(kind, codec, when):
    shard = shard_of(kind, when, Sgd(0.1), codec)
    expected, gs = weights_of(shard), gradient(0)
    payload = encoded(codec, gs)
    kept = [[x.clone() for x in tensors] for tensors in payload]
    shard.push(0, payload, seen=0)
    expected += decoded(codec, gs) * -0.1
    assert torch.equal(weights_of(shard), expected)
    assert all(torch.equal(x, y) for p, k in zip(payload, kept, strict=True) for x, y in zip(p, k, strict=True))


@KIND
@CODECS
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_merged_gradients_are_summed_in_rank_order_whatever_the_order_of_arrival(kind, codec, order):
    shard = shard_of(kind, Bulk(), Momentum(0.1), codec)
    expected, gs = weights_of(shard), [gradient(i) for i in range(WORKERS)]
    for i in order:
        assert torch.equal(weights_of(shard), expected)
        shard.push(i, encoded(codec, gs[i]), seen=0)
    one, two, three = (decoded(codec, g) for g in gs)
    expected += ((one + two) + three) / 3 * -0.1
    assert torch.equal(weights_of(shard), expected)


@CODECS
def test_a_message_goes_back_when_its_gradient_has_been_applied_and_only_then(codec):
    """Its tensors are read where they came in, so the next message may come in there only after that."""
    shard, back = shard_of("lent", Bulk(), Sgd(0.1), codec), []
    start = weights_of(shard)

    def release():
        back.append(torch.equal(weights_of(shard), start))

    for i in range(WORKERS):
        assert not back
        shard.push(i, encoded(codec, gradient(i)), seen=0, release=release)
    assert back == [False] * WORKERS


@KIND
def test_without_staleness_the_gradients_of_one_clock_are_applied_one_after_the_other(kind):
    shard = shard_of(kind, Stale(0), Sgd(0.1), Raw())
    expected, gs = weights_of(shard), [gradient(i) for i in range(WORKERS)]
    for i in (1, 2, 0):
        shard.push(i, encoded(Raw(), gs[i]), seen=0)
    for g in gs:
        expected += torch.cat(g) * -0.1
    assert torch.equal(weights_of(shard), expected)
    assert shard.clocks.version == WORKERS


@KIND
@pytest.mark.parametrize("when", [Bulk(), Stale(0)], ids=repr)
def test_what_a_worker_left_untouched_is_not_remembered_for_its_next_push(kind, when):
    shard = shard_of(kind, when, Momentum(0.1, weight_decay=0.5), Raw())
    start = weights_of(shard)
    for i in range(WORKERS):
        shard.push(i, encoded(Raw(), gradient(i)), seen=0, untouched=(0, 1))
    once = weights_of(shard)
    assert torch.equal(once[:107], start[:107])
    assert not torch.isclose(once[107:], start[107:]).any()
    for i in range(WORKERS):
        shard.push(i, encoded(Raw(), gradient(i)), seen=0, untouched=())
    assert not torch.isclose(weights_of(shard)[:107], start[:107]).any()


@KIND
def test_merged_parameters_are_skipped_only_if_no_worker_touched_them(kind):
    shard = shard_of(kind, Bulk(), Momentum(0.1, weight_decay=0.5), Raw())
    start = weights_of(shard)
    for i, untouched in enumerate([(0, 1), (0, 2), (0,)]):
        shard.push(i, encoded(Raw(), gradient(i)), seen=0, untouched=untouched)
    assert torch.equal(weights_of(shard)[:100], start[:100])
    assert not torch.isclose(weights_of(shard)[100:], start[100:]).any()


@pytest.mark.parametrize(("codec", "decode"), [(Raw(), "never"), (Raw(), "on_apply"), (Half(), "on_apply")])
def test_only_a_gradient_that_is_never_decoded_is_read_in_its_message(codec, decode):
    flat, payload, released = model_flat(), encoded(codec, gradient(0)), []
    pending = PendingGradients(UNCHARGED, [codec] * 2, [flat.weights(span) for span in SPANS], decode)
    pending.put(0, payload, (1,), lambda: released.append(0))
    found, untouched = pending.read([0])
    assert untouched == {1} and not released
    for (one,), (lent, *_) in zip(found, payload, strict=True):
        assert one.dtype == torch.float32
        assert (one.data_ptr() == lent.data_ptr()) is (decode == "never")
    pending.release([0])
    assert released == [0]


@pytest.mark.parametrize("codec", [Raw(), Half()], ids=repr)
def test_a_gradient_decoded_on_push_is_read_in_its_slot_and_its_message_released_at_once(codec):
    released = []
    pending = pending_of("shared", model_flat(), codec, slots=WORKERS)
    payload = encoded(codec, gradient(0))
    pending.put(1, payload, (2,), lambda: released.append(1))
    assert released == [1]
    (first, _), untouched = pending.read([1])
    (again, _), _ = pending.read([1])
    assert untouched == {2}
    assert first[0].data_ptr() == again[0].data_ptr() != payload[0][0].data_ptr()
    assert torch.equal(torch.cat([first[0], pending.read([1])[0][1][0]]), decoded(codec, gradient(0)))
    pending.put(WORKERS + 2, payload, (), lambda: None)
    assert pending.read([WORKERS + 2])[1] == frozenset(), "slots beyond those at the beginning are made when needed"


@KIND
@pytest.mark.parametrize("codec", [Raw(), Half(), Half("bf16")], ids=repr)
def test_the_elastic_move_is_alpha_times_the_gap_and_the_weights_follow(kind, codec):
    shard = shard_of(kind, Free(), Sgd(0.1), codec)
    before, payload = weights_of(shard), encoded(codec, gradient(3))
    moves = shard.exchange(payload, 0.3)
    gap = decoded(codec, gradient(3)) - before
    move = torch.empty_like(before)
    for tensors, (_, start, stop) in zip(moves, SPANS, strict=True):
        assert sum(x.nbytes for x in tensors) == codec.nbytes(before[start:stop])
        codec.decode(tensors, move[start:stop])
    assert torch.equal(move, decoded(codec, [0.3 * gap]))
    assert torch.equal(weights_of(shard), before + move), "by the decoded move"
    again = encoded(codec, gradient(3))
    assert all(torch.equal(x, y) for p, q in zip(payload, again, strict=True) for x, y in zip(p, q, strict=True))


@pytest.mark.parametrize("first", ["the loss", "a push"])
@pytest.mark.parametrize("when", [Free(), Stale(2)], ids=repr)
def test_a_push_during_which_a_process_died_is_dropped(when, first):
    """It was killed, under the lock of the shard, after its gradient was counted and before it was applied."""
    shard = shard_of("shared", when, Sgd(0.1), Raw())
    expected = weights_of(shard) + torch.cat(gradient(0)) * -0.1
    shard.clocks.add_pending(1, 0)
    if first == "the loss":
        shard.leave(1)
    shard.push(0, encoded(Raw(), gradient(0)), 0)
    if first == "a push":
        shard.leave(1)
    assert torch.equal(weights_of(shard), expected)
    assert shard.clocks.pending == 0 and shard.clocks.expected == 2


@KIND
def test_a_parked_worker_is_as_far_ahead_as_at_the_moment_it_is_admitted(kind):
    """Two clocks ahead it is parked; when the others have taken one step each, it is one ahead."""
    shard = shard_of(kind, Stale(1), Sgd(0.1), Raw())
    for _ in range(2):
        shard.push(0, encoded(Raw(), gradient(0)), 0)
    assert not shard.pull(0)
    assert shard.push(1, encoded(Raw(), gradient(1)), 0) == []
    assert shard.push(2, encoded(Raw(), gradient(2)), 0) == [0]
    assert shard.clocks.ahead[0] == 1


# -- whole runs -----------------------------------------------------------------------------------


class Branches(nn.Module):
    """One branch is used only by some mini-batches."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(9, 31), nn.Linear(31, 3), nn.Linear(31, 3)

    def forward(self, x):
        y = torch.tanh(self.trunk(x))
        return self.right(y) + self.left(y) if float(x[0, 0]) > 0 else self.right(y)


def task():
    x = torch.randn(48, 9, generator=torch.Generator().manual_seed(5))
    return mh.Task(Branches, TensorDataset(x, torch.arange(48) % 3), nn.functional.cross_entropy, batch_size=4)


METHODS = {
    "bsp": lambda: mh.bsp(rule=Adam(0.01)),
    "bsp-server": lambda: mh.bsp_server(rule=Momentum(0.05)),
    "ssp": lambda: mh.ssp(staleness=1, rule=Sgd(0.05)),
    "ssp, no staleness": lambda: mh.ssp(staleness=0, rule=Adam(0.01)),
    "ssp, compressed": lambda: mh.ssp(rule=Momentum(0.05), codec=Feedback(TopK(0.1))),
    "downpour": lambda: mh.downpour(rule=Adagrad(0.03)),
    "ad-psgd": lambda: mh.ad_psgd(rule=Momentum(0.05)),
    "d-psgd": lambda: mh.d_psgd(rule=Momentum(0.05)),
    "gossip": lambda: mh.gossip(rule=Momentum(0.05)),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
@pytest.mark.parametrize("way", [{}, {"hosts": 1, "cores": 4}], ids=["co-located", "shared memory"])
def test_the_size_of_blocks_does_not_change_a_run(method, way, monkeypatch):
    cluster = mh.Cluster(workers=3, speeds=[1, 0.5, 2], jitter=0.3, **way)
    usual = mh.train(task(), method(), cluster=cluster, steps=8, seed=3)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 256)
    small = mh.train(task(), method(), cluster=cluster, steps=8, seed=3)
    assert small.weights_sha256 == usual.weights_sha256


# -- a push that reads --------------------------------------------------------------------------------


def push_that_reads(shard):
    read = ReadOnPush(0, [torch.zeros(span.numel) for span in SPANS])
    shard.push(0, encoded(Raw(), gradient(0)), 0, read=read)
    return read


@KIND
@pytest.mark.parametrize("when", [Free(), Stale(1)], ids=repr)
def test_a_worker_that_is_admitted_reads_the_new_weights_with_its_push(when, kind):
    shard = shard_of(kind, when, Sgd(lr=0.5), Raw())
    read = push_that_reads(shard)
    assert read.version == shard.clocks.version == 1
    assert all(torch.equal(x, one.weights) for x, one in zip(read.into, shard.slices, strict=True))


@pytest.mark.parametrize(("when", "pushes"), [(Stale(1), 2), (Bulk(), 1)])
def test_a_worker_that_is_not_admitted_reads_nothing(when, pushes):
    shard = shard_of("shared", when, Sgd(lr=0.5), Raw())
    *_, read = [push_that_reads(shard) for _ in range(pushes)]
    assert read.version == -1
    assert not any(x.any() for x in read.into)


def test_a_pull_of_weights_that_the_push_has_read_needs_no_lock(monkeypatch):
    names, lock = [], VirtualTransport.lock
    monkeypatch.setattr(VirtualTransport, "lock", lambda port, name: names.append(name) or lock(port, name))
    data = TensorDataset(torch.randn(40, 4), torch.randn(40, 2))
    task = mh.Task(model=lambda: nn.Linear(4, 2), data=data, loss=nn.functional.mse_loss, batch_size=4)
    mh.train(task, mh.ssp(lr=0.1), cluster=mh.Cluster(workers=1), steps=10)
    setup, first_pull, done, final = 1, 1, 1, 1
    assert len(names) == setup + first_pull + 10 + done + final

"""A witness of virtual runs: it looks over every rank's shoulder and notes what becomes of each gradient.

    gradient (rank, step) -> push (rank, number) -> pending in a slot of a shard -> part of an update, or refused

If workers are in groups, an aggregator makes one push of several, and its slot stands for all of them.

Nothing is changed but one thing: a run that goes on for very many events is ended, since it would go on for ever.
"""

from collections import Counter, defaultdict
from functools import wraps
from itertools import chain

import torch

from manyhands.core.encoder import Encoder
from manyhands.core.worker import Worker
from manyhands.servers.aggregation import AggregatorUplink
from manyhands.servers.clock_table import ClockTable
from manyhands.servers.shard import Shard
from manyhands.servers.shared_memory_shard import SharedMemoryShard
from manyhands.strategies.elastic import Elastic
from manyhands.strategies.local_steps import LocalSteps
from manyhands.strategies.sandblaster.coordinator import Coordinator
from manyhands.strategies.sandblaster.vector_server import VectorServer
from manyhands.strategies.server import Server
from manyhands.virtual.kernel import Kernel

MOST_EVENTS = 300_000
"""A run of our schedules has some thousands."""


class GoesOnForEver(AssertionError):
    """Much happens, and nothing comes of it."""


class Witness:
    """What was seen since `begin`. Shards go by the spans they keep, workers by rank, pushes of a worker by number."""

    def __init__(self, patch):
        self.begin()
        for kind, name in (
            *[(Kernel, "wait"), (Worker, "gradient"), (Server, "_push"), (Encoder, "encode"), (Server, "_pull")],
            *[(Server, "finish"), (Shard, "push"), (Shard, "pull"), (Shard, "_settle"), (Shard, "_update")],
            *[(Shard, "_drop_outdated"), (ClockTable, "add_pending"), (Elastic, "finish"), (LocalSteps, "_combine")],
            *[(Coordinator, "_improve"), (VectorServer, "_close")],
            *[(AggregatorUplink, "__init__"), (AggregatorUplink, "push"), (AggregatorUplink, "_push_sum")],
        ):
            patch.setattr(kind, name, self._seen(getattr(kind, name), f"{kind.__name__.lower()}_{name.strip('_')}"))

    def begin(self, aggregators=()):
        """Forget everything; `aggregators` are the ranks that push for groups of workers, if there are any."""
        self.gradients = defaultdict(list)  # rank: (step, gradient)
        self.payloads = defaultdict(list)  # rank: for each push what it says, as numbers, and of how many steps
        self.answered = Counter()  # rank: how many pushes it knows the outcome of, by a pull or in shared memory
        self.left_over = {}  # rank: the codec's memory at the end, if it came to one
        self.updates = defaultdict(list)  # shard: groups of (worker, push, staleness)
        self.refused = defaultdict(set)  # shard: (worker, push)
        self.slowest_read = Counter()  # shard and worker: the slowest clock when it was last let in
        self.gaps = []  # how far ahead of the slowest somebody was when let in
        self.ahead = {}  # rank and step: how far ahead of what it had read a gradient was computed
        self.replicas = {}  # rank: an elastic worker's own weights at the end
        self.combined = defaultdict(list)  # rank: its weights after each round
        self.batches = []  # those of Sandblaster: portions
        self.sums = []  # those of Sandblaster: where, of what, and how much
        self._aggregators = aggregators
        self._held = defaultdict(list)  # shard and aggregator: (worker, push), which have not gone up
        self._risen = defaultdict(list)  # shard and aggregator: for each push of its own what it is made of
        self._pushes = Counter()
        self._slots = {}  # shard and slot: (worker, push), of which what lies there is made
        self._current = None

    def _seen(self, original, look):
        look = getattr(self, f"_{look}")

        @wraps(original)
        def method(*args, **knobs):
            return look(original, *args, **knobs)

        return method

    # -- everywhere -------------------------------------------------------------------------------

    def _kernel_wait(self, wait, kernel, *why):
        if kernel.events > MOST_EVENTS:
            raise GoesOnForEver(f"{kernel.events} events until virtual time {kernel.now}")
        return wait(kernel, *why)

    def _worker_gradient(self, gradient, w, *rest, **knobs):
        loss = gradient(w, *rest, **knobs)
        self.gradients[w.rank].append((w.step, w.flat.groups[0].grad.clone()))
        return loss

    # -- parameter servers: a worker --------------------------------------------------------------

    def _server_push(self, push, server, w):
        clock, shards = len(self.payloads[w.rank]), {shard for shard, i in self.slowest_read if i == w.rank}
        self.ahead[w.rank, w.step] = max((clock - self.slowest_read[shard, w.rank] for shard in shards), default=clock)
        self.payloads[w.rank].append((torch.zeros_like(w.flat.groups[0].grad), max(1, server.accruals)))
        push(server, w)
        if all(isinstance(client, SharedMemoryShard) for client in server.clients):
            self.answered[w.rank] = len(self.payloads[w.rank])

    def _encoder_encode(self, encode, sender, grad, span):
        payload = encode(sender, grad, span)
        sender.codec.decode(payload, self.payloads[sender._w.rank][-1][0][span.start : span.stop])
        return payload

    def _server_pull(self, pull, server, w):
        pull(server, w)
        self.answered[w.rank] = len(self.payloads[w.rank])

    def _server_finish(self, finish, server, w):
        finish(server, w)
        remains = server.encoder.memory[0]
        self.left_over[w.rank] = None if remains is None else remains.clone()

    # -- parameter servers: a shard ---------------------------------------------------------------

    def _shard_push(self, push, shard, i, *rest, **knobs):
        name, number = _name(shard), self._next(_name(shard), i)
        self._current = name, self._risen[name, self._aggregators[i]][number] if self._aggregators else [(i, number)]
        freed = push(shard, i, *rest, **knobs)
        if self._current is not None:
            self.refused[name] |= set(self._current[1])
        self._current = None
        return freed

    def _clocktable_add_pending(self, add_pending, clocks, i, seen=0, *more):
        slot = add_pending(clocks, i, seen, *more)
        if self._current is not None:
            name, pushes = self._current
            self._slots[name, slot] = pushes
            self._current = None
        return slot

    def _next(self, *who):
        """The number of a push."""
        self._pushes[who] += 1
        return self._pushes[who] - 1

    def _shard_update(self, update, shard, group, read):
        name, version = _name(shard), shard.clocks.version
        if group:
            pushes = [(*push, version - one.seen) for one in group for push in self._slots[name, one.slot]]
            self.updates[name].append(pushes)
        update(shard, group, read)

    def _shard_drop_outdated(self, drop, shard):
        before, name = set(shard.clocks.all_pending()), _name(shard)
        drop(shard)
        dropped = before - set(shard.clocks.all_pending())
        self.refused[name] |= set(chain(*(self._slots[name, one.slot] for one in dropped)))

    def _shard_pull(self, pull, shard, i, *rest):
        admitted = pull(shard, i, *rest)
        self._let_in(shard, [i] if admitted else [])
        return admitted

    def _shard_settle(self, settle, shard, *rest):
        freed = settle(shard, *rest)
        self._let_in(shard, freed)
        return freed

    def _let_in(self, shard, workers):
        for i in workers:
            clock, slowest, *_ = shard.clocks.worker_clock(i)
            self.gaps.append(clock - slowest)
            self.slowest_read[_name(shard), i] = slowest

    # -- parameter servers: an aggregator --------------------------------------------------------

    def _aggregatoruplink_init(self, init, branch, w, server, spans, *rest):
        init(branch, w, server, spans, *rest)
        branch.seen_as = tuple(spans), w.rank

    def _aggregatoruplink_push(self, push, branch, child, *rest):
        shard, aggregator = branch.seen_as
        self._held[shard, aggregator].append((child, self._next("child", shard, child)))
        push(branch, child, *rest)

    def _aggregatoruplink_push_sum(self, push_sum, branch):
        self._risen[branch.seen_as].append(self._held.pop(branch.seen_as))
        push_sum(branch)

    # -- others -----------------------------------------------------------------------------------

    def _elastic_finish(self, finish, elastic, w):
        finish(elastic, w)
        self.replicas[w.rank] = w.flat.groups[0].weights.clone()

    def _localsteps_combine(self, combine, local, w, *rest):
        combine(local, w, *rest)
        self.combined[w.rank].append(w.flat.groups[0].weights.clone())

    def _coordinator_improve(self, improve, coordinator):
        brought = coordinator._waiting
        self.batches.append([portion for rank in sorted(brought) for portion in brought[rank]])
        return improve(coordinator)

    def _vectorserver_close(self, close, server, *rest):
        point, total = server._point[0].clone(), server._sum.total[0].clone()
        self.sums.append((len(self.batches) - 1, server._vectors.spans[0], point, total))
        close(server, *rest)


def _name(shard):
    return tuple(weight_slice.span for weight_slice in shard.slices)

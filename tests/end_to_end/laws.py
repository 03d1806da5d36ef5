"""What must hold of any run, whatever happened in it: no gradient is lost, none counts twice, nobody reads too old.

Each law looks at a schedule, at what its witness saw, and at the result. Most say what the weights must be, given the
gradients that were computed: with SGD that is a sum, whose every term can be accounted for.
"""

from collections import Counter
from itertools import zip_longest

import torch

from manyhands.strategies.growing_batch import GrowingBatch

from .schedules import ELASTIC, LAYERS, PEERS, SERVED, SHARED, TOGETHER, WIDTH
from .small import steps_of


def check(schedule, seen, result):
    """All laws that this method is under."""
    _names_whom_it_lost(schedule, result)
    _uses_its_budget(schedule, result)
    laws = {**dict.fromkeys(SERVED, _serves), **dict.fromkeys(ELASTIC, _springs), **dict.fromkeys(PEERS, _mixes)}
    laws |= {**dict.fromkeys(TOGETHER, _combines), **dict.fromkeys(SHARED, _writes)}
    laws |= {"adaptive_batch": _grows, "asysvrg": _descends, "sandblaster": _searches}
    laws[schedule.method](schedule, seen, result)


def _names_whom_it_lost(schedule, result):
    assert dict(result.lost).items() <= schedule.doomed.items()


def _uses_its_budget(schedule, result):
    """All that may be missing is the mini-batch that each of the lost died over."""
    taken = Counter(line["rank"] for line in steps_of(result))
    lost = {rank for rank, _ in result.lost if rank < schedule.workers}
    if schedule.strategy.traits.lockstep:
        assert all(taken[rank] == schedule.steps for rank in range(schedule.workers) if rank not in lost)
    else:
        budget = schedule.steps * schedule.workers
        assert budget - len(lost) <= sum(taken.values()) <= budget


# -- what the weights must be ---------------------------------------------------------------------


def _equal(weights, expected):
    assert torch.allclose(weights, expected, rtol=1e-9, atol=1e-9), f"{weights} is not {expected}"


def _weights(result):
    return torch.cat([x.flatten() for x in result.weights.values()])


def _sum(vectors):
    return sum(vectors, torch.zeros(LAYERS * WIDTH, dtype=torch.float64))


def _all(seen):
    return _sum(g for of_rank in seen.gradients.values() for _, g in of_rank)


def _combines(schedule, seen, result):
    """After a round all are alike; in the end each gradient of P workers has counted 1/P."""
    for of_round in zip_longest(*seen.combined.values()):
        assert all(torch.equal(x, of_round[0]) for x in of_round if x is not None)
    knobs = schedule.knobs
    has_inertia = knobs.get("block_momentum", 0.0) != 0.0 or knobs.get("outer_momentum", 0.0) != 0.0
    if schedule.is_plain and not has_inertia and knobs.get("by", "samples") == "samples":
        _equal(_weights(result), -schedule.lr * _all(seen) / schedule.workers)


def _grows(schedule, seen, result):
    """An update is the mean of some steps' gradients, and the last one may be smaller."""
    strategy, expected, steps = schedule.strategy, _sum([]), []
    assert isinstance(strategy, GrowingBatch)
    for step in range(schedule.steps):
        steps.append(step)
        size, slower = strategy._phase_at(step / schedule.steps)
        if len(steps) >= size or step == schedule.steps - 1:
            gradients = [g for of_rank in seen.gradients.values() for at, g in of_rank if at in steps]
            expected -= schedule.lr / slower * _sum(gradients) / (len(steps) * schedule.workers)
            steps = []
    if schedule.is_plain:
        _equal(_weights(result), expected)


def _writes(schedule, seen, result):
    """In virtual time nobody writes while another does, so every step counts."""
    taken = {(line["rank"], line["step"] - 1) for line in steps_of(result)}
    gradients = [g for rank, of_rank in seen.gradients.items() for step, g in of_rank if (rank, step) in taken]
    if schedule.is_plain:
        _equal(_weights(result), -schedule.lr * _sum(gradients))


def _descends(schedule, seen, result):
    """On a straight line every gradient of an epoch is corrected to their mean."""
    full, inner = schedule.knobs["full_steps"], schedule.knobs["inner_steps"]
    expected = _sum([])
    for epoch in range(0, schedule.steps, full + inner):
        of_epoch = [(at - epoch, g) for of_rank in seen.gradients.values() for at, g in of_rank if at >= epoch]
        means = [g for place, g in of_epoch if place < full]
        steps = min(inner, max(0, schedule.steps - epoch - full)) * schedule.workers
        expected -= schedule.lr * steps * _sum(means) / len(means)
    if schedule.toy == "counters":
        _equal(_weights(result), expected)


def _mixes(schedule, seen, result):
    """Averages that keep the mean are moved by gradients alone; all others stay within what was computed."""
    keeps = schedule.knobs.get("mode", "pairwise") == "pairwise" and not result.lost
    if schedule.is_plain and keeps:
        _equal(_weights(result), -schedule.lr * _all(seen) / schedule.workers)
    elif schedule.is_plain and schedule.toy == "counters":
        assert (_weights(result) >= -1e-9).all() and (_weights(result) <= -schedule.lr * _all(seen) + 1e-9).all()


def _springs(schedule, seen, result):
    """What the centre gains the workers lose: together they move by gradients alone, which may have inertia."""
    delta, moved = schedule.knobs.get("momentum", 0.0), _sum([])
    for of_rank in seen.gradients.values():
        for place, (_, g) in enumerate(of_rank):
            moved -= schedule.lr * g * sum(delta**n for n in range(len(of_rank) - place))
    if schedule.is_plain and not result.lost:
        _equal(_weights(result) + _sum(seen.replicas.values()), moved)


# -- parameter servers ----------------------------------------------------------------------------


def _serves(schedule, seen, result):
    lost = {rank for rank, _ in result.lost}
    for shard in seen.updates:
        _counts_once(schedule, seen, shard, lost)
    _hands_over_all(schedule, seen)
    _agrees(schedule, seen, lost)
    if schedule.is_plain and not schedule.knobs.get("strength") and schedule.knobs.get("momentum", 0.0) is not None:
        _equal(_weights(result), -schedule.lr * _applied(schedule, seen))
    if schedule.method == "ssp":
        _stays_within_bounds(schedule, seen, result)


def _counts_once(schedule, seen, shard, lost):
    """At every shard, each push is part of one update, or refused by a method that refuses the late."""
    applied = Counter((worker, push) for group in seen.updates[shard] for worker, push, _ in group)
    assert not applied or max(applied.values()) == 1, "no gradient counts twice"
    decided = seen.refused if schedule.strategy.when.scope == "job" else [shard]
    refused = set().union(*(seen.refused[one] for one in decided))
    assert not seen.refused[shard] & applied.keys(), "what was refused does not count"
    assert not refused or schedule.method in ("backup_workers", "k_sync"), "only these refuse anything"
    for rank, pushed in seen.payloads.items():
        certain = seen.answered[rank] if rank in lost else len(pushed)
        missing = {(rank, push) for push in range(certain)} - applied.keys() - refused
        assert not missing, f"pushes {sorted(missing)} were lost at shard {shard}"


def _applied(schedule, seen):
    """The sum of all updates: each is the mean of its gradients, and old ones may count for less.

    Where nothing is merged but inside a group, each is the sum of them.
    """
    total, merges = _sum([]), schedule.strategy.when.merges
    fresh = {"staleness_aware": lambda lag: 1 / max(1, lag), "dyn_sgd": lambda lag: 1 / (lag + 1)}
    if schedule.knobs.get("modulated"):
        fresh["softsync"] = fresh["staleness_aware"]
    counts = fresh.get(schedule.method, lambda lag: 1)
    for shard, groups in seen.updates.items():
        for group in groups:
            for worker, push, lag in group:
                for _, start, stop in shard:
                    payload, _ = seen.payloads[worker][push]
                    total[start:stop] += payload[start:stop] * counts(lag) / (len(group) if merges else 1)
    return total


def _hands_over_all(schedule, seen):
    """What a worker has pushed, and what its codec still remembers, is all it has computed."""
    for rank, memory in seen.left_over.items():
        gradients, expected = [g for _, g in seen.gradients[rank]], _sum([])
        for _, steps in seen.payloads[rank]:
            expected += _sum(gradients[:steps]) / (steps if schedule.strategy.push_mean else 1)
            gradients = gradients[steps:]
        assert not gradients, "some were never pushed"
        told = _sum(payload for payload, _ in seen.payloads[rank])
        _equal(told if memory is None else told + memory - _taken_back(seen, rank), expected)


def _taken_back(seen, rank):
    """What a codec has got back, since it was refused."""
    back = _sum([])
    for shard, refused in seen.refused.items():
        for worker, push in refused:
            if worker == rank and push < seen.answered[rank]:
                for _, start, stop in shard:
                    back[start:stop] += seen.payloads[rank][push][0][start:stop]
    return back


def _agrees(schedule, seen, lost):
    """If one shard decides for all, all have made the same updates, but for what the lost had no time to tell all."""
    if schedule.strategy.when.scope == "job":
        first, *others = [
            [[(worker, push) for worker, push, _ in group if worker not in lost] for group in groups]
            for groups in seen.updates.values()
        ]
        for other in others:
            assert [group for group in other if group] == [group for group in first if group]


def _stays_within_bounds(schedule, seen, result):
    """Nobody is let in, and no gradient is computed, further ahead than s; and what is recorded is what was."""
    s = schedule.knobs["staleness"]
    assert all(gap <= s for gap in seen.gaps)
    recorded = {(line["rank"], line["step"] - 1): line["ahead"] for line in steps_of(result)}
    assert all(ahead <= s for ahead in recorded.values())
    if not schedule.aggregators:  # whoever comes by itself is seen by the shard itself
        assert all(ahead <= s for ahead in seen.ahead.values())
        assert recorded.items() <= seen.ahead.items()


# -- Sandblaster ----------------------------------------------------------------------------------


def _searches(schedule, seen, result):
    """Every mini-batch is part of one batch; of every pass the gradient is the sum over the whole batch."""
    portions = Counter((one.owner, one.step, one.start) for batch in seen.batches for one in batch)
    assert max(portions.values()) == 1, "no sample counts twice"
    lost, full = {rank for rank, _ in result.lost}, schedule.knobs["batches"]
    taken = Counter(line["rank"] for line in steps_of(result))
    certain = {rank: n - n % full if rank in lost else n for rank, n in taken.items()}
    brought = {(rank, step) for rank, n in certain.items() for step in range(n)}
    assert brought <= {(owner, step) for owner, step, _ in portions}, "no mini-batch is lost"
    for number, (_, start, stop), point, total in seen.sums:
        a, b = (torch.cat([one.fields[n] for one in seen.batches[number]]).repeat(1, LAYERS) for n in (0, 1))
        _equal(total, (a[:, start:stop] * point - b[:, start:stop]).sum(0))

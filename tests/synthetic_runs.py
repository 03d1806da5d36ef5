"""Lines of runs that never ran, as the loop writes them, with known times: for tests of reports."""

import math
import random

from manyhands.report.reading import of_lines

MADE = {
    "started": "2026-01-01T00:00:00+00:00",
    "command": "manyhands train ssp --seed 0",
    "versions": {"manyhands": "0.0", "torch": "0.0"},
    "machine": {"platform": "Linux", "processor": "a processor", "cores": 2, "memory_bytes": 8_000_000_000},
}


def header(method="ssp:staleness=3", *, seed=0, workers=4, task="digits", world="virtual", cluster=None, **more):
    """The first line."""
    machines = {"workers": workers, "servers": 0, "faults": [], "stragglers": [], **(cluster or {})}
    return {
        "kind": "header",
        "format": 3,
        "task": task,
        "method": method,
        "strategy": f"Strategy({method})",
        "world": world,
        "link": None if world == "virtual" else "shm",
        "cluster": machines if world == "virtual" else None,
        "workers": workers,
        "servers": 0,
        "replicas": workers,
        "seed": seed,
        "start": 0,
        "steps": 100,
        "batch_size": 32,
        "evaluate_every": 10,
        "remarks": [],
        "participants": [{"role": "worker", "rank": rank, "host": rank} for rank in range(workers)],
        "made": MADE,
        **more,
    }


def step(rank, number, began, seconds=0.1, loss=1.0, lag=0):
    """One step: a fifth waiting, half computing, a tenth each for encoding and sending, a tenth for the rest."""
    return {
        "kind": "step",
        "step": number,
        "rank": rank,
        "time": began + seconds,
        "loss": loss,
        "samples": 32,
        "bytes": 1000 * number,
        "lag": lag,
        "waited": 0.2 * seconds * number,
        "began": began,
        "compute_began": began + 0.1 * seconds,
        "compute": 0.5 * seconds,
        "encode": 0.1 * seconds,
        "wait": 0.2 * seconds,
        "send": 0.1 * seconds,
    }


def lines(steps=40, *, seed=0, workers=4, evaluate_every=10, end=None, speed=1.0, **more):
    """A whole record; rank 0 takes twice as long as the others, and all pause for evaluations."""
    chance, lines_made = random.Random(seed), [header(seed=seed, workers=workers, **more)]
    clocks = [0.0] * workers
    for number in range(1, steps // workers + 1):
        for rank in range(workers):
            seconds = speed * (0.2 if rank == 0 else 0.1) * chance.uniform(0.9, 1.1)
            loss = 2.3 * math.exp(-3 * number * workers / steps) * chance.uniform(0.8, 1.2)
            lines_made.append(step(rank, number, clocks[rank], seconds, loss, chance.randrange(4)))
            clocks[rank] += seconds
        if number % evaluate_every == 0:
            accuracy = min(0.99, 0.5 + number * workers / steps / 2)
            lines_made.append({"kind": "evaluation", "evaluated": number, "time": max(clocks), "accuracy": accuracy})
            stop = max(clocks) + 0.05
            pause = {"kind": "pause", "to": stop, "bytes": 10}
            lines_made += [{**pause, "paused": rank, "from": clocks[rank]} for rank in range(workers)]
            clocks = [stop] * workers
    lines_made += [{"kind": "memory", "held": rank, "bytes": 1_000_000 + rank} for rank in range(workers)]
    lines_made.append(
        {"kind": "end", "end": True, "seconds": max(clocks), "wall_seconds": 1.0, "samples": 32 * steps}
        | {"final_loss": 0.1}
        | {"test_accuracy": 0.97, "bytes_sent": 1000 * steps, "weights_sha256": "0" * 64, "lost": []}
        | (end or {})
    )
    return lines_made


def made(steps=40, **more):
    """A run of such lines."""
    return of_lines(lines(steps, **more))


def failed(**more):
    """A run that failed because a rank was lost."""
    end = {"kind": "end", "end": True, "error": "rank 2 is lost: it died", "error_kind": "PeerLost"}
    return of_lines([*lines(**more)[:-5], {**end, "lost": [[2, "it died"]]}])

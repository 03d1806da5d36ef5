"""Lines of records, written by hand."""


def header(workers=1, replicas=None, servers=0, method="bsp", task="digits", seed=0, bounded=True, **more):
    people = [{"role": "worker" if rank < workers else "server", "rank": rank, "host": 0} for rank in range(workers)]
    facts = {
        "kind": "header",
        "format": 3,
        "task": task,
        "method": method,
        "world": "virtual",
        "workers": workers,
        "servers": servers,
    }
    facts |= {"replicas": workers if replicas is None else replicas, "seed": seed, "bounded": bounded, "steps": 10}
    return {**facts, "participants": people, "remarks": [], "cluster": None, **more}


def step(rank, number, began, time, *, loss=1.0, samples=32, bytes=0, lag=0, compute=0.5, encode=0, wait=0, send=0):
    line = {
        "kind": "step",
        "step": number,
        "rank": rank,
        "time": time,
        "loss": loss,
        "samples": samples,
        "bytes": bytes,
        "lag": lag,
    }
    line |= {"waited": wait, "began": began, "compute_began": began, "compute": compute, "encode": encode}
    return {**line, "wait": wait, "send": send}


def evaluated(after, time, accuracy):
    return {"kind": "evaluation", "evaluated": after, "time": time, "accuracy": accuracy}


def paused(rank, start, stop, nbytes=0):
    return {"kind": "pause", "paused": rank, "from": start, "to": stop, "bytes": nbytes}


def end(accuracy=None, bytes_sent=0):
    facts = {
        "kind": "end",
        "end": True,
        "seconds": 1.0,
        "wall_seconds": 1.0,
        "test_accuracy": accuracy,
        "bytes_sent": bytes_sent,
    }
    return {**facts, "lost": []}

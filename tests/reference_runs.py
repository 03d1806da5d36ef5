"""Reference runs: what every method of the catalog computes, as a table to compare before and after a change.

    python tests/reference_runs.py write before.json     # before the change
    python tests/reference_runs.py check before.json     # after it: exit code 1 and the rows that differ
    python tests/reference_runs.py check before.json ssp bsp     # only these methods

A row is the SHA-256 of the final weights and, in virtual time, the bytes sent and the seconds. A run has 4 workers
(a pipeline as many as it has stages), a fixed seed and 40 steps of `digits`; `hybrid` trains on `text`. Methods that
give the same bits in both worlds also run with 2 real processes on every link. The hashes depend on how the processor
rounds, so a table is valid on the machine that wrote it.
"""

import json
import os
import sys
from pathlib import Path

import manyhands as mh
from every_method import METHODS, links, repeats, workers_up_to

STEPS = 40


def virtual(name):
    """One run in virtual time."""
    strategy = METHODS[name]()
    workers = 4 if name == "hybrid" else workers_up_to(strategy, 4)
    cluster = mh.Cluster(workers=workers, hosts=1 if strategy.traits.one_host else None)
    result = mh.train(*_task(name, strategy), cluster=cluster, steps=STEPS, seed=1, data=_data(name))
    return {"weights": result.weights_sha256, "bytes": result.bytes_sent, "seconds": result.seconds}


def real(name, link):
    """The same by 2 processes of this machine."""
    result = mh.train(*_task(name, METHODS[name]()), workers=2, link=link, steps=STEPS, seed=1, data=_data(name))
    return {"weights": result.weights_sha256}


def _task(name, strategy):
    return ("text" if name == "hybrid" else "digits"), strategy


def _data(name):
    return Path(os.environ["MANYHANDS_DATA"]) / "text" if name == "hybrid" else None


def table(names):
    """The rows of these methods, by what was run."""
    rows = {}
    for name, recipe in ((name, METHODS[name]) for name in names):
        rows[f"{name} virtual"] = virtual(name)
        for link in links(recipe()) if repeats(recipe()) else ():
            rows[f"{name} {link}"] = real(name, link)
        print(name, file=sys.stderr, flush=True)
    return rows


def main(verb, path, *names):
    """The exit code: 0 if the table was written, or is equal."""
    found = table(names or METHODS)
    if verb == "write":
        Path(path).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return 0
    wanted = json.loads(Path(path).read_text(encoding="utf-8"))
    wanted = {key: row for key, row in wanted.items() if not names or key.rpartition(" ")[0] in names}
    differing = [key for key in sorted(found.keys() | wanted.keys()) if found.get(key) != wanted.get(key)]
    for key in differing:
        print(f"{key}: {wanted.get(key)} before, {found.get(key)} now")
    print(f"{len(found)} runs, {len(differing)} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

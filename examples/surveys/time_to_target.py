"""Time to target of six methods with 4 to 64 workers, some of them slow.

Surveys describe the strengths of each method; here BSP, SSP, Downpour, DC-ASGD, EASGD and BMUF train one classifier
in the same virtual clusters, with 4 to 64 workers. The time of a step varies at random, and one worker of eight takes
twice as long. Learning rates are the defaults; where updates of all workers are summed (ssp, downpour, dc-asgd), they
are reduced with more than eight workers. EASGD is asynchronous, as in its paper's comparison with Downpour. The batch
size per worker is constant.

The setting matters: with one worker of eight always four times as slow, and no random variation, SSP took longer than
BSP (a speed-up of 0.80 with 4 workers), because bounded staleness waits for such a worker as well.

    python time_to_target.py                       # 4, 8, 16, 32 and 64 workers: six minutes
    python time_to_target.py --workers 4 16 --target 0.95 --seeds 3
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from _drawing import Figure, draw

import manyhands as mh
from manyhands.tasks import load

BATCH = 8
WORK = 6e6
"""Operations per sample: a step computes for about a millisecond, several times as long as sending its gradient."""
FACTOR = 2
JITTER = 0.6
EVALUATIONS = 20
METHODS = ("bsp", "ssp", "downpour", "dc-asgd", "easgd", "bmuf")

Row = dict[str, Any]
Found = dict[int, dict[str, Row]]
"""By number of workers, then by method."""


def strategies(workers: int) -> dict[str, Any]:
    """The methods; `less` scales the learning rate where updates of all workers are summed."""
    less = min(1.0, 8 / workers)
    return {
        "bsp": mh.bsp(),
        "ssp": mh.ssp(staleness=3, lr=0.05 * less),
        "downpour": mh.downpour(lr=0.03 * less),
        "dc-asgd": mh.dc_asgd(lr=0.05 * less),
        "easgd": mh.easgd(asynchronous=True),
        "bmuf": mh.bmuf(),
    }


def cluster(workers: int) -> mh.Cluster:
    """One worker of every eight is slow, at least one, and all vary at random."""
    slow = mh.Slow(ranks=range(0, workers, 8), factor=FACTOR)
    return mh.Cluster(workers=workers, stragglers=slow, jitter=JITTER)


def run(workers: int, target: float, epochs: float, seeds: int) -> dict[str, Row]:
    """All methods in one cluster; a row for each."""
    found = mh.compare(
        replace(load("digits"), work=WORK),
        strategies(workers),
        cluster=cluster(workers),
        batch_size=BATCH,
        epochs=epochs,
        seeds=seeds,
        evaluations=EVALUATIONS,
        target=f"accuracy={target}",
    )
    return {row["method"]: row for row in found.rows}


def seconds(row: Row) -> float | None:
    time: float | None = row["seconds_to_target"] if row["reached"] == row["seeds"] else None
    return time


def times(a: Row, b: Row) -> str:
    """The time to target of a, relative to that of b."""
    if seconds(a) is None or seconds(b) is None:
        return "not reached"
    return f"{seconds(a) / seconds(b):.2f}x"  # type: ignore[operator]


def print_times(found: Found, target: float) -> None:
    print(f"virtual seconds until {target:.0%} of the test samples are classified correctly\n")
    print(f"{'workers':12}" + "".join(f"{workers:>14}" for workers in found))
    for name in METHODS:
        cells = [seconds(rows[name]) for rows in found.values()]
        print(f"{name:12}" + "".join(f"{'not reached' if cell is None else f'{cell:.3f}':>14}" for cell in cells))
    print("\nsamples per virtual second\n")
    for name in METHODS:
        print(f"{name:12}" + "".join(f"{rows[name]['samples_per_second']:>14,.0f}" for rows in found.values()))


def print_claims(found: Found) -> None:
    """The claims of the papers, and the results here."""
    first, last = min(found), max(found)
    few, many = found[first], found[last]
    growth = many["bmuf"]["samples_per_second"] / few["bmuf"]["samples_per_second"]
    claims = {
        "SSP: sooner than BSP": "yes",
        "EASGD: faster than Downpour": "yes",
        "DC-ASGD: as accurate as one worker": "yes",
        f"BMUF: near-linear up to 64 ({last // first}x here)": "near-linear",
    }
    ours = [
        f"{times(few['bsp'], few['ssp'])} with {first}, {times(many['bsp'], many['ssp'])} with {last} workers",
        f"{times(few['downpour'], few['easgd'])} with {first}, {times(many['downpour'], many['easgd'])} with {last}",
        f"{many['dc-asgd']['accuracy']:.3f} with {last}; bsp {many['bsp']['accuracy']:.3f}",
        f"{growth:.1f}x the samples per second",
    ]
    print(f"\n{'what the paper says':48}{'paper':14}ours")
    for (claim, paper), here in zip(claims.items(), ours, strict=True):
        print(f"{claim:48}{paper:14}{here}")
    print(
        "\nThe papers trained speech and image models on real machines; this is a small classifier, whose times are "
        "those of a\nformula. The order depends on the target, the learning rates and the slowness of the stragglers: "
        "all are options."
    )


def figure_of(found: Found, target: float) -> Figure:
    """Time to target over the number of workers, a line for each method."""
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": list(found),
            "y": [seconds(rows[name]) for rows in found.values()],
        }
        for name in METHODS
    ]
    layout = {
        "title": {"text": f"Virtual seconds until {target:.0%} accuracy"},
        "xaxis": {"type": "log", "title": {"text": "workers"}, "tickvals": list(found)},
        "yaxis": {"type": "log", "title": {"text": "virtual seconds"}},
    }
    return {"data": data, "layout": layout}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="numbers of workers")
    parser.add_argument("--target", type=float, default=0.93, help="the accuracy to reach")
    parser.add_argument("--epochs", type=float, default=20, help="passes over the data, for every method")
    parser.add_argument("--seeds", type=int, default=1, help="repetitions; the median is shown")
    parser.add_argument("--small", action="store_true", help="4 and 8 workers, 6 passes; overrides the other options")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/surveys/time_to_target"), help="the folder of the figure"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    if given.small:
        given.workers, given.epochs, given.target = [4, 8], 6, 0.8
    found = {n: run(n, given.target, given.epochs, given.seeds) for n in sorted(set(given.workers))}
    print_times(found, given.target)
    print_claims(found)
    print(draw(figure_of(found, given.target), given.out / "time_to_target.html"))


if __name__ == "__main__":
    main()

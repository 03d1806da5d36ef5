"""Parameter servers that keep whole layers or spans of equal size: the speed-up of VGG-16 with more workers.

A paper on parameter sharding (VGG-16, ImageNet-1K, one server per two workers, 10 Gbit/s) reports in its Figure 2 that
shards of equal size are 20 % faster than shards of whole layers with 4 workers, and 66 % with 8: one layer has three
quarters of all weights, and all workers wait for the server that keeps it.

Here the method runs in a virtual cluster, with sizes only, beside a closed form:

    T = t_c + a max(N b / B, max_j P N_j b / B)

N parameters of b bytes, N_j of them at server j, P workers, links of B bytes per second each way; a = 2, because the
new weights are read only after all workers have pushed. The paper gives neither the assignment of layers to servers nor
the compute time of a step (t_c). Both are parameters here, and t_c is fitted to the first of the paper's two numbers.

Examples:
    parameter_sharding.py
    parameter_sharding.py --rule layer --steps 16
    parameter_sharding.py --compute-seconds 2 --out runs/mine
"""

import argparse
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from _drawing import Figure, draw

import manyhands as mh
from manyhands.core.flat import Flat
from manyhands.core.port import REFERENCE_FLOPS
from manyhands.core.sharding import WAYS
from manyhands.core.work import work_of
from manyhands.tasks import load

WORKERS = (1, 2, 4, 8)
PAPER = {4: 0.20, 8: 0.66}
"""By how much shards of equal size are faster, by the number of workers."""
RULES = {
    "round-robin": "layers in turn",
    "layer": "layers, the largest first",
    "blocks": "layers in blocks",
    "variables": "weights and biases in turn",
}
"""Possible assignments of layers to servers; the library runs the first two."""
BYTES = 4
BANDWIDTH = 10e9 / 8
WAYS_OF_A_STEP = 2
"""a: weights are sent after gradients, not at the same time."""


@cache
def shard_sizes(rule: str, servers: int) -> list[int]:
    """The number of parameters of each server."""
    variables = dict(load("vgg16").build(0).named_parameters())
    if rule in WAYS:
        return [sum(span.numel for span in spans) for spans in WAYS[rule](Flat(variables), servers)]
    sizes = [x.numel() for x in variables.values()]
    if rule == "variables":
        return [sum(sizes[first::servers]) for first in range(servers)]
    layers = [weight + bias for weight, bias in zip(sizes[::2], sizes[1::2], strict=True)]
    block = math.ceil(len(layers) / servers)
    return [sum(layers[first : first + block]) for first in range(0, len(layers), block)]


def servers_of(workers: int) -> int:
    return max(1, workers // 2)


def wire_seconds(rule: str, workers: int) -> float:
    """How long the busiest link is busy in one direction."""
    sizes = shard_sizes(rule, servers_of(workers))
    return max(sum(sizes), workers * max(sizes)) * BYTES / BANDWIDTH


def closed_form(rule: str, workers: int, compute_seconds: float) -> float:
    """Seconds of a step by the formula."""
    return compute_seconds + WAYS_OF_A_STEP * wire_seconds(rule, workers)


def fitted_seconds(rule: str) -> float:
    """The t_c with which the closed form gives the paper's number for 4 workers."""
    gap = PAPER[4]
    return WAYS_OF_A_STEP * (wire_seconds(rule, 4) - (1 + gap) * wire_seconds("size", 4)) / gap


def run(rule: str, workers: int, compute_seconds: float, steps: int) -> float:
    """Seconds of a step in the virtual cluster: the mean of `steps` steps after the first."""
    task = load("vgg16")
    speed = task.batch_size * work_of(task.build(0)).total / REFERENCE_FLOPS / compute_seconds
    cluster = mh.Cluster(workers, servers_of(workers), bandwidth=BANDWIDTH, speeds=[speed] * workers)
    result = mh.train(task, mh.bsp_server(shard=rule), cluster=cluster, steps=steps + 1)
    first, last = (max(x["time"] for x in result.records if x.get("step") == n) for n in (1, steps + 1))
    return (last - first) / steps


Steps = dict[str, dict[int, float]]
"""For "layer" and "size" the seconds of a step, by the number of workers."""


def steps_by_formula(rule: str, compute_seconds: float) -> Steps:
    ways = {"layer": rule, "size": "size"}
    return {how: {P: closed_form(way, P, compute_seconds) for P in WORKERS} for how, way in ways.items()}


def steps_by_run(rule: str, compute_seconds: float, steps: int) -> Steps:
    ways = {"layer": rule, "size": "size"}
    return {how: {P: run(way, P, compute_seconds, steps) for P in WORKERS} for how, way in ways.items()}


def speed_ups(seconds: dict[int, float]) -> list[float]:
    """Samples per second, relative to one worker."""
    return [workers * seconds[1] / seconds[workers] for workers in WORKERS]


def gap(steps: Steps, workers: int) -> float:
    """By how much shards of equal size are faster."""
    return steps["layer"][workers] / steps["size"][workers] - 1


def print_speed_ups(formula: Steps, ours: Steps) -> None:
    print(f"{'speed-up, by workers':24}" + "".join(f"{workers:11}" for workers in WORKERS))
    for how in ("layer", "size"):
        expected, found = speed_ups(formula[how]), speed_ups(ours[how])
        ratios = [one / other for one, other in zip(found, expected, strict=True)]
        for name, row in {"formula": expected, "ours": found, "ours / formula": ratios}.items():
            print(f"{'by ' + how:9}{name:15}" + "".join(f"{x:11.2f}" for x in row))


def print_gaps(formula: Steps, ours: Steps, fitted: bool) -> None:
    print(f"\n{'size over layer':24}{'paper':>11}{'formula':>11}{'ours':>11}{'ours / paper':>14}")
    for workers, paper in PAPER.items():
        name = f"{workers} workers" + (", fitted" if fitted and workers == 4 else "")
        one, other = gap(formula, workers), gap(ours, workers)
        print(f"{name:24}{paper:>+11.0%}{one:>+11.1%}{other:>+11.1%}{other / paper:>14.2f}")


def print_difference(formula: Steps, ours: Steps) -> None:
    """The difference between the run and the closed form, with the reasons."""
    most = max(abs(ours[how][P] / formula[how][P] - 1) for how in ours for P in WORKERS)
    print(
        f"\nA step of the run is within {most:.1%} of the formula, which leaves out that a server adds gradients at\n"
        "8 GB/s, that a worker's messages to several servers queue at its link, and that the first worker to be\n"
        "served computes while others wait."
    )


def print_rules(steps: int) -> None:
    """All four assignments of layers, each with its own t_c."""
    print("\nFour ways to assign layers, each with its own t_c, fitted to +20 % with 4 workers:")
    print(f"{'':28}{'fullest of 2, of 4 servers':>28}{'wire s at 4, 8':>17}{'t_c':>9}{'at 8: formula':>15}{'ours':>9}")
    for rule, name in RULES.items():
        t_c, fullest = fitted_seconds(rule), [max(shard_sizes(rule, servers)) for servers in (2, 4)]
        wire = "".join(f"{wire_seconds(rule, workers):8.4f}" for workers in (4, 8))
        expected = gap(steps_by_formula(rule, t_c), 8)
        ours = f"{gap(steps_by_run(rule, t_c, steps), 8):+.1%}" if rule in WAYS else "not run"
        numbers = f"{fullest[0]:>15,}{fullest[1]:>13,}{wire:>17}{t_c:>9.3f}{expected:>+15.1%}"
        print(f"{name:28}{numbers}{ours:>9}")


CAUTION = """
What this shows: with 1 and 2 workers, that is, one server, there is no difference; the gap grows with the number of
servers. Its size shows little: the 20 % are an input, not a prediction, and layers in turn are our choice because they
are closest to the 66 %, clearly by the formula, hardly in the runs. One constant and one of four rules against two
numbers: consistent with the paper, and no more."""


def figure_of(formula: Steps, ours: Steps) -> Figure:
    """Speed-up over workers: lines are the formula, dots are runs."""
    data = []
    for how, colour in {"layer": "#d55e00", "size": "#0072b2"}.items():
        line = {"type": "scatter", "x": list(WORKERS), "line": {"color": colour}, "marker": {"color": colour}}
        data.append(line | {"y": speed_ups(formula[how]), "mode": "lines", "name": f"by {how}, formula"})
        data.append(line | {"y": speed_ups(ours[how]), "mode": "markers", "name": f"by {how}, run"})
    layout = {
        "title": {"text": "VGG-16, one server per two workers, 10 Gbit/s, virtual time"},
        "xaxis": {"title": {"text": "workers"}, "tickvals": list(WORKERS)},
        "yaxis": {"title": {"text": "speed-up over one worker"}, "rangemode": "tozero"},
    }
    return {"data": data, "layout": layout}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rule", choices=["round-robin", "layer"], default="round-robin", help="how layers are assigned to servers"
    )
    parser.add_argument("--compute-seconds", type=float, help="t_c, how long a step computes; fitted if not given")
    parser.add_argument("--steps", type=int, default=8, help="how many steps are measured, 8 if not given")
    parser.add_argument("--small", action="store_true", help="two steps, and one way to assign layers")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/surveys/parameter_sharding"), help="the folder of the figure"
    )
    given = parser.parse_args(argv)
    for name in ("compute_seconds", "steps"):
        value = getattr(given, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"{name} is {value}, but must be > 0")
    return given


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    steps = 2 if given.small else given.steps
    fitted = given.compute_seconds is None
    t_c = fitted_seconds(given.rule) if fitted else given.compute_seconds
    why = f"FITTED to {PAPER[4]:+.0%} with 4 workers" if fitted else "given"
    print(f"VGG-16: {sum(shard_sizes('size', 1)):,} parameters, the largest layer {max(shard_sizes('layer', 2)):,}")
    print(f"by layer: {RULES[given.rule]}, a CHOICE of ours")
    print(f"t_c = {t_c:.3f} s = a x {t_c / WAYS_OF_A_STEP:.3f} s, {why}\n")
    formula, ours = steps_by_formula(given.rule, t_c), steps_by_run(given.rule, t_c, steps)
    print_speed_ups(formula, ours)
    print_gaps(formula, ours, fitted)
    print_difference(formula, ours)
    if not given.small:
        print_rules(steps)
    print(CAUTION if fitted else "\nt_c was given: the size of the gaps follows from it, their growth does not.")
    print(draw(figure_of(formula, ours), given.out / "speed_up.html"))


if __name__ == "__main__":
    main()

"""`manyhands cost TASK`: parameters, work, storage and parallelism of each layer of a task's model.

With `--split`: what each layer sends if it is divided by samples or by neurons (cli/cost_split.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import FlagCreatePairsOff, Positional, arg

from manyhands.cli import cost_pipeline
from manyhands.cli.cost_split import show_split
from manyhands.cli.drawing import RANKS
from manyhands.cli.options import option
from manyhands.cli.output import console, print_json, print_table
from manyhands.cli.usage import parse
from manyhands.core.errors import refuse_unless
from manyhands.report.theme import amount_text, bytes_text, count_text, share_text

if TYPE_CHECKING:
    from manyhands.core.task import Task
    from manyhands.cost.layers import LayerCost, ModelCost

ABOUT = """What a step of training costs: parameters, work, storage and parallelism of each layer of a task's model.

Multiply-adds are those of the forward pass for one sample; the share of the work is that of both passes, as virtual
time charges it. Storage is that of a mini-batch: weights, outputs, and the gradients of weights and inputs. The depth
is that of the forward pass; W/D, the work of a mini-batch over the depth, is how many processors a layer can use.

With --split: the bytes that each worker sends in a step for each layer, if the layer is divided by samples (data) or by
neurons (out: each worker has some outputs; in: some inputs), and the plan that sends the fewest.

examples:
  manyhands cost vgg16
  manyhands cost alexnet --split --workers 8 --batch-size 128
  manyhands cost alexnet --json
  manyhands cost mnist --data path/to/mnist --batch-size 128
  manyhands cost my_module:my_task
  manyhands cost cnn --method pipedream --workers 4
  manyhands cost digits --method 'gpipe:micro_batches=8' --workers 2 --json

With --method, a pipeline: for each rank its share of the work and the time in which it waits, the weights, gradient,
optimizer, versions of the weights and activations that it keeps."""

PLURALS = {"convolution": "convolutions", "fully connected": "fully connected layers", "embedding": "embeddings"}
COLUMNS = ("layer", "kind", "output", "parameters", "", "multiply-adds", "work", "storage", "depth", "W/D")


@dataclass
class CostOptions:
    """What `cost` takes."""

    task: Annotated[str, Positional, arg(metavar="TASK", help="a task, or your own as module:function")]
    data: Annotated[Path | None, option("the folder or file that the task reads", "none", "PATH")] = None
    batch_size: Annotated[int | None, option("samples of a mini-batch", "the task's", "INT")] = None
    method: Annotated[str | None, option("a pipeline, to predict what each of its ranks has", "none", "METHOD")] = None
    split: FlagCreatePairsOff[
        Annotated[bool, option("the bytes of each layer, divided by samples or by neurons", "no")]
    ] = False
    workers: Annotated[
        int | None, option("with --method its ranks (default 4); with --split how many divide the layers", "2", "INT")
    ] = None
    json: FlagCreatePairsOff[Annotated[bool, option("print one JSON object instead of a table", "no")]] = False


def run(argv: Sequence[str]) -> int:
    """Print the cost of one task."""
    options = parse(CostOptions, argv, "cost", ABOUT)
    if options.batch_size is not None:
        refuse_unless(options.batch_size >= 1, "batch_size", options.batch_size, ">= 1")
    refuse_unless(not (options.split and options.method), "split", "on", "left out with --method")
    if options.workers is not None:
        refuse_unless(options.workers >= 1, "workers", options.workers, ">= 1")
        needed = options.split or options.method is not None
        bound = "left out without --method or --split: layers do not depend on it"
        refuse_unless(needed, "workers", options.workers, bound)
    from manyhands.cost.layers import model_cost  # here, because it imports torch
    from manyhands.tasks import load

    task = load(options.task, options.data)
    if options.method is not None:
        return _run_pipeline(task, options.method, options)
    cost = model_cost(task, options.batch_size)
    if options.split:
        return _split(task.name, cost, 2 if options.workers is None else options.workers, options.json)
    print_json(facts(task.name, cost)) if options.json else show(task.name, cost)
    return 0


def _run_pipeline(task: Task, method: str, options: CostOptions) -> int:
    cost = cost_pipeline.cost_of(task, method, options.workers or RANKS, options.batch_size)
    if options.json:
        print_json({"task": task.name, **cost_pipeline.facts(method, cost)})
    else:
        cost_pipeline.show(task.name, method, cost)
    return 0


def _split(task: str, cost: ModelCost, workers: int, json: bool) -> int:
    """Print what each layer sends in each way."""
    from manyhands.cost.placement import placement

    found = placement(cost, workers)
    print_json({"task": task, **asdict(found)}) if json else show_split(found)
    return 0


def facts(task: str, cost: ModelCost) -> dict[str, Any]:
    """The cost as one object: work in operations of training for one sample, storage in bytes."""
    return {
        "task": task,
        "batch_size": cost.batch_size,
        "parameters": cost.parameters,
        "multiply_adds": cost.multiply_adds,
        "work": cost.work.total,
        "work_given": cost.work.given is not None,
        "why_estimated": cost.work.why_estimated or None,
        "storage": cost.storage,
        "kinds": {
            kind: {"parameters_share": parameters, "work_share": work}
            for kind, (parameters, work) in cost.kinds.items()
            if parameters or work
        },
        "layers": [asdict(layer) for layer in cost.layers],
    }


def show(task: str, cost: ModelCost) -> None:
    """Print the cost as a table and sentences."""
    out = console()
    print_table(COLUMNS, [*(_row(layer, cost) for layer in cost.layers), _total(cost)])
    for sentence in sentences(cost):
        out.print(sentence, soft_wrap=True, markup=False)


def _row(layer: LayerCost, cost: ModelCost) -> list[str]:
    parameters, share = ("", "")
    if layer.parameters:
        parameters, share = f"{layer.parameters:,}", share_text(layer.parameters / cost.parameters)
    work = share_text(layer.work.total / cost.work.total) if layer.work.total else ""
    return [
        layer.name or "(model)",
        layer.kind,
        "-" if layer.output is None else " x ".join(map(str, layer.output)),
        parameters,
        share,
        "-" if layer.multiply_adds is None else _unless_zero(layer.multiply_adds),
        work,
        "-" if layer.storage is None else bytes_text(layer.storage),
        "-" if layer.depth is None else str(layer.depth),
        "-" if layer.parallelism is None else count_text(layer.parallelism),
    ]


def _unless_zero(count: float) -> str:
    return f"{count:,.0f}" if count else ""


def _total(cost: ModelCost) -> list[str]:
    multiply_adds = "-" if cost.multiply_adds is None else _unless_zero(cost.multiply_adds)
    storage = "-" if cost.storage is None else bytes_text(cost.storage)
    return ["total", "", "", f"{cost.parameters:,}", "100 %", multiply_adds, "100 %", storage, "", ""]


def sentences(cost: ModelCost) -> Iterator[str]:
    """What the table shows, in words."""
    work = f"{amount_text(cost.work.total).strip()} operations in training"
    if cost.work.given is not None:
        work += ", as the task says; the layers have their counted shares of them"
    if cost.work.why_estimated:
        yield f"The work is not counted but estimated from the parameters: {cost.work.why_estimated}."
    if cost.multiply_adds:
        forward = f"{amount_text(cost.multiply_adds).strip()} multiply-adds in the forward pass"
        yield f"A sample takes {forward}, {work}."
    else:
        yield f"A sample takes {work}."
    if not cost.work.why_estimated:
        text = "; ".join(
            f"{PLURALS.get(kind, f'{kind} layers')} hold {share_text(parameters)} of the parameters "
            f"and do {share_text(work)} of the work"
            for kind, (parameters, work) in cost.kinds.items()
            if work
        )
        yield f"{text[:1].upper()}{text[1:]}."

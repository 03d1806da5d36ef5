"""The options of `manyhands train METHOD`: the knobs of one recipe, and those of every run; `compare` shares them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, arg

from manyhands.cli.usage import parse
from manyhands.core import part_text
from manyhands.core.method_index import Knob, Method
from manyhands.core.method_text import knobs_of, read_method, refuse_two_rates
from manyhands.tasks import NAMES

ABOUT = """{summary}

examples:
  manyhands train {name}
  manyhands train {name} --workers 4 --out runs/mine --checkpoint-every 100
  manyhands train {name} --workers 4 --resume runs/mine
  manyhands train {name} --virtual --workers 8 --epochs 5 --seed 1 --json
  manyhands train {name} --cluster cluster.toml --task mnist --data data/mnist
{knobs}
paper, equations and loops: manyhands explain {name}"""


def option(text: str, default: str | None = None, metavar: str | None = None) -> Any:
    return arg(help=text, metavar=metavar, help_behavior_hint=None if default is None else f"(default: {default})")


@dataclass(kw_only=True)
class CommonOptions:
    """Options of every method: where the run takes place, and how long it is."""

    task: Annotated[str, option(f"{', '.join(NAMES)}, or your own as module:function")] = "digits"
    workers: Annotated[int | None, option("how many workers", "2; 4 if virtual, or the cluster file's", "INT")] = None
    servers: Annotated[int | None, option("how many server ranks", "0, or the cluster file's", "INT")] = None
    steps: Annotated[int | None, option("updates of workers x batch size samples", "see --epochs", "INT")] = None
    epochs: Annotated[float | None, option("passes over the data", "the task's", "FLOAT")] = None
    batch_size: Annotated[int | None, option("samples per worker and step", "the task's", "INT")] = None
    link: Annotated[
        Literal["shm", "tcp"] | None,
        option("how workers exchange tensors: through shared memory, or through sockets", "shm", "{shm,tcp}"),
    ] = None
    bind: Annotated[str | None, option("the address to listen on with --link tcp", "127.0.0.1", "ADDRESS")] = None
    join_timeout: Annotated[float | None, option("seconds until all ranks must be connected", "60", "FLOAT")] = None
    virtual: FlagCreatePairsOff[Annotated[bool, option("train in a virtual cluster, in virtual time", "no")]] = False
    cluster: Annotated[Path | None, option("a TOML file that describes a virtual cluster", "none", "FILE")] = None
    data: Annotated[Path | None, option("the folder or file that the task reads", "none", "PATH")] = None
    json: FlagCreatePairsOff[Annotated[bool, option("print one JSON object instead of a summary", "no")]] = False


@dataclass(kw_only=True)
class RunOptions(CommonOptions):
    """Options of a single run."""

    seed: Annotated[int, option("determines the initial weights, the data order and all random choices")] = 0
    spares: Annotated[int | None, option("workers that join when one is lost, or at SIGUSR1", "0", "INT")] = None
    out: Annotated[Path | None, option("where record and checkpoints go", "runs/METHOD-TASK-TIME", "DIR")] = None
    adapters: Annotated[str | None, option("also send the record to tensorboard, mlflow", "none", "NAME,...")] = None
    evaluate_every: Annotated[int | None, option("steps between two evaluations on the test data", "none", "INT")] = (
        None
    )
    checkpoint_every: Annotated[int | None, option("steps between two checkpoints", "none", "INT")] = None
    resume: Annotated[Path | None, option("a checkpoint, or the --out of a run, to continue from", "none", "DIR")] = (
        None
    )


def read_options(text: str) -> tuple[Method, list[str]]:
    """The method of `ssp` or `ssp:staleness=3,codec=half`, and the knobs after the colon as options."""
    method, settings = read_method(text)
    knobs = knobs_of(method)
    return method, [_as_option(knobs[name], value) for name, value in settings.items()]


def _as_option(knob: Knob, value: str) -> str:
    if knob.type is not bool:
        return f"{knob.flag}={'None' if value.lower() == 'none' else value}"
    return knob.flag if value.lower() == "true" else f"--no-{knob.flag[2:]}"


def fill(method: Method, argv: Sequence[str]) -> tuple[dict[str, Any], RunOptions]:
    """The knobs that differ from the recipe's defaults, and the options of the run."""
    knobs = make_dataclass("Knobs", map(_field, knobs_of(method).values()), kw_only=True)
    knobs.__doc__ = f"The knobs of {method.name}."
    form: Any = make_dataclass("Form", [(method.function, knobs), ("run", RunOptions)])
    filled: Any = parse(form, argv, f"train {method.name}", _about(method))
    chosen = dict(_chosen(method, vars(getattr(filled, method.function))))
    refuse_two_rates(chosen)
    return chosen, filled.run


def _field(knob: Knob) -> tuple[str, Any, Any]:
    metavar = knob.annotation.upper().replace(" ", "") if knob.part or "| None" in knob.annotation else None
    kind: Any = knob.type
    described: Any = Annotated[kind, option(knob.help, None if knob.required else knob.default, metavar)]
    return knob.name, described, field() if knob.required else field(default=knob.default)


def _about(method: Method) -> str:
    lists = [f"{knob.name}={knob.default}" for knob in method.knobs if isinstance(knob.default, int | float)][:2]
    example = f"  manyhands train {method.name}:{','.join(lists)} --virtual\n" if lists else ""
    return ABOUT.format(summary=method.card.summary, name=method.name, knobs=example)


def _chosen(method: Method, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for knob in knobs_of(method).values():
        value = given[knob.name]
        if knob.required or value != knob.default:
            yield knob.name, part_text.read(value, knob.part) if knob.part and value is not None else value

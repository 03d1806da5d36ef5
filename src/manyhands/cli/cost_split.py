"""What `manyhands cost TASK --split` prints: the bytes of each layer, divided by samples or by neurons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from manyhands.cli.output import console, print_table
from manyhands.report.theme import bytes_text, share_text

if TYPE_CHECKING:
    from manyhands.cost.placement import LayerPlacement, Placement

COLUMNS = (
    "layer",
    "kind",
    "data: gradient",
    "out: gathered",
    "in: summed",
    "examples gathered",
    "data wins from b =",
    "cheapest plan",
)


def show_split(found: Placement) -> None:
    """Print the table, and what it shows in sentences."""
    out = console()
    print_table(COLUMNS, [_row(layer) for layer in found.layers])
    for sentence in sentences(found):
        out.print(sentence, soft_wrap=True, markup=False)


def _row(layer: LayerPlacement) -> list[str]:
    ways = (layer.data, layer.gathered, layer.summed, layer.examples)
    texts = ["-" if one is None else bytes_text(one) for one in ways]
    bound = "always" if layer.data_wins_from is None else f"{layer.data_wins_from:,}"
    return [
        layer.name or "(model)",
        layer.kind,
        *texts,
        bound,
        f"{layer.way}, {layer.join}" if layer.join else layer.way,
    ]


def sentences(found: Placement) -> Iterator[str]:
    """Of what the bytes are, what the plans take, and where stages would begin."""
    b, ranks = found.batch_size, found.ranks
    yield (
        f"Bytes that each of {ranks} workers sends in a step, in which each has b = {b} samples, {b * ranks} together. "
        "Nothing is sent where slices are kept apart."
    )
    saved = f"; the cheapest plan sends {bytes_text(found.cheapest)}" if found.cheapest < found.data else ""
    if saved and found.data:
        saved += f", {share_text(found.cheapest / found.data)} of that"
    yield f"Divided by samples alone, it sends {bytes_text(found.data)}{saved or ', and no plan sends less'}."
    stages = found.stages
    if stages is not None:
        yield (
            f"As {ranks} stages of a pipeline, which begin at the first layer and {' and '.join(stages.first)}, the "
            f"largest has {share_text(stages.largest)} of the work; {bytes_text(2 * stages.bytes)} pass the cuts for "
            "each sample."
        )

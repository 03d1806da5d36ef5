"""`manyhands list`: all methods, one line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.cli.output import print_json, print_table
from manyhands.cli.usage import parse
from manyhands.core.method_index import methods

ABOUT = """All methods: name, family, what it does, paper.

examples:
  manyhands list
  manyhands list --json"""


@dataclass
class ListOptions:
    """What `list` takes.

    Args:
        json: print a list of objects with name, family, summary, paper, file, recipe and knobs.
    """

    json: bool = False


def run(argv: Sequence[str]) -> int:
    """Print the list of methods."""
    options = parse(ListOptions, argv, "list", ABOUT)
    found = methods().values()
    if options.json:
        print_json([method.facts() for method in found])
    else:
        rows = [(m.name, m.family, m.card.summary, m.card.paper.partition(", http")[0]) for m in found]
        print_table(("method", "family", "what it does", "paper"), rows)
    return 0

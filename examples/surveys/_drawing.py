"""Drawing: a figure of plotly, given as a plain dict, becomes one page that needs nothing else."""

import json
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Figure = dict[str, Any]
"""{"data": [...], "layout": {...}}, as plotly has it."""


def draw(figure: Figure, path: Path) -> str:
    """Write the page, in a folder that is made if need be; returns what to say about it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = json.dumps(figure, indent=1)
    if find_spec("plotly") is None:
        path.write_text(f'{HEAD}<pre id="figure">{escape(numbers, quote=False)}</pre>\n', encoding="utf-8")
        return f"figure {path}: its numbers only, since plotly is not installed"
    script, safe = import_module("plotly.offline").get_plotlyjs(), numbers.replace("</", "<\\/")
    show = f'const figure = {safe}; Plotly.newPlot("figure", figure.data, figure.layout);'
    page = f'{HEAD}<div id="figure"></div>\n<script>{script}</script>\n<script>{show}</script>\n'
    path.write_text(page, encoding="utf-8")
    return f"figure {path}"


HEAD = '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>manyhands</title>\n'

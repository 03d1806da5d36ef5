"""Drawing: a figure of plotly, given as a plain dict, as one self-contained page."""

import json
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

Figure = dict[str, Any]
"""{"data": [...], "layout": {...}}, as in plotly."""

HEAD = '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>manyhands</title>\n'


def draw(figure: Figure, path: Path) -> str:
    """Write the page, creating its folder if need be; returns a line to print."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = json.dumps(figure, indent=1).replace("<", "\\u003c")
    show = 'const figure = JSON.parse(document.getElementById("numbers").textContent);\n'
    show += 'Plotly.newPlot("figure", figure.data, figure.layout);'
    data = f'<script id="numbers" type="application/json">{numbers}</script>\n'
    page = f'{HEAD}<div id="figure"></div>\n{data}<script>{get_plotlyjs()}</script>\n<script>{show}</script>\n'
    path.write_text(page, encoding="utf-8")
    return f"figure {path}"

"""The main figures as PNG files, drawn by kaleido in an installed browser."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.core.errors import ManyhandsError
from manyhands.report.chart import Chart, Figure

WIDTH = 1000
SCALE = 2
"""Pixels per point."""
GRID = "#d9dde3"


class NoPictures(ManyhandsError):
    """The PNG files could not be drawn; the rest of the report is complete."""


def write_pictures(charts: Mapping[str, Chart], out: Path) -> list[Path]:
    """One file for the first view of each chart."""
    try:
        import kaleido
    except ImportError:
        raise NoPictures("PNG files need kaleido: pip install 'manyhands[png]'") from None
    from plotly import offline

    script = Path(offline.__file__).parent.parent / "package_data" / "plotly.min.js"
    paths = {name: out / f"{name}.png" for name in charts}
    work = [_request(chart, paths[name]) for name, chart in charts.items()]
    options = {"mathjax": False, "plotlyjs": str(script), "n": 1}  # without a network
    try:
        kaleido.write_fig_from_object_sync(work, kopts=options)
    except Exception as error:
        if type(error).__name__ == "ChromeNotFoundError":
            raise NoPictures("PNG files need a browser: install Chromium (Debian: apt-get install chromium)") from None
        raise NoPictures(f"PNG files could not be drawn: {type(error).__name__}: {error}") from error
    return list(paths.values())


def _request(chart: Chart, path: Path) -> dict[str, Any]:
    figure = on_paper(chart.views[0].figure)
    size = {"width": WIDTH, "height": figure["layout"]["height"] + 60, "scale": SCALE, "format": "png"}
    return {"fig": figure, "path": str(path), "opts": size}


def on_paper(figure: Figure) -> Figure:
    """The figure in dark colours on white."""
    drawn = copy.deepcopy(figure)
    layout = drawn["layout"]
    layout |= {"paper_bgcolor": "#ffffff", "plot_bgcolor": "#ffffff"}
    layout |= {"font": {"color": "#1c2024", "size": 13}, "margin": {"l": 70, "r": 30, "t": 20, "b": 60}}
    layout["legend"] = {**layout.get("legend", {}), "y": 1.0, "yanchor": "bottom", "x": 0}
    for name in layout:
        if name.startswith(("xaxis", "yaxis")):
            layout[name] = {"gridcolor": GRID, "linecolor": GRID, "zerolinecolor": GRID, **layout[name]}
    return drawn

"""The page of a report: page.html filled with tables, charts, page.css, page.js and the chart library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from manyhands import __version__
from manyhands.report import repeat, summary
from manyhands.report.chart import Chart, View
from manyhands.report.groups import Section
from manyhands.report.theme import DARK, LIGHT, plural

SHARED = 8
"""Lists of at least this length are stored once, however many figures use them."""


def page(title: str, sections: Sequence[Section], charts: Mapping[str, Sequence[Chart]], notes: Sequence[str]) -> str:
    """The whole page as text."""
    body = [_section(section, charts[section.slug]) for section in sections]
    contents = [_link(section.slug, _heading(section)) for section in sections]
    if len(sections) == 1:
        contents = [_link(f"{sections[0].slug}-{chart.name}", chart.title) for chart in charts[sections[0].slug]]
    return Template(_text("page.html")).substitute(
        title=escape(title),
        lead=escape(_lead(sections)),
        contents="\n".join([*contents, _link("repeat", "How to repeat it")]),
        body="\n".join([*body, _repeat(sections, notes)]),
        css=_text("page.css"),
        script=_text("page.js"),
        library=_library(),
        data=data(charts),
    )


def _text(name: str) -> str:
    return (files("manyhands.report") / name).read_text(encoding="utf-8")


def _library() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).replace("</script", "<\\/script")


# -- data for the script - ------------------------------------------------------------------------------


def data(charts: Mapping[str, Sequence[Chart]]) -> str:
    """All charts as JSON that is safe inside a script element: long lists once, and no `<`."""
    shared = _Shared()
    drawn = {f"{slug}-{chart.name}": _drawn(chart, shared) for slug, some in charts.items() for chart in some}
    whole = {"light": LIGHT, "dark": DARK, "charts": drawn, "lists": shared.lists}
    return json.dumps(whole, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")


class _Shared:
    """Replaces a list that was seen before by its number."""

    def __init__(self) -> None:
        self.lists: list[list[Any]] = []
        self._indices: dict[tuple[Any, ...], int] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self(one) for key, one in value.items()}
        if not isinstance(value, list | tuple):
            return value
        if len(value) < SHARED or isinstance(value[0], dict | list):
            return [self(one) for one in value]
        index = self._indices.setdefault(tuple(value), len(self.lists))
        if index == len(self.lists):
            self.lists.append(list(value))
        return {"list": index}


def _drawn(chart: Chart, shared: _Shared) -> dict[str, Any]:
    views = [{"label": view.label, "note": view.note, **shared(view.figure)} for view in chart.views]
    parts = [{"keys": part.keys, "columns": [shared(column) for column in part.columns]} for part in chart.table.parts]
    return {"title": chart.title, "many": chart.many, "columns": chart.table.columns, "views": views, "parts": parts}


# -- HTML of the page ------ ----------------------------------------------------------------------------


def _link(target: str, text: str) -> str:
    return f'<li><a href="#{escape(target)}">{escape(text)}</a></li>'


def _lead(sections: Sequence[Section]) -> str:
    members = [member for section in sections for member in section.members]
    failed = sum(member.run.failure is not None for member in members)
    groups = plural(len({member.run.method for member in members}), "method")
    ended = f", {failed} of them without a result" if failed else ""
    return f"{plural(len(members), 'run')} of {groups}{ended}. Made by manyhands {__version__}."


def _heading(section: Section) -> str:
    return f"{section.task}, {'in virtual time' if section.virtual else 'among real processes'}"


def _section(section: Section, charts: Sequence[Chart]) -> str:
    warnings = repeat.warnings(section.members)
    items = "".join(f"<li>{escape(text)}</li>" for text in warnings)
    return "\n".join(
        [
            f'<section aria-labelledby="{section.slug}">',
            f'<h2 id="{section.slug}">{escape(_heading(section))}</h2>',
            f'<ul class="warning">{items}</ul>' if warnings else "",
            f'<div class="card">{_summary(section)}</div>',
            *(_chart(section, chart) for chart in charts),
            _schedules(section),
            "</section>",
        ]
    )


def _summary(section: Section) -> str:
    shown = summary.columns(section)
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in ("method", "seeds", *(c.title for c in shown)))
    rows = "".join(_summary_row(line) for line in summary.lines(section))
    best = "ordered by time to target" if section.target else "ordered by final accuracy or loss"
    about = f"Medians over seeds, with the range below if there are several; {best}. Failed runs are last."
    inside = f"<caption>Summary</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    table = _scrolling("Summary", f'<table class="summary">{inside}</table>')
    return f'<p class="about">{about}</p>{table}'


def _summary_row(line: summary.SummaryLine) -> str:
    failure = f'<span class="failure">failed: {escape(line.failure)}</span>' if line.failure else ""
    cells = "".join(f"<td>{escape(c.text)}{_spread(c.spread)}</td>" for c in line.cells)
    return f'<tr><th scope="row">{_breakable(line.name)}{failure}</th><td>{escape(line.seeds)}</td>{cells}</tr>'


def _breakable(name: str) -> str:
    """A name that may be broken after punctuation."""
    return re.sub(r"([:,(])", r"\1<wbr>", escape(name))


def _spread(text: str) -> str:
    return f'<span class="spread">{escape(text)}</span>' if text else ""


def _scrolling(name: str, inside: str) -> str:
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(name)}">{inside}</div>'


def _chart(section: Section, chart: Chart) -> str:
    slug = f"{section.slug}-{chart.name}"
    return f"""<section class="card" id="{slug}" aria-labelledby="{slug}-title">
<h3 id="{slug}-title">{escape(chart.title)}</h3>
<p class="about">{escape(chart.about)}</p>
{_switch(slug, chart)}
<figure aria-labelledby="{slug}-title">
<ul class="legend" aria-label="Shown in the chart"></ul>
<div class="plot" role="img" aria-label="{escape(chart.summary)}"></div>
</figure>
<p class="note" aria-live="polite"></p>
<details><summary>Numbers of this chart</summary>
<p><a href="data/{slug}.csv">All of them as CSV</a>{_beside(chart)}</p>
{_scrolling(f"Numbers: {chart.title}", "")}
</details>
</section>"""


def _schedules(section: Section) -> str:
    """The order of the passes of each pipeline; nothing if there is none."""
    drawn = {group.name: group.typical.run.header.get("schedule") for group in section.groups}
    pictures = [
        f"<h4>{escape(name)}</h4>{_scrolling(f'Schedule of {name}', f'<pre>{escape(picture)}</pre>')}"
        for name, picture in drawn.items()
        if picture
    ]
    if not pictures:
        return ""
    slug = f"{section.slug}-schedules"
    about = "One line for each rank, one slot for each pass: F and B are the forward and the backward pass of a "
    about += "micro-batch; I and W are the two halves of B, the error and the gradients of the weights."
    return f"""<section class="card" id="{slug}" aria-labelledby="{slug}-title">
<h3 id="{slug}-title">Schedules</h3>
<p class="about">{about}</p>
{"".join(pictures)}
</section>"""


def _beside(chart: Chart) -> str:
    return "" if chart.beside is None else f' <a href="{chart.beside[0]}">{escape(chart.beside[1])}</a>'


def _switch(slug: str, chart: Chart) -> str:
    if len(chart.views) < 2:
        return ""
    if chart.many:
        options = "".join(f'<option value="{n}">{escape(view.label)}</option>' for n, view in enumerate(chart.views))
        label = f'<label for="{slug}-view">{chart.switch}</label>'
        return f'<p class="switch">{label} <select id="{slug}-view">{options}</select></p>'
    choices = "".join(_choice(slug, n, view) for n, view in enumerate(chart.views))
    return f'<fieldset class="switch"><legend>{chart.switch}</legend>{choices}</fieldset>'


def _choice(slug: str, number: int, view: View) -> str:
    checked = " checked" if number == 0 else ""
    box = f'<input type="radio" name="{slug}-view" value="{number}"{checked}>'
    return f"<label>{box}<span>{escape(view.label)}</span></label>"


def _repeat(sections: Sequence[Section], notes: Sequence[str]) -> str:
    facts = repeat.facts([member for section in sections for member in section.members], notes)
    rows = "".join(f"<dt>{escape(title)}</dt><dd>{_lines(texts)}</dd>" for title, texts in facts)
    inside = f'<h2 id="repeat">How to repeat it</h2><div class="card"><dl>{rows}</dl></div>'
    return f'<section aria-labelledby="repeat">{inside}</section>'


def _lines(texts: Sequence[str]) -> str:
    return "".join(f"<code>{escape(text)}</code>" for text in texts)

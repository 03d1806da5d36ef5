"""The report in a browser: quiet, true to the records; usable by keyboard, on a phone, in the dark, without sight."""

import time
from itertools import pairwise

import pytest

from manyhands.report.groups import sections
from manyhands.report.measures import Measures, Target
from manyhands.report.page import write_report

SLUG = "digits-virtual"
CHARTS = ("curves", "pareto", "staleness", "spent", "timeline", "stragglers")


def drawn(page, chart):
    """The data of a chart as they are drawn now."""
    return page.evaluate(
        "id => document.querySelector(`#${id} .plot`).data.map(({type, name, x, y, base, yaxis, visible}) =>"
        "({type, name, x: [...x], y: [...y], base: base ? [...base] : null, yaxis, visible}))",
        f"{SLUG}-{chart}",
    )


def title(page, chart):
    return page.evaluate("id => document.querySelector(`#${id} .plot`).layout.xaxis.title.text", f"{SLUG}-{chart}")


def part(page, chart):
    return page.locator(f"#{SLUG}-{chart}")


def rows(page, chart):
    """The table of a chart, opened if need be."""
    details = part(page, chart).locator("details")
    if details.get_attribute("open") is None:
        details.locator("summary").click()
    details.locator("table").wait_for()
    return details.evaluate("d => [...d.querySelectorAll('tbody tr')].map(r => [...r.cells].map(c => c.textContent))")


@pytest.fixture
def section(runs):
    (found,) = sections(runs, Target("accuracy", 0.9))
    return found


def test_nothing_is_asked_for_and_nothing_complains(page):
    assert page.title() == page.locator("h1").inner_text()
    assert page.locator(".plot .main-svg").count() >= len(CHARTS)


def test_curves_are_those_of_the_records(page, section):
    traces = drawn(page, "curves")
    expected = [(m, curve) for m in section.members for curve in (m.measures.loss, m.measures.accuracy)]
    assert len(traces) == len(expected)
    for trace, (_, curve) in zip(traces, expected, strict=True):
        assert trace["x"] == pytest.approx(list(curve.seconds), rel=1e-5)
        assert trace["y"] == pytest.approx(list(curve.values), rel=1e-5)


@pytest.mark.parametrize(("number", "name", "label"), [(1, "samples", "samples"), (2, "bytes", "bytes sent")])
def test_the_axis_is_switched_by_mouse(visit, section, number, name, label):
    page = visit()
    assert title(page, "curves") == "virtual seconds"
    part(page, "curves").locator(".switch label").nth(number).click()
    assert title(page, "curves") == label
    assert drawn(page, "curves")[0]["x"] == pytest.approx(
        list(getattr(section.members[0].measures.loss, name)), rel=1e-5
    )


def test_the_axis_is_switched_by_keyboard(visit, section):
    page = visit()
    part(page, "curves").locator(".switch input").first.focus()
    page.keyboard.press("ArrowRight")
    assert title(page, "curves") == "samples"
    assert drawn(page, "curves")[0]["x"] == pytest.approx(list(section.members[0].measures.loss.samples), rel=1e-5)
    page.keyboard.press("ArrowRight")
    assert title(page, "curves") == "bytes sent"
    outline = "document.activeElement.nextElementSibling"
    assert page.evaluate(f"getComputedStyle({outline}).outlineStyle") == "solid"


def test_points_are_what_the_target_took(page, section):
    names = {trace["name"]: trace for trace in drawn(page, "pareto")}
    (group,) = [group for group in section.groups if group.name == "bsp"]
    reached = sorted(m.measures.to_target(section.target)["seconds"] for m in group.members)
    assert names["bsp"]["x"] == pytest.approx([reached[1]], rel=1e-5)
    assert "Pareto front" in names
    assert "gossip" not in names


def test_staleness_is_that_of_the_records(page, section):
    traces = drawn(page, "staleness")
    for trace, group in zip(traces, section.groups, strict=True):
        lags = [lag for member in group.members for lag in member.measures.lags]
        assert trace["y"] == pytest.approx([lags.count(int(lag)) / len(lags) for lag in trace["x"]], rel=1e-4)


def test_time_spent_is_that_of_the_run_one_chooses(visit, section):
    page = visit()
    part(page, "spent").locator("select").select_option(label=section.members[1].label)
    found = {trace["name"]: trace["x"] for trace in drawn(page, "spent")}
    for rank, row in section.members[1].measures.spent().items():
        assert {name: found[name][rank] for name in row} == pytest.approx(row, rel=1e-4)


def test_the_timeline_tells_steps_and_losses(visit, section):
    page = visit()
    label = next(member.label for member in section.members if member.name == "gossip")
    part(page, "timeline").locator("select").select_option(label=label)
    traces = {trace["name"]: trace for trace in drawn(page, "timeline")}
    run = next(member.run for member in section.members if member.name == "gossip")
    assert sum(traces["compute"]["x"]) == pytest.approx(sum(line["compute"] for line in run.steps), rel=1e-3)
    assert (traces["lost"]["x"], traces["lost"]["y"]) == ([0.4], [2])
    assert "Rank 2 is lost: it died, at 0.4 s." in part(page, "timeline").locator(".note").inner_text()


def test_stragglers_are_those_of_the_records(page, section):
    traces = {trace["name"]: trace for trace in drawn(page, "stragglers")}
    run = next(member.run for member in section.members if member.name == "gossip")
    assert traces["gossip"]["y"] == pytest.approx(list(Measures(run).stragglers().values()), rel=1e-4)


def test_a_method_can_be_hidden(visit):
    page = visit()
    button = part(page, "curves").locator(".legend button", has_text="bsp")
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    assert {trace["visible"] for trace in drawn(page, "curves") if trace["name"] == "bsp"} == {False}


def test_the_dark_page_is_dark(visit):
    page = visit()
    background = "getComputedStyle(document.body).backgroundColor"
    ink = f"document.querySelector('#{SLUG}-curves .plot').layout.font.color"
    colour = f"document.querySelector('#{SLUG}-curves .plot').data[0].line.color"
    light = [page.evaluate(what) for what in (background, ink, colour)]
    page.emulate_media(color_scheme="dark")
    ends = time.monotonic() + 20
    while page.evaluate(ink) == light[1] and time.monotonic() < ends:  # the page forbids what `wait_for_function` does
        page.wait_for_timeout(20)
    dark = [page.evaluate(what) for what in (background, ink, colour)]
    assert all(one != other for one, other in zip(light, dark, strict=True))
    assert dark[0] == "rgb(20, 23, 26)"


def test_a_phone_need_not_scroll_sideways(visit):
    page = visit(width=390, height=844)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for chart in CHARTS:
        rows(page, chart)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    widest = "Math.max(...[...document.querySelectorAll('.plot')].map(p => p.getBoundingClientRect().right))"
    assert page.evaluate(f"{widest} <= innerWidth")


@pytest.mark.parametrize("chart", CHARTS)
def test_every_chart_has_a_name_and_a_table(page, chart):
    name = part(page, chart).locator(".plot[role=img]").get_attribute("aria-label")
    assert name.endswith(".") and len(name) > 20
    assert part(page, chart).get_by_role("figure").count() == 1
    table = rows(page, chart)
    details = part(page, chart).locator("details")
    assert details.locator("caption").inner_text()
    assert details.locator("thead th:not([scope=col]), tbody th:not([scope=row])").count() == 0
    numbers = {float(cell) for row in table for cell in row if cell.replace(".", "").replace("e-", "").isdigit()}
    for trace in drawn(page, chart):
        if trace["name"] not in ("lost", "slowed down"):
            assert {float(y) for y in trace["y"] if not isinstance(y, str)} <= numbers
            assert {float(x) for x in trace["x"] if not isinstance(x, str)} <= numbers


def test_the_page_is_in_order(page):
    doubled = (
        "(all => all.filter((id, n) => all.indexOf(id) !== n))([...document.querySelectorAll('[id]')].map(e => e.id))"
    )
    assert page.evaluate(doubled) == []
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => Number(h.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for landmark in ("banner", "navigation", "main"):
        assert page.get_by_role(landmark).count() == 1
    assert page.evaluate("[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))")


def test_names_are_text(page):
    assert page.locator("img").count() == 0
    assert page.get_by_role("rowheader", name='<img src=x onerror="boom()">&amp;').count() >= 1
    assert '<img src=x onerror="boom()">&amp;' in part(page, "curves").locator(".legend").inner_text()


def test_pictures_are_drawn(browser, runs, tmp_path):
    pytest.importorskip("kaleido")
    write_report(runs, tmp_path, png=True)
    for chart in ("curves", "pareto", "spent"):
        picture = (tmp_path / f"{SLUG}-{chart}.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 10_000

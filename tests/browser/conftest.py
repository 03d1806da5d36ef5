"""A browser that is installed already, and a page to look at."""

import shutil

import pytest

from manyhands.report.measures import Target
from manyhands.report.page import write_report
from synthetic_runs import failed, made

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


@pytest.fixture(scope="module")
def browser():
    """One for all tests here; no process of it is left for others to find."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium is installed: `make browser` does it where apt-get may")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def runs():
    """Two methods of three seeds, one run that failed, and one with a name that would do harm if it could."""
    cluster = {"faults": [{"rank": 2, "at": 0.4, "why": "it died"}]}
    return [
        *(made(seed=seed, method=method) for method in ("bsp", "ssp:staleness=3") for seed in range(3)),
        failed(method="gossip", cluster=cluster),
        made(method='<img src=x onerror="boom()">&amp;'),
    ]


@pytest.fixture(scope="session")
def report(runs, tmp_path_factory):
    """The page of these runs."""
    return write_report(runs, tmp_path_factory.mktemp("report"), target=Target("accuracy", 0.9))


class Visits:
    """Opens the page of a report, and hears whatever goes wrong there."""

    def __init__(self, browser, path):
        self._browser, self._path = browser, path
        self._contexts, self._troubles = [], []

    def __call__(self, width=1280, height=900):
        self._contexts.append(self._browser.new_context(viewport={"width": width, "height": height}))
        page, hear = self._contexts[-1].new_page(), self._troubles.append
        page.on("console", lambda message: hear(f"console: {message.text}"))
        page.on("pageerror", lambda error: hear(f"error: {error}"))
        page.on("request", lambda request: hear(request.url) if request.url != self._path.as_uri() else None)
        page.goto(self._path.as_uri())
        return page

    def check(self):
        assert self._troubles == []

    def close(self):
        for context in self._contexts:
            context.close()


@pytest.fixture
def visit(browser, report):
    """Open a page of one's own, to change it."""
    visits = Visits(browser, report)
    yield visits
    visits.close()
    visits.check()


@pytest.fixture(scope="module")
def looking(browser, report):
    visits = Visits(browser, report)
    yield visits, visits()
    visits.close()


@pytest.fixture
def page(looking):
    """The page that all who only look share: loading it takes seconds."""
    visits, page = looking
    yield page
    visits.check()

"""The documentation is up to date, its links lead somewhere, and the README does what it says."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def generator():
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_of_the_methods_are_up_to_date():
    module = generator()
    there = {path.name: path.read_text(encoding="utf-8") for path in module.FOLDER.glob("*.md")}
    assert there == module.pages(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in LINK.findall(text):
        if not re.match(r"https?://|mailto:", target):
            path, _, heading = target.partition("#")
            found = page.parent / path if path else page
            assert found.exists(), f"{page.name} links to {target}"
            assert not heading or heading in headings(found), f"{page.name} links to {target}"


def headings(page):
    """The names under which a page's headings can be linked to."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_decision_is_in_the_index():
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    for page in folder.glob("0*.md"):
        text = page.read_text(encoding="utf-8")
        assert f"({page.name})" in index
        for part in ("Status:", "## Context", "## Decision", "## Evidence", "## Consequences"):
            assert part in text, f"{page.name} has no {part}"


def test_the_readme_names_every_method():
    from manyhands.cli.index import methods

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for method in methods().values():
        row = next(line for line in text.splitlines() if line.startswith(f"| [{method.name}]"))
        assert f"({method.facts()['file']})" in row and "http" in row


def test_the_python_of_the_readme_trains():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    example = next(code for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "mh.train(" in code)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["result"].test_accuracy > 0.8

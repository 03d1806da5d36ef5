"""The documentation is up to date, its links lead somewhere, and the README does what it says."""

import difflib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LOOPS = ("plain_loop.py", "own_loop.py")
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


def test_the_readme_has_a_row_for_every_method():
    module = generator()
    text = module.README.read_text(encoding="utf-8")
    assert text == module.readme(text), "run `make docs`"
    for name in module.methods():
        assert f"| [{name}](docs/methods/{name}.md) |" in text


def test_the_readme_says_of_every_family_what_a_dead_worker_means():
    from manyhands.core.method_index import methods

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    part = text[text.index("## When a worker dies") :].partition("\n## ")[0]
    named = {name for row in re.findall(r"^\| ([a-z, ]+) \|", part, re.MULTILINE) for name in row.split(", ")}
    assert named - {"family"} == {method.family for method in methods().values()}


def test_a_card_says_of_a_lost_worker_what_the_traits_say():
    from manyhands.cli.explain import traits_of

    module = generator()
    for method in module.methods().values():
        text = module.when_lost(method).lower()
        continues = re.search(r"the run continues without (a lost (worker|client)|it\b)", text)
        ends = re.search(r"a lost (worker|client) ends the run", text)
        assert continues or ends, f"{method.name}: {text}"
        says = "continues" if not ends or (continues and continues.start() < ends.start()) else "ends"
        assert says == traits_of(method)["on_worker_loss"], f"{method.name}: {text}"


def test_the_readme_has_every_exit_code():
    from manyhands.cli import HELP
    from manyhands.cli.train import STOPPED
    from manyhands.runtime.membership.error_codec import CODES

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    codes = {0, STOPPED, *(code for _, code in CODES)}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == codes
    listed = HELP.partition("exit codes: ")[2]
    assert {int(code) for code in re.findall(r"\b\d+\b", listed)} == codes


def test_the_diff_of_the_readme_is_that_of_the_examples():
    plain, own = ((ROOT / "examples" / name).read_text(encoding="utf-8").splitlines() for name in LOOPS)
    diff = "\n".join(difflib.unified_diff(plain, own, *LOOPS, n=1, lineterm=""))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"```diff\n(.*?)\n```", text, flags=re.DOTALL) == [diff]


def test_the_demo_of_the_readme_is_that_of_the_makefile():
    command = re.search(r"^demo:.*\n\t\$\(BIN\)/manyhands (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert command == "compare diloco ssp easgd bsp --task digits --workers 2 --target accuracy=0.95"
    shown = re.search(
        r"The demo ends with\n\n```\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    rows = [line.split() for line in shown[1].splitlines()]
    assert {row[1] for row in rows if row and row[0].isdigit()} == {"diloco", "ssp", "easgd", "bsp"}
    assert rows[0][:6] == ["method", "samples", "to", "target", "samples/s", "time"] and rows[-1][0] == "report:"


def parts(line):
    """What the README's example says of a virtual run."""
    name, accuracy, seconds = re.fullmatch(r"(\w+): (0\.\d{3}) after (\d+\.\d\d) virtual seconds", line).groups()
    return name, float(accuracy), seconds


def test_the_python_of_the_readme_trains(tmp_path):
    """In a file of its own, since real workers import it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", text, flags=re.DOTALL)
    ((code, shown),) = blocks
    script = tmp_path / "ten_lines.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (real, *virtual), (real_then, *virtual_then) = done.stdout.splitlines(), shown.splitlines()
    for line, then in zip(virtual, virtual_then, strict=True):
        (name, accuracy, seconds), (name_then, accuracy_then, seconds_then) = map(parts, (line, then))
        assert (name, seconds) == (name_then, seconds_then), "virtual time is the same on every machine"
        assert abs(accuracy - accuracy_then) < 0.015, "another processor rounds otherwise, and that is all"
    pattern = r"2 processes: (0\.\d{3}) after \d+\.\d\d seconds"
    assert re.fullmatch(pattern, real_then) and float(re.fullmatch(pattern, real)[1]) > 0.93

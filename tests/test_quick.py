"""The table of quick tests: its paths exist, and every folder of the package is in it."""

import subprocess
import sys
from pathlib import Path

import pytest

import manyhands
import quick

PACKAGE = Path(manyhands.__file__).parent


def run(*arguments):
    return subprocess.run([sys.executable, quick.__file__, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("part", quick.PARTS)
def test_the_tests_of_a_part_exist(part):
    assert all(Path(path).exists() for path in quick.paths(part))


def test_every_folder_of_the_package_is_a_part():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders - {"engines"} <= set(quick.PARTS), "engines are tested as a part of `run` and `virtual`"
    assert set(quick.LONGER) <= set(quick.PARTS)


def test_every_contract_suite_belongs_to_a_part():
    suites = {f"contracts/{path.name}" for path in (quick.TESTS / "contracts").glob("test_*.py")}
    assert suites <= {path for paths in quick.PARTS.values() for path in paths}


def test_every_suite_of_own_loops_belongs_to_their_part():
    suites = (quick.TESTS / "end_to_end").glob("test_*.py")
    own = {f"end_to_end/{path.name}" for path in suites if "manyhands.run.join" in path.read_text(encoding="utf-8")}
    others = {"end_to_end/test_factors.py", *quick.PARTS["teams"], *quick.PARTS["strategies"]}
    assert own <= {*quick.PARTS["loops"], *others}


def test_an_unknown_part_is_refused_with_the_known_ones():
    ended = run("codec")
    assert ended.returncode != 0
    assert ended.stderr.startswith("PART is 'codec', but must be one of core, codecs, rules")


def test_without_a_part_the_table_is_printed():
    ended = run()
    assert ended.returncode == 0
    assert len(ended.stdout.splitlines()) == len(quick.PARTS)


def test_contributing_has_a_row_for_every_part():
    text = (quick.TESTS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for part, tests in quick.PARTS.items():
        assert f"| `{part}` |" in text, f"CONTRIBUTING.md has no row for {part}"
        row = next(line for line in text.splitlines() if line.startswith(f"| `{part}` |"))
        assert all(f"`{path}`" in row for path in tests)

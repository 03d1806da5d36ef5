"""Names and sentences are those of the field: no private words, no signs of odd English, no two classes of one name."""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "manyhands"
FOLDERS = ("src/manyhands", "README.md", "CONTRIBUTING.md", "docs", "examples", "benchmarks")
"""Files and folders whose names and sentences are checked."""

SIGNS = (
    *("whoever", "whomever", "nobody", "no one", "everyone", "everybody", "somebody", "someone", "anybody", "anyone"),
    *("told", "meanwhile", "heard", "hears", "on its way", "on the way", "on their way"),
    *("goes on", "gone on", "went on", "go on"),
)
"""A sentence with one of these can be said with a technical term."""
PRIVATE = (
    *(
        "keepers?",
        "lanes?",
        "ledgers?",
        "inbox(?:es)?",
        "relays?",
        "relayed",
        "crews?",
        "seats?",
        "vigil",
        "lifelines?",
    ),
    *("stretch(?:es)?", "freight", "holdings?", "meetings?", "gates?", "doors?", "newcomer"),
)
"""Words that only this project used."""
WORDS = re.compile(rf"\b(?:{'|'.join((*SIGNS, *PRIVATE))})\b", re.IGNORECASE)

FORMER_FILES = {
    *(
        "keeping",
        "keeper",
        "lanes",
        "lane",
        "holding",
        "ledger",
        "inbox",
        "relay",
        "meeting",
        "gate",
        "alike",
        "agreement",
    ),
    *("choosing", "firing", "spent", "lending", "place", "crew", "seats", "roll", "vigil", "member", "door", "side"),
    *("board", "hosts", "freight", "last_words", "failures", "pool", "common", "tables", "sums"),
}
FORMER_CLASSES = {
    *("Keeper", "Lane", "MessageLane", "SharedLane", "RelayedLane", "Holding", "At", "Sender", "Pieces", "Ledger"),
    *("Standing", "Inbox", "Lent", "Lying", "Sums", "Kept", "Post", "Letter", "Lifeline", "Replica", "Relay", "Branch"),
    *("Held", "Place", "Part", "Piece", "Crew", "Seat", "Debts", "Own", "Others", "Pairing", "Pulling", "Pushing"),
    "Spread",
}
"""The left column of the glossary's last table."""


def files(*suffixes):
    """The files of `FOLDERS`."""
    paths = [ROOT / name for name in FOLDERS]
    inside = [path for top in paths for path in (top.rglob("*") if top.is_dir() else [top])]
    return sorted(path for path in inside if path.suffix in suffixes)


def prose(path):
    """The numbered lines of a file in which people read sentences."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            is_sentence = token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string)
            yield from enumerate(token.string.splitlines() if is_sentence else (), token.start[0])
    elif path.suffix == ".md":
        yield from enumerate(text.partition("\n## Former names\n")[0].splitlines(), 1)
    else:
        yield from ((n, line.partition("#")[2]) for n, line in enumerate(text.splitlines(), 1))


def classes(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("path", files(".py", ".md", ".toml"), ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_plain_technical_english(path):
    found = [f"line {number}: {match[0]!r}" for number, line in prose(path) for match in WORDS.finditer(line)]
    assert found == [], "say it with the technical term: see docs/glossary.md"


def test_files_and_classes_have_the_names_of_the_field():
    ours = [path for path in files(".py") if PACKAGE in path.parents]
    assert {path.stem for path in ours} & FORMER_FILES == set()
    assert {name for path in ours for name in classes(path)} & FORMER_CLASSES == set()


def test_tests_have_plain_names_too():
    named = [
        node.name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert [name for name in named if WORDS.search(name.replace("_", " "))] == []


def test_no_two_classes_of_the_package_share_a_name():
    counts = Counter(name for path in PACKAGE.rglob("*.py") for name in classes(path))
    assert [name for name, count in counts.items() if count > 1] == []


def test_the_glossary_has_every_former_class():
    former = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("\n## Former names\n")[2]
    left = {
        word for row in former.splitlines() if row.startswith("|") for word in re.findall(r"\w+", row.split("|")[1])
    }
    assert FORMER_CLASSES - left == set()

"""Write docs/methods/ and the README's table of methods from the recipes' docstrings: `make docs`."""

from __future__ import annotations

import re
from pathlib import Path

from manyhands.cli.drawing import drawings
from manyhands.cli.explain import trait_lines, traits_of
from manyhands.core.method_index import Knob, Method, methods

FOLDER = Path(__file__).resolve().parent / "methods"
README = FOLDER.parents[1] / "README.md"
TABLE = re.compile(r"(?<=<!-- methods, written by `make docs` -->\n).*?(?=<!-- end -->)", re.DOTALL)
"""The table between these two lines of the README."""
FROM_LOSS = re.compile(r"(?:^|(?<=[.;] ))[^.;]*\ba lost (?:worker|client)\b.*", re.IGNORECASE)
"""The part of a card about a lost worker: from there to the end of its paragraph."""
ENDS = """A run of real processes that continues without a lost rank ends with exit code 0 and names that rank. One that
cannot continue ends on every other rank within about two seconds, with exit code 3, the rank and the cause. Under
torchrun the death of any rank ends the job, by its own rule."""
NOTE = "<!-- Written by `make docs` from the docstring in src/manyhands/catalog/: change the docstring. -->"


def pages() -> dict[str, str]:
    """All pages by file name."""
    found = methods()
    return {"README.md": overview(list(found.values()))} | {f"{name}.md": page(found[name]) for name in found}


def overview(found: list[Method]) -> str:
    """The table of all methods."""
    rows = [f"| [{m.name}]({m.name}.md) | {m.family} | {cell(m.card.summary)} | {cell(m.card.paper)} |" for m in found]
    return "\n".join(
        [NOTE, "# Methods\n", "| method | family | what it does | paper |", "|---|---|---|---|", *rows, ""]
    )


def readme(text: str) -> str:
    """The README with its table of methods brought up to date."""
    rows = [f"| [{m.name}](docs/methods/{m.name}.md) | {m.family} | {cell(brief(m))} |" for m in methods().values()]
    table = "\n".join(["| method | family | what it does |", "|---|---|---|", *rows, ""])
    return TABLE.sub(lambda _: table, text)


def brief(method: Method) -> str:
    """The summary without the full name of the method before the colon."""
    _, _, what = method.card.summary.partition(": ")
    return (what or method.card.summary).rstrip(".")


def page(method: Method) -> str:
    """The page of one method."""
    name, card = method.name, method.card
    recipe = method.recipe.relative_to(method.package)
    return "\n".join(
        [
            f"{NOTE}\n# {name}\n\n{card.summary}\n",
            f"{card.text}\n",
            f"## When a worker dies\n\n{when_lost(method)}\n\n{ENDS}\n",
            *schedule(method),
            "## Traits\n\nWith the default knobs:\n",
            *[f"- {text}" for text in trait_lines(traits_of(method))],
            "\n## Knobs\n\n| knob | type | default | meaning |\n|---|---|---|---|",
            *map(row, method.knobs),
            f"\n## Paper\n\n{card.paper}\n",
            "## Read the code\n",
            *[f"- `{loop.name}` in {source(loop.path)}" for loop in card.loops],
            f"- the recipe, `{method.function}`, in {source(str(recipe))}\n",
            "## Try it\n\n```",
            *[f"manyhands {words}" for words in (f"train {name}", f"train {name} --virtual", f"explain {name}")],
            "```\n",
        ]
    )


def schedule(method: Method) -> list[str]:
    """The pictures of the schedule that the method plays."""
    drawn = [f"{title}\n\n```\n{picture}\n```\n" for title, picture in drawings(method)]
    return ["## Schedule\n", *drawn] if drawn else []


def when_lost(method: Method) -> str:
    """What happens when a worker is lost, as the card describes it."""
    for paragraph in method.card.text.split("\n\n"):
        if found := FROM_LOSS.search(" ".join(paragraph.split())):
            return found[0][0].upper() + found[0][1:]
    raise SystemExit(f"the card of {method.name} does not say what happens when a worker is lost")


def row(knob: Knob) -> str:
    """The row of a knob in the table."""
    default = "required" if knob.required else f"`{knob.default}`"
    return f"| `{knob.name}` | `{cell(knob.annotation)}` | {cell(default)} | {cell(knob.help)} |"


def source(path: str) -> str:
    """A link from docs/methods/ to a file of the package."""
    return f"[`{path}`](../../src/manyhands/{path})"


def cell(text: str) -> str:
    """Text in a cell of a table, with `|` escaped."""
    return text.replace("|", "\\|")


def main() -> None:
    """Write all pages, and remove those of methods that no longer exist."""
    FOLDER.mkdir(exist_ok=True)
    written = pages()
    for old in FOLDER.glob("*.md"):
        if old.name not in written:
            old.unlink()
    for name, text in written.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

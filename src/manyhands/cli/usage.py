"""Parsing the arguments of every verb. An error is one line, with the nearest valid name."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from manyhands.core.errors import Refused, unknown

Form = TypeVar("Form")


class HelpShown(Exception):
    """Raised for --help, with the text to print."""


def parse(form: type[Form], argv: Sequence[str], verb: str, about: str) -> Form:
    """Fill the dataclass `form` from `argv`. Help and refusals are raised as exceptions; nothing is printed here."""
    import tyro  # here, so that a wrong verb or method is refused without this import

    prog, text = f"manyhands {verb}", io.StringIO()
    inside = (tyro.conf.OmitArgPrefixes,)
    try:
        with redirect_stdout(text), redirect_stderr(text):
            filled, left = tyro.cli(
                form, args=list(argv), prog=prog, description=about, return_unknown_args=True, config=inside
            )
    except SystemExit as ended:
        if ended.code:
            raise Refused(f"{_one_line(text.getvalue())} (see {prog} --help)") from None
        raise HelpShown("\n".join(line.rstrip() for line in text.getvalue().splitlines())) from None
    if left:
        raise _left_over(left, prog, form)
    return filled


def _left_over(words: Sequence[str], prog: str, form: Any) -> Refused:
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    if flags:
        return unknown(f"option of {prog}", flags[0], [f"--{name.replace('_', '-')}" for name in _options(form)])
    return Refused(f"{words[0]!r} is one word too many (see {prog} --help)")


def _options(form: Any) -> Iterator[str]:
    for field in fields(form):
        yield from _options(field.type) if is_dataclass(field.type) else [field.name]


def _one_line(box: str) -> str:
    """The text of the first section of the parser's box, below its title."""
    words_found: list[str] = []
    for line in box.splitlines()[1:]:
        words = line.strip("│ ")
        if not set(words) <= set("─-"):
            words_found.append(words)
        elif words_found:
            break
    return " ".join(words_found) or box.strip()

"""Where things stand in a TOML file: a parser gives their values, but not their lines.

    1  workers = 8              ("", 0, "workers")       of no table
    2
    3  [[faults]]               ("faults", 0, "")        the first table of this name
    4  kind = "die"             ("faults", 0, "kind")
    5  [[faults]]               ("faults", 1, "")        the second one

The text must have been parsed already, so it is known to be right, and it is enough to know where a value ends. What
looks like a key inside a string, a comment, a list or an inline table is none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'  # strings of several lines; two of the quotes at their end may be their own
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|[^\s\[\]{}=,\"'\#]+"  # a bare key, or a part of a value
    r"|[\[\]{}=,\n]",
    re.DOTALL,
)


class TomlLines:
    """The lines of all keys and tables of a text."""

    def __init__(self, text: str) -> None:
        self._lines: dict[tuple[str, int, str], int] = {}
        self._tables: Counter[str] = Counter()
        self._table = "", 0
        for line, tokens in _statements(text):
            if tokens[0] == "[":
                self._begin(line, next(token for token in tokens if token != "["))
            else:
                self._lines.setdefault((*self._table, _name(tokens[0])), line)

    def _begin(self, line: int, header: str) -> None:
        name = _name(header)
        self._table = name, self._tables[name]
        self._tables[name] += 1
        self._lines[(*self._table, "")] = line

    def of(self, key: str, table: str = "", number: int = 0) -> int:
        """The line of a key; if it is not by itself on one, that of its table, or of what holds this."""
        places = (table, number, key), (table, number, ""), ("", 0, table), (key, 0, "")
        return next((self._lines[place] for place in places if place in self._lines), 1)


def _statements(text: str) -> Iterator[tuple[int, list[str]]]:
    """Every key with its value and every header: on which line it begins, and its tokens."""
    line, began, depth = 1, 1, 0
    tokens: list[str] = []
    for token in _TOKEN.findall(text):
        if token == "\n" and not depth:
            if tokens:
                yield began, tokens
            tokens = []
        elif token[0] not in "#\n":
            began = began if tokens else line
            tokens.append(token)
            depth += (token in "[{") - (token in "]}")
        line += token.count("\n")
    if tokens:
        yield began, tokens


def _name(key: str) -> str:
    """The first part of a key, without quotes."""
    return key[1:-1] if key[0] in "\"'" else key.partition(".")[0]

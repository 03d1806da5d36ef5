"""The packages of the runtime import downwards: launch -> transport -> membership -> rank_spec."""

import ast
from pathlib import Path

import pytest

import manyhands.runtime

RUNTIME = Path(manyhands.runtime.__file__).parent
ORDER = ["rank_spec", "membership", "transport", "launch"]
"""From the lowest to the highest."""


def imports(folder):
    """The modules of the runtime that a package imports."""
    for path in sorted((RUNTIME / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("manyhands.runtime."):
                yield path.name, node.module.split(".")[2]


@pytest.mark.parametrize("folder", ORDER[1:])
def test_a_package_imports_only_what_is_below_it(folder):
    found = set(imports(folder))
    assert found
    assert not [one for one in found if one[1] not in ORDER[: ORDER.index(folder) + 1]]

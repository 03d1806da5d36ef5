"""Tasks to train: built-in ones by name, your own as "module:function"."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from manyhands.core.errors import Refused, unknown

if TYPE_CHECKING:
    from manyhands.core.task import Task

TRAINED = ("digits", "mnist", "cnn", "resnet-small", "text", "regression", "rbm", "rnn", "sparse")
SIZES_ONLY = ("alexnet", "googlenet", "vgg16")
"""Networks for ImageNet, to simulate times only."""
NAMES = (*TRAINED, *SIZES_ONLY)


def load(name: str, data: Path | None = None) -> Task:
    """The task of this name.

    Args:
        name: one of `NAMES`, or "module:function" for a function of your own that returns a `Task`.
        data: the folder or file that the task reads, if it reads any.
    """
    if ":" in name:
        return _yours(name, data)
    if name not in NAMES:
        raise unknown("task", name, [*NAMES, "module:function"])
    function = name.replace("-", "_")  # the name of the module, too
    task: Task = getattr(importlib.import_module(f"{__name__}.{function}"), function)(data)
    return task


def _yours(name: str, data: Path | None) -> Task:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name.isidentifier():
        raise Refused(f'the task is "{name}", but must be "module:function"')
    if data is not None:
        raise Refused(f'the task "{name}" finds its data itself: leave out --data {data}')
    from manyhands.core.task import Task  # here, so that the names of the tasks are known without torch

    function = getattr(_module(module_name), function_name, None)
    if not callable(function):
        raise Refused(f'the module "{module_name}" has no function "{function_name}"')
    task = function()
    if not isinstance(task, Task):
        raise Refused(f'"{name}" returned an object of type {type(task).__name__}, but must return a Task')
    return task


def _module(name: str) -> ModuleType:
    """Import as `python -m` does: from the current directory first. Import errors inside the module are not caught."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    missing = Refused(f'there is no module "{name}" in {here} or among the installed packages')
    if name.startswith("."):
        raise missing
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise missing from None

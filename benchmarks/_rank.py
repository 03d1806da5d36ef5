"""The program of one rank: `_rank.py SOCKET FILE FUNCTION WORDS...` runs that function until its socket is closed."""

from __future__ import annotations

import importlib.util
import socket
import sys

import torch
from _ranks import Commands


def main(number: str, file: str, function: str, *words: str) -> None:
    """Load the file as its own module: a benchmark is found by its path, not by a name."""
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("side", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {file}")
    module = sys.modules["side"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, function)(*words, Commands(socket.socket(fileno=int(number))))


if __name__ == "__main__":
    main(*sys.argv[1:])

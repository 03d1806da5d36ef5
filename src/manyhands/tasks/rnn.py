"""The next character of a text, by a network with a memory: it reads one character after the other."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from manyhands.core.task import Task
from manyhands.tasks.text import next_character


class Reader(nn.Module):
    """Gated recurrent units: what they remember after the last character says what comes next."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 32)
        self.memory = nn.GRU(32, 96, batch_first=True)
        self.guess = nn.Linear(96, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        remembered, _ = self.memory(self.embedding(characters))
        guessed: Tensor = self.guess(remembered[:, -1])
        return guessed


def rnn(data: Path | None = None) -> Task:
    """Which character comes next? As in the task text, but read in order.

    Args:
        data: a text file in UTF-8, or a folder with exactly one `.txt` file.
    """
    return next_character(data, Reader, "rnn")

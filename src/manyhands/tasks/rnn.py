"""The next character of a text, by a recurrent network that reads one character after another."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from manyhands.core.task import Task
from manyhands.tasks.text import next_character


class SequenceReader(nn.Module):
    """Gated recurrent units; the state after the last character predicts the next one."""

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
    """Predict the next character, as in the task text, with a recurrent model.

    Args:
        data: a text file in UTF-8, or a folder with exactly one `.txt` file.
    """
    return next_character(data, SequenceReader, "rnn")

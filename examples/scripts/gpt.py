"""What the four scripts on text share: a small GPT whose output layer is its embedding, its data and its evaluation.

The text is the one `.txt` file of the folder `text` of a data folder, or any text file. Without either, it is the
source of a module of Python's own, so that nothing has to be downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset


class Block(nn.Module):
    """Attention to what came before, then two layers, each beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.queries_keys_values(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mixed(attended.transpose(1, 2).flatten(2))
        x = x + self.narrow(gelu(self.wide(self.norm2(x))))
        return x


class GPT(nn.Module):
    """Predicts each character from those before it.

    Args:
        characters: how many distinct ones there are.
        context: how many are seen at once.
        width: numbers per character.
        layers: blocks, of four heads each.
    """

    def __init__(self, characters: int, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, characters, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        logits: Tensor = self.output(self.norm(self.blocks(self.embedding(x) + self.position(places))))
        return logits


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Passages of a text, each with the characters that follow."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        passage = self.tokens[index * self.context : (index + 1) * self.context + 1]
        return passage[:-1], passage[1:]


def load_text(data: str | None, context: int) -> tuple[Windows, Windows, int]:
    """Training and test data, and the number of distinct characters."""
    path = Path(data or argparse.__file__)
    path = next(path.glob("text/*.txt")) if path.is_dir() else path
    text = path.read_text(encoding="utf-8")
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([alphabet[character] for character in text])
    cut = len(tokens) * 9 // 10
    return Windows(tokens[:cut], context), Windows(tokens[cut:], context), len(alphabet)


@torch.no_grad()
def evaluate(model: nn.Module, test: Windows) -> float:
    """The mean loss of the first passages of the test data, in nats per character."""
    model.eval()
    x, y = next(iter(DataLoader(test, 50)))
    loss = cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
    model.train()
    return loss

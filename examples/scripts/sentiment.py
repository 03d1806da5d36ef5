"""What the four HuggingFace-style scripts share: made-up reviews, a collate function, a model that returns its loss.

Every word has a hidden value, and a review is positive if the sum over its words is. The reviews have different
lengths, so a mini-batch is a dict with a mask, as tokenizers make them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

WORDS, LONGEST = 200, 24
PADDING = 0
Sample = tuple[Tensor, Tensor, Tensor]


@dataclass
class Output:
    """What a model of the transformers library returns, too."""

    logits: Tensor
    loss: Tensor | None = None


class SentimentModel(nn.Module):
    """A transformer that classifies reviews.

    Args:
        width: numbers per word.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LONGEST, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.classifier = nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        x = self.layer(x, src_key_padding_mask=attention_mask == 0)
        kept = attention_mask.unsqueeze(2)
        logits = self.classifier((x * kept).sum(1) / kept.sum(1))
        return Output(logits, None if labels is None else cross_entropy(logits, labels))


def load_reviews(count: int) -> tuple[TensorDataset, TensorDataset]:
    """Training and test data: words, their number, and the label."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(WORDS, generator=generator)
    words = torch.randint(1, WORDS, (count, LONGEST), generator=generator)
    lengths = torch.randint(4, LONGEST + 1, (count,), generator=generator)
    words = words.masked_fill(torch.arange(LONGEST) >= lengths.unsqueeze(1), PADDING)
    labels = (values.index_fill(0, torch.tensor(PADDING), 0.0)[words].sum(1) > 0).long()
    cut = count * 9 // 10
    return TensorDataset(words[:cut], lengths[:cut], labels[:cut]), TensorDataset(
        words[cut:], lengths[cut:], labels[cut:]
    )


def collate(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """A mini-batch as long as its longest review."""
    reviews = [words[:length] for words, length, _ in samples]
    ids = pad_sequence(reviews, batch_first=True, padding_value=PADDING)
    return {
        "input_ids": ids,
        "attention_mask": (ids != PADDING).long(),
        "labels": torch.stack([y for *_, y in samples]),
    }


@torch.no_grad()
def evaluate(model: nn.Module, test: TensorDataset) -> float:
    """The share of the test data that is classified correctly."""
    model.eval()
    batches = DataLoader(test, 200, collate_fn=collate)
    right = sum(int((model(**batch).logits.argmax(1) == batch["labels"]).sum()) for batch in batches)
    model.train()
    return right / len(test)

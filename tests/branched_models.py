"""Models that are no chains of layers."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, relu

WIDTH, WORDS, LENGTH = 8, 11, 6


class Attention(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril().bool())

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 2, 3 * width // 2).transpose(1, 2).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2) / 2).masked_fill(~self.mask[:length, :length], float("-inf"))
        mixed = dropout(scores.softmax(-1), self.rate, self.training) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.before, self.attention = nn.LayerNorm(WIDTH), Attention(rate)
        self.between = nn.LayerNorm(WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(rate)

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.drop(self.narrow(torch.nn.functional.gelu(self.widen(self.between(x)))))


class Gpt(nn.Module):
    """A small transformer over integers; the loss is inside if there are targets."""

    def __init__(self, tied=False, rate=0.0, layers=4):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block(rate) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words, targets=None):
        assert words.shape[1] <= LENGTH
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.h:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


class UNet(nn.Module):
    """Two skips: the outer one passes over all that is between the first and the last convolution."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 4, 3, padding=1)
        self.classify = nn.Linear(4, 10)

    def forward(self, x):
        outer = relu(self.first(x))
        inner = relu(self.down(outer))
        y = relu(self.norm(self.middle(inner)) + inner)
        y = torch.cat([relu(self.up(y)), outer], 1)
        return self.classify(relu(self.last(y)).mean((2, 3)))


class Branching(nn.Module):
    """What is computed depends on numbers of the first layer, and on those of the mini-batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        y = self.first(x).tanh()
        gate = y.mean()
        y = self.second(y).tanh() if gate > 0 else -self.second(y)
        y = self.third(y).tanh() if gate > 0 else self.third(y).relu()
        return self.last(y) if x.sum() > 0 else self.last(2 * y)

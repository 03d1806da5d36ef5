"""The loop of `plain_loop.py` with many workers: `manyhands run -n 2 own_loop.py`, or torchrun --nproc-per-node 2."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import manyhands as mh


def main() -> None:
    torch.manual_seed(0)
    points = torch.randn(4000, 2)
    inside = ((points.norm(dim=1) - 1.2).abs() < 0.5).long()
    dataset = TensorDataset(points, inside)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

    with mh.join(model, loss=cross_entropy, optimizer=optimizer, strategy=mh.diloco(period=20)) as hands:
        for x, y in hands.share(dataset, batch_size=32, epochs=20):
            loss = hands.step(x, y)

    if hands.lead:
        right = (model(points).argmax(1) == inside).float().mean()
        print(f"last loss {loss:.3f}, {right:.1%} of the points are classified correctly")


if __name__ == "__main__":
    main()

"""A plain loop of PyTorch: is a point of the plane inside a ring? `own_loop.py` is the same with many workers."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(0)
    points = torch.randn(4000, 2)
    inside = ((points.norm(dim=1) - 1.2).abs() < 0.5).long()
    dataset = TensorDataset(points, inside)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

    for _ in range(20):
        for x, y in DataLoader(dataset, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

    right = (model(points).argmax(1) == inside).float().mean()
    print(f"last loss {loss:.3f}, {right:.1%} of the points are classified correctly")


if __name__ == "__main__":
    main()

"""The loop of `plain_loop.py` with Lightning Fabric, for precision and clipping, and many workers by manyhands.

    pip install lightning-fabric
    manyhands run -n 2 lightning_or_fabric.py

Fabric sees one device in each process; prepare first, then set Fabric up around what `prepare` has returned.
"""

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh

torch.manual_seed(0)
points = torch.randn(4000, 2)
inside = ((points.norm(dim=1) - 1.2).abs() < 0.5).long()
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
loader = DataLoader(TensorDataset(points, inside), batch_size=32, shuffle=True)

hands = mh.join(strategy=mh.bsp())
model, optimizer, loader = hands.prepare(model, optimizer, loader)
fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
model, optimizer = fabric.setup(model, optimizer)
for _ in range(10):
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
hands.end()
right = (model(points).argmax(1) == inside).float().mean()
hands.print(f"last loss {loss:.3f}, {right:.1%} of the points are classified correctly")

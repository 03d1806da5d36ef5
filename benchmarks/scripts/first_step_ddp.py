"""One step of DDP with plain SGD; every rank appends the time at which it was done to the file FIRST_STEP_FILE."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
dataset = TensorDataset(torch.randn(64, 784), torch.randint(10, (64,)))

dist.init_process_group("gloo")
net = DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset)):
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    with Path(os.environ["FIRST_STEP_FILE"]).open("a", encoding="ascii") as file:
        file.write(f"{time.time()!r}\n")
dist.destroy_process_group()
os._exit(0)  # gloo sometimes aborts while the interpreter exits; everything is measured by now

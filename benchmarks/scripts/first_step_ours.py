"""One step of bsp with plain SGD; every rank appends the time at which it was done to the file FIRST_STEP_FILE."""

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
dataset = TensorDataset(torch.randn(64, 784), torch.randint(10, (64,)))

with mh.join(model, loss=F.cross_entropy, strategy=mh.bsp(lr=0.1)) as hands:
    for x, y in hands.share(dataset, batch_size=32, epochs=1):
        hands.step(x, y)
        with Path(os.environ["FIRST_STEP_FILE"]).open("a", encoding="ascii") as file:
            file.write(f"{time.time()!r}\n")

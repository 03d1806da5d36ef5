"""A task of your own: a function that returns a Task. Run this file, or name the function on the command line:

manyhands train ssp --task your_own_task:waves --virtual --workers 4
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import manyhands as mh


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def waves() -> mh.Task:
    """Learn one wave from 600 noisy samples."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-2, 2, 600).unsqueeze(1)
    y = torch.sin(2 * x) + 0.05 * torch.randn(x.shape, generator=generator)
    return mh.Task(model=network, data=TensorDataset(x, y), loss=mse_loss, batch_size=20, epochs=80, name="waves")


def main() -> None:
    for name, method in {"bsp": mh.bsp(lr=0.1), "ssp": mh.ssp(lr=0.03)}.items():
        result = mh.train(waves(), method, cluster=mh.Cluster(workers=4))
        first = next(line["loss"] for line in result.records if line["kind"] == "step")
        print(f"{name}: loss {first:.3f} -> {result.final_loss:.3f} in {result.seconds * 1000:.0f} virtual ms")


if __name__ == "__main__":
    main()

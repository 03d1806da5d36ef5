"""Runs scripts of `examples/scripts/` one after the other in one process, and writes down their weights after every step.

    manyhands run -n 2 scripts_in_a_row.py FOLDER resnet_mnist gpt_shakespeare
    torchrun --nproc-per-node 2 scripts_in_a_row.py FOLDER ddp_resnet_mnist ddp_gpt_shakespeare

A process group of torch cannot be made again under torchrun, so all scripts of DDP have the same one, and hands that a script
leaves to the end of the process are ended after the script. FOLDER/NAME-RANK.json is a list of digests, one for each step of the optimizer. Scripts of DDP draw the batches that those
of manyhands draw: `DistributedSampler` deals single samples, our loaders deal whole batches.
"""

import hashlib
import json
import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.utils.data
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import BatchSampler, RandomSampler, Sampler

import manyhands as mh
from manyhands.run.loaders import PartOfBatches

SCRIPTS = Path(__file__).parents[1] / "examples" / "scripts"
BATCH = 32
SMALL = {
    "resnet_mnist": ("--epochs", "2", "--width", "4"),
    "gpt_shakespeare": ("--epochs", "1", "--width", "16", "--context", "32"),
    "huggingface_style": ("--epochs", "2", "--width", "16", "--reviews", "1000"),
}
"""Arguments with which each script takes few seconds."""


class SameBatches(Sampler):
    """In place of torch's DistributedSampler: the samples of the batches that our loader gives this rank."""

    def __init__(self, dataset, drop_last):
        batches = BatchSampler(RandomSampler(dataset), BATCH, drop_last)
        self.batches = PartOfBatches(batches, 0, dist.get_rank(), dist.get_world_size(), even=True)

    def set_epoch(self, epoch):
        self.batches.passes = epoch

    def __iter__(self):
        return (index for batch in self.batches for index in batch)

    def __len__(self):
        return BATCH * len(self.batches)


def digest(optimizer):
    numbers = hashlib.sha256()
    for group in optimizer.param_groups:
        for p in group["params"]:
            numbers.update(p.detach().numpy().tobytes())
    return numbers.hexdigest()


def begin_ddp():
    """One process group for all scripts, and our batches."""
    dist.init_process_group("gloo")
    dist.init_process_group = dist.destroy_process_group = lambda *_: None
    torch.utils.data.DistributedSampler = SameBatches


def keep_hands(strategy):
    """The hands that scripts join are kept in the list; `strategy`, if it is given, replaces theirs."""
    joined, join = [], mh.join

    def kept(**knobs):
        joined.append(join(**({**knobs, "strategy": strategy} if strategy else knobs)))
        return joined[-1]

    mh.join = kept
    return joined


def main(folder, *names):
    torch.set_num_threads(1)
    sys.path.insert(0, str(SCRIPTS))
    hands = keep_hands(None)
    if names[0].startswith("ddp_"):
        begin_ddp()
    digests = []
    register_optimizer_step_post_hook(lambda optimizer, *_: digests.append(digest(optimizer)))
    for name in names:
        digests.clear()
        small = SMALL[name.removeprefix("ddp_")]
        sys.argv = [name, *small, "--batch-size", str(BATCH), "--out", f"{folder}/{name}.pt"]
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        if hands:
            hands.pop().end()
        Path(folder, f"{name}-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(digests))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Runs scripts of `examples/scripts/` one after the other in one process, and writes down what came of each.

    manyhands run -n 2 scripts_in_a_row.py FOLDER '["resnet_mnist", "--epochs", "2"]' '["gpt_shakespeare"]'
    torchrun --nproc-per-node 2 scripts_in_a_row.py FOLDER '["ddp_resnet_mnist", "--epochs", "2"]'

FOLDER/NUMBER-RANK.json has a digest of the weights after every step of the optimizer, and the lines that were printed.
Before the arguments of a script may come `--method`, which replaces the one that the script names.

Two things differ from scripts that run on their own. Scripts of DDP draw the batches that those of manyhands draw:
`DistributedSampler` deals single samples, our loaders deal whole batches. And since torch cannot make its process group
again under torchrun, all scripts have the same one.
"""

import hashlib
import io
import json
import os
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist
import torch.utils.data
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import BatchSampler, RandomSampler, Sampler

import manyhands as mh
from manyhands.run.loader_position import LoaderPosition
from manyhands.run.loaders import PartOfBatches

SCRIPTS = Path(__file__).parents[1] / "examples" / "scripts"
METHODS = {
    "ssp": mh.ssp(staleness=3),
    "diloco": mh.diloco(period=5, outer_lr=0.9, outer_momentum=0.3),
    "easgd": mh.easgd(),
    "ad-psgd": mh.ad_psgd(),
    "topk-sgd": mh.topk_sgd(fraction=0.1),
}
BATCH = 32
"""Samples per mini-batch of one worker."""
JOIN, DESTROY = mh.join, dist.destroy_process_group


class SameBatches(Sampler):
    """In place of torch's DistributedSampler: the samples of the batches that our loader gives this rank."""

    def __init__(self, dataset, drop_last):
        batches = BatchSampler(RandomSampler(dataset), BATCH, drop_last)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.position = LoaderPosition(ranks, (None, None), ())
        self.batches = PartOfBatches(batches, 0, rank, ranks, even=True, position=self.position)

    def set_epoch(self, epoch):
        self.position.passes = epoch

    def __iter__(self):
        return (index for batch in self.batches for index in batch)

    def __len__(self):
        return BATCH * len(self.batches)


def begin_ddp():
    """One process group for all scripts, and our batches."""
    dist.init_process_group("gloo")
    dist.init_process_group = dist.destroy_process_group = lambda *_: None
    torch.utils.data.DistributedSampler = SameBatches


def keep_hands(strategy):
    """The hands that a script joins are put into a list; `strategy`, if it is given, replaces the script's."""
    joined = []

    def kept(**knobs):
        joined.append(JOIN(**({**knobs, "strategy": strategy} if strategy else knobs)))
        return joined[-1]

    mh.join = kept
    return joined


def digest(optimizer):
    numbers = hashlib.sha256()
    for group in optimizer.param_groups:
        for p in group["params"]:
            numbers.update(p.detach().numpy().tobytes())
    return numbers.hexdigest()


def run(name, *words):
    """Run one script; the lines that it prints."""
    method = words[1] if words[:1] == ("--method",) else None
    hands = keep_hands(METHODS.get(method))
    sys.argv = [name, *(words[2:] if method else words)]
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    for one in hands:
        one.end()
    return printed.getvalue().splitlines()


def main(folder, *jobs):
    torch.set_num_threads(1)
    sys.path.insert(0, str(SCRIPTS))
    digests = []
    register_optimizer_step_post_hook(lambda optimizer, *_: digests.append(digest(optimizer)))
    scripts = [json.loads(job) for job in jobs]
    if scripts[0][0].startswith("ddp_"):
        begin_ddp()
    for number, script in enumerate(scripts):
        digests.clear()
        lines = run(*script, "--out", f"{folder}/{number}.pt")
        found = json.dumps({"digests": digests, "lines": lines})
        Path(folder, f"{number}-{os.environ.get('RANK', 0)}.json").write_text(found)
    if dist.is_initialized():
        DESTROY()
        os._exit(0)  # gloo sometimes aborts while the interpreter exits; all is written by now


if __name__ == "__main__":
    main(*sys.argv[1:])

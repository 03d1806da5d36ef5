"""A small GPT learns to write like Shakespeare with torch's DDP: warm-up, gradient accumulation, tied embeddings."""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from gpt import GPT, evaluate, load_text
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=os.environ.get("MANYHANDS_DATA"), help="a text, or a folder with text/")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=2, help="mini-batches per step")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--warmup", type=int, default=20, help="steps until the learning rate is reached")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="gpt.pt", help="where the model is saved")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    train, test, characters = load_text(args.data, args.context)
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(GPT(characters, args.context, args.width, layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader, 1):
            is_last = number % args.accumulate == 0 or number == len(loader)
            with nullcontext() if is_last else model.no_sync():
                loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
                (loss / args.accumulate).backward()
            if is_last:
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test loss {evaluate(model.module, test):.3f}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A loop in the style of the transformers library with torch's DDP: dict batches, `outputs.loss`, a schedule."""

import argparse

import torch
import torch.distributed as dist
from sentiment import SentimentModel, collate, evaluate, load_reviews
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, DistributedSampler


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--reviews", type=int, default=4000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="sentiment.pt", help="where the model is saved")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    train, test = load_reviews(args.reviews)
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True, collate_fn=collate)
    model = DistributedDataParallel(SentimentModel(args.width))
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=args.epochs * len(loader))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            outputs = model(**batch)
            outputs.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {outputs.loss.item():.3f}, accuracy {evaluate(model.module, test):.3f}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A loop in the style of the transformers library with Accelerate: dict batches, `outputs.loss`, a schedule."""

import argparse

import torch
from accelerate import Accelerator
from sentiment import SentimentModel, collate, evaluate, load_reviews
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader


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
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(args.seed)
    train, test = load_reviews(args.reviews)
    loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True, collate_fn=collate)
    model = SentimentModel(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=args.epochs * len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for epoch in range(args.epochs):
        for batch in loader:
            outputs = model(**batch)
            accelerator.backward(outputs.loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: loss {outputs.loss.item():.3f}, accuracy {evaluate(model, test):.3f}")
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), args.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""A loop in the style of the transformers library with many workers: dict batches, `outputs.loss`, a schedule."""

import argparse

import torch
from sentiment import SentimentModel, collate, evaluate, load_reviews
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

import manyhands as mh


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
    torch.manual_seed(args.seed)
    train, test = load_reviews(args.reviews)
    loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True, collate_fn=collate)
    model = SentimentModel(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    hands = mh.join(strategy=mh.bsp(), seed=args.seed)
    model, optimizer, loader = hands.prepare(model, optimizer, loader)
    scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=args.epochs * len(loader))

    for epoch in range(args.epochs):
        for batch in loader:
            outputs = model(**batch)
            outputs.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        with hands.answer():
            hands.print(f"epoch {epoch + 1}: loss {outputs.loss.item():.3f}, accuracy {evaluate(model, test):.3f}")
    hands.end()
    if hands.lead:
        torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()

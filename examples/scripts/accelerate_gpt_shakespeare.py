"""A small GPT learns to write like Shakespeare with Accelerate: warm-up, gradient accumulation, tied embeddings."""

import argparse
import os

import torch
from accelerate import Accelerator
from gpt import GPT, evaluate, load_text
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader


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
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate, cpu=True)
    torch.manual_seed(args.seed)
    train, test, characters = load_text(args.data, args.context)
    loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)
    model = GPT(characters, args.context, args.width, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for epoch in range(args.epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test loss {evaluate(model, test):.3f}")
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), args.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()

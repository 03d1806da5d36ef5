"""A small ResNet learns digits with Accelerate: AdamW with groups, OneCycle, clipping, bf16, the best is saved."""

import argparse
import os

import torch
from accelerate import Accelerator
from resnet import ResNet, evaluate, groups, load_digits
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=os.environ.get("MANYHANDS_DATA"), help="a folder with mnist/")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--width", type=int, default=16, help="channels of the first block")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="resnet.pt", help="where the best model is saved")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    torch.manual_seed(args.seed)
    train, test = load_digits(args.data)
    loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)
    model = ResNet(args.width)
    optimizer = torch.optim.AdamW(groups(model))
    scheduler = OneCycleLR(optimizer, args.lr, epochs=args.epochs, steps_per_epoch=len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    best = 0.0
    for epoch in range(args.epochs):
        for x, y in loader:
            with accelerator.autocast():
                loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accuracy = evaluate(model, test)
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}, accuracy {accuracy:.3f}")
        if accelerator.is_main_process and accuracy > best:
            best = accuracy
            torch.save(accelerator.unwrap_model(model).state_dict(), args.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()

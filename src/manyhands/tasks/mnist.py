"""Handwritten digits of 28 x 28 pixels: MNIST, read from the four usual files.

Data: Y. LeCun, C. Cortes, C. J. C. Burges, The MNIST database of handwritten digits. A file is a gzipped
array of bytes after a header of big-endian 32-bit words:

    images: 0x0803, count, rows, columns        labels: 0x0801, count
"""

from __future__ import annotations

import gzip
import zlib
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.task import Task
from manyhands.tasks.parts import accuracy, mlp

FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
SIDE = 28
CLASSES = 10


def mnist(data: Path | None = None) -> Task:
    """Classify digits of MNIST.

    Args:
        data: the folder with the four files.
    """
    if data is None:
        raise Refused(f"the task mnist needs --data DIR, a folder with {', '.join(FILES)}")
    train_images, train_labels, test_images, test_labels = (data / name for name in FILES)
    return Task(
        model=partial(mlp, SIDE * SIDE, 256, 128, 64, CLASSES),
        data=_pairs(train_images, train_labels),
        test=_pairs(test_images, test_labels),
        loss=cross_entropy,
        metric=accuracy,
        batch_size=32,
        epochs=5,
        name="mnist",
    )


def _pairs(images: Path, labels: Path) -> TensorDataset:
    pixels, digits = read_idx(images, SIDE, SIDE), read_idx(labels)
    refuse_unless(len(digits) == len(pixels), f"the number of labels in {labels}", len(digits), f"{len(pixels)}")
    refuse_unless(digits.max() < CLASSES, f"the largest label in {labels}", digits.max(), f"< {CLASSES}")
    x = pixels.reshape(len(pixels), -1).astype(np.float32)
    x /= 255
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(digits.astype(np.int64)))


def read_idx(path: Path, *shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """An array of bytes whose items have this shape; any other file is refused with the reason."""
    raw = _unpack(path)
    magic, start = 0x0801 + len(shape), 4 * (2 + len(shape))
    refuse_unless(len(raw) >= start, f"the length of {path}", len(raw), f">= {start} bytes")
    found, count, *sides = np.frombuffer(raw[:start], dtype=">u4").tolist()
    refuse_unless(found == magic, f"the magic number of {path}", found, f"{magic}")
    refuse_unless(count >= 1, f"the number of items in {path}", count, ">= 1")
    refuse_unless(tuple(sides) == shape, f"the size of an image in {path}", tuple(sides), f"{shape}")
    body, size = len(raw) - start, count * prod(shape)
    refuse_unless(body == size, f"the number of bytes after the header of {path}", body, f"{size}")
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(count, *shape)


def _unpack(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise Refused(f"there is no file {path}: --data must be a folder with {', '.join(FILES)}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Refused(f"{path} is not a whole gzip file: {error}") from None

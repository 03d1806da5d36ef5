"""The random state of a process: that of torch's CPU generator, of `random` and of numpy, as tensors.

In virtual time all ranks share one process, and with it these generators.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from manyhands.core.strategy import Saved


def random_state(own: random.Random | None = None) -> Saved:
    """The state of the process's generators, and of another one of Python's if it is given."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    found = {
        "torch": torch.get_rng_state(),
        "python": _packed(random.getstate()),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor(gauss, dtype=torch.float64),
    }
    return found if own is None else {**found, "own": _packed(own.getstate())}


def restore_random(saved: Mapping[str, Tensor], own: random.Random | None = None) -> None:
    """Continue from a state that `random_state` has returned."""
    torch.set_rng_state(saved["torch"])
    random.setstate(_unpacked(saved["python"]))
    *keys, position, has_gauss = saved["numpy"].tolist()
    gauss = float(saved["numpy_gauss"])
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    if own is not None and "own" in saved:
        own.setstate(_unpacked(saved["own"]))


def _packed(state: tuple[int, tuple[int, ...], float | None]) -> Tensor:
    """A state of `random` as numbers: its words, which have 32 bits, and the pending normal deviate or NaN."""
    version, words, gauss = state
    return torch.tensor([version, *words, math.nan if gauss is None else gauss], dtype=torch.float64)


def _unpacked(numbers: Tensor) -> tuple[int, tuple[int, ...], float | None]:
    version, *words, gauss = numbers.tolist()
    return int(version), tuple(map(int, words)), None if math.isnan(gauss) else gauss

"""What lending asks of everyone: nobody writes into a lent tensor, nobody waits inside a backward pass.

A tensor that was sent belongs to its receiver until released. Its sender could still write into it, and nothing
would tell; so one can remember the tensor's version when it was sent. Views share one version with their base, so
for them the content is remembered too, as a checksum.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

_graph_task = torch._C._current_graph_task_id


def inside_backward() -> bool:
    """Whether autograd is running on this thread right now."""
    return _graph_task() != -1


def _checksum(x: Tensor) -> int:
    return zlib.crc32(memoryview(x.detach().reshape(-1).contiguous().view(torch.uint8).numpy()))  # type: ignore[arg-type]


class Seal:
    """What a lent tensor looked like."""

    __slots__ = ("_checksum", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version
        view = tensor._base is not None or tensor.untyped_storage().nbytes() != tensor.nbytes
        self._checksum = _checksum(tensor) if view and not tensor.is_meta else None

    def broken(self) -> bool:
        """Whether somebody wrote into it since."""
        if self._tensor._version == self._version or self._tensor.is_meta:
            return False
        return self._checksum is None or _checksum(self._tensor) != self._checksum

"""The guard of sending: no write into a tensor in flight.

A tensor that was sent belongs to its receiver until released. A write of its sender would go unnoticed, so a guard
records the tensor's version when it is sent. A view shares its version with its base, so for a view the guard also
records a checksum of the contents.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor


def _checksum(x: Tensor) -> int:
    return zlib.crc32(memoryview(x.detach().reshape(-1).contiguous().view(torch.uint8).numpy()))  # type: ignore[arg-type]


class SendGuard:
    """The version, and for a view the checksum, of a tensor when it was sent."""

    __slots__ = ("_checksum", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version
        view = tensor._base is not None or tensor.untyped_storage().nbytes() != tensor.nbytes
        self._checksum = _checksum(tensor) if view and not tensor.is_meta else None

    def broken(self) -> bool:
        """Whether the tensor was written since."""
        if self._tensor._version == self._version or self._tensor.is_meta:
            return False
        return self._checksum is None or _checksum(self._tensor) != self._checksum

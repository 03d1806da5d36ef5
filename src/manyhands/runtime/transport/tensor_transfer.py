"""How tensors travel between two ranks.

To a rank of the same host a tensor is copied once into shared memory, or not at all if it lies there already (a slot,
`shared`). To other hosts, and with the link "tcp" to all ranks, its bytes go through the socket into reused buffers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.runtime.rank_spec import RankSpec
from manyhands.runtime.transport import wire
from manyhands.runtime.transport.mailbox import RealMessage
from manyhands.runtime.transport.shared_memory import Buffers, Memory
from manyhands.runtime.transport.wire import TensorHeader

INLINE = 8 * 1024
"""Bytes up to which tensors go through the socket even inside a host."""


class OutgoingTensors(NamedTuple):
    """Tensors ready to send: their headers, bytes for the socket, and the buffer of ours that they were copied into."""

    headers: tuple[TensorHeader, ...] = ()
    body: tuple[bytes | memoryview, ...] = ()
    buffer: Tensor | None = None


class TensorTransfer:
    """Packs and unpacks the tensors of one rank's messages."""

    def __init__(self, spec: RankSpec, memory: Memory) -> None:
        self._spec, self._host = spec, spec.host
        self._memory = memory
        self.incoming = Buffers(lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
        self.outgoing = Buffers(memory.fresh)

    def pack(self, to: int, name: str, tensors: list[Tensor]) -> OutgoingTensors:
        """Prepare tensors for rank `to`: as bytes of the body, or in shared memory."""
        near = self._spec.link == "shm" and self._spec.hosts[to] == self._host
        if near and sum([x.nbytes for x in tensors]) > INLINE:
            return self._in_shared_memory(to, name, tensors)
        body: list[bytes | memoryview] = []
        for x in tensors:
            body += wire.as_bytes(x), bytes(wire.padded(x.nbytes) - x.nbytes)
        return OutgoingTensors(tuple([TensorHeader(x.dtype, tuple(x.shape)) for x in tensors]), tuple(body))

    def _in_shared_memory(self, to: int, name: str, tensors: list[Tensor]) -> OutgoingTensors:
        found = [self._memory.find(x) for x in tensors]
        need = sum([wire.padded(x.nbytes) for x, region in zip(tensors, found, strict=True) if region is None])
        buffer = self.outgoing.take((to, name), need) if need else None
        headers, start = [], 0
        for x, region in zip(tensors, found, strict=True):
            header = TensorHeader(x.dtype, tuple(x.shape))
            if not x.nbytes:
                headers.append(header)
                continue
            if region is None:
                assert buffer is not None
                wire.tensor_at(buffer, header, start).copy_(x)
                region = self._memory.find(buffer[start:])
                start += wire.padded(x.nbytes)
            assert region is not None
            headers.append(header._replace(region=region[0], size=region[1], offset=region[2]))
        return OutgoingTensors(tuple(headers), (), buffer)

    def unpack(self, message: RealMessage) -> tuple[Tensor, ...]:
        """The tensors of a message as views, without a copy."""
        body = torch.empty(0, dtype=torch.uint8) if message.body is None else message.body
        inline = iter(wire.tensors_of(body, message.headers))
        region = self._memory.region
        return tuple(
            [
                wire.tensor_at(region(header.region, header.size), header, header.offset)
                if header.region
                else next(inline)
                for header in message.headers
            ]
        )


def plain(x: Tensor) -> Tensor:
    """The tensor as it is sent: detached, contiguous and in main memory (from a GPU: untested)."""
    return x.detach().cpu().contiguous()

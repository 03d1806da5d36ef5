"""The collectives of `torch.distributed` behind the port: gloo here, NCCL for tensors on GPUs (untested).

They are torch's own: quick, but a rank that dies inside one is noticed only by us, who stop waiting for it; the
promises about time, bits and the job's secret do not reach into them.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.protocols import Tag, recv

if TYPE_CHECKING:
    from manyhands.runtime.transport import RealTransport

MEET = Tag("native", carries="nothing")
NAP = 1e-4


class Native:
    """All-reduce by a process group over `group`, made at the first call."""

    def __init__(self, transport: RealTransport, group: Sequence[int]) -> None:
        self._t = transport
        self._ranks = sorted(group)
        self._others = [rank for rank in self._ranks if rank != transport.rank]
        self._tag = Tag(f"{MEET.name}:{self._ranks}", carries="nothing")
        self._groups: dict[str, Any] = transport.native_groups

    def all_reduce(self, x: Tensor) -> None:
        """Sum in place."""
        if not self._others:
            return
        self._meet()
        work = self._group(x).allreduce([x.detach()])
        while not work.is_completed():
            self._t.check()
            for rank, why in self._t.gone.items():
                if rank in self._others and why != "left":  # who has left has done its part
                    raise PeerLost(rank, why)
            time.sleep(NAP)
        work.wait()

    def _meet(self, word: str = "") -> str:
        """Everyone hears the first one's word; whoever is dead is noticed here, before torch waits for it."""
        for rank in self._others:
            self._t.send(rank, self._tag, (word,))
        heard = {rank: recv(self._t, self._tag, frm=rank).meta[0] for rank in self._others}
        first: str = heard.get(self._ranks[0], word)
        return first

    def _group(self, x: Tensor) -> Any:
        backend = "nccl" if x.is_cuda else "gloo"
        key = f"{backend}{self._ranks}"
        if key not in self._groups:
            self._groups[key] = self._make(backend)
        return self._groups[key]

    def _make(self, backend: str) -> Any:
        torch_own: Any = import_module("torch.distributed")
        place, size = self._ranks.index(self._t.rank), len(self._ranks)
        host, port, file = self._t.seat.bind, 0, None
        if place == 0:  # on a socket of our own, since by default the store listens on every interface
            listener = socket.create_server((host, 0))
            port, file = listener.getsockname()[1], listener.detach()
        host, _, number = self._meet(f"{host}:{port}").rpartition(":")
        store = torch_own.TCPStore(host, int(number), size, place == 0, master_listen_fd=file, use_libuv=True)
        prefixed = torch_own.PrefixStore(backend, store)
        if backend == "nccl":
            return torch_own.ProcessGroupNCCL(prefixed, place, size, torch_own.ProcessGroupNCCL.Options())
        gloo = torch_own.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._t.seat.bind)]
        options._timeout = timedelta(minutes=30)
        return gloo(prefixed, place, size, options)

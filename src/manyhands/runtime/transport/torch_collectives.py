"""The collectives of `torch.distributed` behind the port: gloo here, NCCL for tensors on GPUs (untested).

They are torch's own: fast, but the promises about time, bits and the job's secret do not cover them. A rank that dies
inside a call is noticed by our transport, which then stops waiting for torch. Before each call there is a barrier by
messages, so that torch never waits for a rank that was lost earlier.

    all_reduce, broadcast, all_to_all    torch's
    all_gather                           torch's, for spans of equal length: shorter ones are padded
    reduce_scatter                       the own span of an all_reduce
    barrier                              that of messages alone
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError, PeerLost
from manyhands.core.port import ReduceOp, Tag, even_spans, recv

if TYPE_CHECKING:
    from manyhands.runtime.transport.transport import RealTransport

MEET = Tag("native", carries="nothing")
NAP = 1e-4


class TorchCollective:
    """Collectives of a process group over `group`, made at the first call."""

    def __init__(self, transport: RealTransport, group: Sequence[int]) -> None:
        if transport.rank not in group:
            raise ManyhandsError(f"rank {transport.rank} is not in the group {list(group)}")
        self._t = transport
        self._ranks = sorted(group)
        self._index = self._ranks.index(transport.rank)
        self._others = [rank for rank in self._ranks if rank != transport.rank]
        self._tag = Tag(f"{MEET.name}:{self._ranks}", carries="nothing")
        self._groups: dict[str, Any] = transport.native_groups

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        options = _torch().AllreduceOptions()
        options.reduceOp = _torch().ReduceOp.SUM if op == "sum" else _torch().ReduceOp.MAX
        self._run(x, lambda group: group.allreduce([x.detach()], options))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        total = x.detach().clone()
        self.all_reduce(total)
        return total[even_spans(x.numel(), len(self._ranks))[self._index]].clone()

    @torch.no_grad()
    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        spans = even_spans(out.numel(), len(self._ranks))
        longest = -(-out.numel() // len(spans))
        padded, gathered = (out.new_empty(size) for size in (longest, longest * len(spans)))
        padded[: mine.numel()] = mine
        gathered[: mine.numel()] = mine  # the result if there is no other rank
        self._run(out, lambda group: group._allgather_base(gathered, padded))
        for index, span in enumerate(spans):
            out[span] = gathered[index * longest :][: span.stop - span.start]

    def broadcast(self, x: Tensor, root: int) -> None:
        options = _torch().BroadcastOptions()
        options.rootRank = self._ranks.index(root)
        self._run(x, lambda group: group.broadcast([x.detach()], options))

    @torch.no_grad()
    def all_to_all(self, xs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        sent, received = torch.cat(list(xs)), torch.cat(list(outs))
        sizes = [[x.numel() for x in some] for some in (outs, xs)]
        if self._others:
            self._run(sent, lambda group: group.alltoall_base(received, sent, *sizes))
        else:
            received = sent
        for out, x in zip(outs, torch.split(received, sizes[0]), strict=True):
            out.copy_(x)

    def barrier(self) -> None:
        self._barrier()

    def _run(self, x: Tensor, call: Callable[[Any], Any]) -> None:
        """Wait for all ranks, then for torch, unless a rank is lost; nothing if there is no other rank."""
        if not self._others:
            return
        self._barrier()
        work = call(self._process_group(x))
        while not work.is_completed():
            self._t.check()
            for rank, why in self._t.gone.items():
                if rank in self._others and why != "left":  # a rank that has left has done its part
                    raise PeerLost(rank, why)
            time.sleep(NAP)
        work.wait()

    def _barrier(self, word: str = "") -> str:
        """Wait for all ranks and return the first one's word; raises the loss of a rank before torch waits for it."""
        for rank in self._others:
            self._t.send(rank, self._tag, (word,))
        words = {rank: recv(self._t, self._tag, frm=rank).meta[0] for rank in self._others}
        first: str = words.get(self._ranks[0], word)
        return first

    def _process_group(self, x: Tensor) -> Any:
        backend = "nccl" if x.is_cuda else "gloo"
        key = f"{backend}{self._ranks}"
        if key not in self._groups:
            self._groups[key] = self._make(backend)
        return self._groups[key]

    def _make(self, backend: str) -> Any:
        size, is_first = len(self._ranks), self._index == 0
        host, port, file = self._t.spec.bind, 0, None
        if is_first:  # on a socket of our own, since by default the store listens on every interface
            listener = socket.create_server((host, 0))
            port, file = listener.getsockname()[1], listener.detach()
        host, _, number = self._barrier(f"{host}:{port}").rpartition(":")
        store = _torch().TCPStore(host, int(number), size, is_first, master_listen_fd=file, use_libuv=True)
        prefixed = _torch().PrefixStore(backend, store)
        if backend == "nccl":
            return _torch().ProcessGroupNCCL(prefixed, self._index, size, _torch().ProcessGroupNCCL.Options())
        gloo = _torch().ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._t.spec.bind)]
        options._timeout = timedelta(minutes=30)
        return gloo(prefixed, self._index, size, options)


def _torch() -> Any:
    """`torch.distributed`, imported at the first call: most runs do not need it."""
    return import_module("torch.distributed")

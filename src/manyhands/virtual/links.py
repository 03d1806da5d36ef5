"""Links between hosts: latency, bandwidth, and contention at both ends.

A host sends through one port and receives through another. A sending port serves its flows (one per
pair of ranks) in turn, one chunk at a time, a message in at most 16 chunks; a chunk occupies both ports:

    start = max(now, this port free, that port free)      end = start + bytes / bandwidth
    the message arrives at (end of its last chunk) + latency

So senders share the port they all send to, and one large message does not delay the others.
Messages of one flow keep their order. Ranks of one host use the host's memory instead of the ports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from manyhands.virtual.kernel import Kernel

CHUNKS = 16
SMALLEST_CHUNK = 16 * 1024


class Port:
    """One end of a host's link; `rate` in bytes per second."""

    __slots__ = ("flows", "free", "last", "rate", "serving")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.free = 0.0
        self.flows: deque[Flow] = deque()
        self.last: Flow | None = None
        """The flow whose chunk is being sent and which has more: it queues again at the end of that chunk."""
        self.serving = False


class Flow:
    """The messages in transit from one rank to another."""

    __slots__ = ("arrival", "chunk", "into", "latency", "left", "out", "queue", "queued", "to")

    def __init__(self, out: Port, into: Port | None, to: int, latency: float) -> None:
        self.out = out
        self.into = into
        self.to = to
        self.latency = latency
        self.queue: deque[tuple[int, Any]] = deque()
        self.left = 0
        self.chunk = 0
        self.queued = False
        self.arrival = 0.0

    def begin(self) -> None:
        """Start on the first message of the queue."""
        self.left = self.queue[0][0]
        self.chunk = max(-(-self.left // CHUNKS), SMALLEST_CHUNK)


class Network:
    """All links of a cluster; hands every message to `deliver` when it arrives."""

    def __init__(
        self,
        kernel: Kernel,
        hosts: Sequence[int],
        *,
        latency: float,
        bandwidth: float,
        local_latency: float,
        local_bandwidth: float,
        deliver: Callable[[Any], None],
    ) -> None:
        self._kernel = kernel
        self._hosts = hosts
        self._latency = (latency, local_latency)
        self._out = {host: Port(bandwidth) for host in hosts}
        self._in = {host: Port(bandwidth) for host in hosts}
        self._memory = [Port(local_bandwidth) for _ in hosts]
        self._flows: dict[tuple[int, int], Flow] = {}
        self._slower = [1.0] * len(hosts)
        self._deliver = deliver
        self._turn = self._serve  # passed with every chunk, so it is bound once

    def carry(self, frm: int, to: int, nbytes: int, message: Any) -> None:
        """Send a message; it is delivered after the time that the links need."""
        flow = self._flows.get((frm, to)) or self._open(frm, to)
        flow.queue.append((nbytes, message))
        if flow.queued:
            return
        flow.queued = True
        flow.begin()
        port = flow.out
        port.flows.append(flow)
        if not port.serving:
            if port.free > self._kernel.now:
                port.serving = True
                self._kernel.at(port.free, self._turn, port)
            else:
                self._serve(port)

    def _open(self, frm: int, to: int) -> Flow:
        here, there = self._hosts[frm], self._hosts[to]
        local = here == there
        latency = self._latency[local] * (1.0 if local else self._slower[frm] * self._slower[to])
        out, into = (self._memory[frm], None) if local else (self._out[here], self._in[there])
        flow = self._flows[frm, to] = Flow(out, into, to, latency)
        return flow

    def _serve(self, port: Port) -> None:
        """Send one chunk of the flow whose turn it is."""
        flows = port.flows
        if port.last is not None:
            flows.append(port.last)
            port.last = None
        if not flows:
            port.serving = False
            return
        flow = flows.popleft()
        chunk = flow.chunk if flow.chunk < flow.left else flow.left
        start, rate, into = self._kernel.now, port.rate, flow.into
        if into is None:
            end = start + chunk / rate
        else:
            start = into.free if into.free > start else start
            end = into.free = start + chunk / (rate if rate < into.rate else into.rate)
        port.free = end
        flow.left -= chunk
        if not flow.left:
            self._complete(flow, end)
        if flow.queued:
            port.last = flow
        port.serving = flow.queued or bool(flows)
        if port.serving:
            self._kernel.at(end, self._turn, port)

    def _complete(self, flow: Flow, end: float) -> None:
        """The last chunk is being sent: schedule the arrival, begin the next message."""
        flow.arrival = max(end + flow.latency, flow.arrival)
        self._kernel.at(flow.arrival, self._deliver, flow.queue.popleft()[1])
        flow.queued = bool(flow.queue)
        if flow.queued:
            flow.begin()

    def slow(self, rank: int, factor: float) -> None:
        """Divide the bandwidth of a rank's host by `factor`, multiply its latency."""
        host = self._hosts[rank]
        self._out[host].rate /= factor
        self._in[host].rate /= factor
        self._slower[rank] *= factor
        for (frm, to), flow in self._flows.items():
            if rank in (frm, to) and flow.into is not None:
                flow.latency *= factor

    def drop(self, rank: int) -> list[Any]:
        """Remove and return the messages that a lost rank had not sent completely, and those in transit to it."""
        dropped = []
        for (frm, to), flow in self._flows.items():
            if rank in (frm, to) and flow.queued:
                dropped += [message for _, message in flow.queue]
                flow.queue.clear()
                flow.queued = False
                if flow.out.last is flow:
                    flow.out.last = None
                else:
                    flow.out.flows.remove(flow)
        return dropped

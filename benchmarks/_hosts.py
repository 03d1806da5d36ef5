"""Virtual hosts on this machine: network namespaces around a switch, each behind a link of limited speed.

    host 0 ---- 1 Gbit/s ----+
    host 1 ---- 1 Gbit/s ----+ switch          both directions of a link are limited, by a token bucket at either end
    host 2 ---- unlimited ---+

They can connect only to each other. Root and the commands `ip` and `tc` are needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType

from manyhands.core.errors import ManyhandsError, Refused

CABLE = "cable"
"""The name of the network interface in every host."""
BURST = 128 * 1024
"""Bytes that may pass at once: few compared with a message, many compared with what passes between two kernel ticks."""
QUEUE = "50ms"


@dataclass
class Hosts:
    """Hosts with these link speeds in Mbit/s; None: unlimited.

    Leaving the `with` block removes them.
    """

    speeds: Sequence[int | None]
    _made: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._job = f"mh{os.getpid()}-{id(self) % 10_000}"

    def __enter__(self) -> Hosts:
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
            raise Refused("this benchmark creates network namespaces, which needs root and the commands ip and tc")
        with ExitStack() as made:
            switch = self._namespace(made, "switch")
            _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge", "up")
            for number, speed in enumerate(self.speeds):
                self._host(made, switch, number, speed)
            self._made = made.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._made.close()

    def inside(self, number: int) -> list[str]:
        """The prefix of a command that runs on a host."""
        return ["ip", "netns", "exec", f"{self._job}-{number}"]

    def address(self, number: int) -> str:
        """The address of a host."""
        return f"10.213.78.{number + 1}"

    def _namespace(self, made: ExitStack, name: str) -> str:
        whole = f"{self._job}-{name}"
        _run("ip", "netns", "add", whole)
        made.callback(_run, "ip", "netns", "del", whole)
        _run("ip", "-n", whole, "link", "set", "lo", "up")
        return whole

    def _host(self, made: ExitStack, switch: str, number: int, speed: int | None) -> None:
        host, plug = self._namespace(made, str(number)), f"plug{number}"
        _run("ip", "link", "add", CABLE, "netns", host, "type", "veth", "peer", "name", plug, "netns", switch)
        _run("ip", "-n", switch, "link", "set", plug, "master", "bridge", "up")
        _run("ip", "-n", host, "addr", "add", f"{self.address(number)}/24", "dev", CABLE)
        _run("ip", "-n", host, "link", "set", CABLE, "up")
        for namespace, end in ((host, CABLE), (switch, plug)) if speed else ():
            limit = ["rate", f"{speed}mbit", "burst", str(BURST), "latency", QUEUE]
            _run("tc", "-n", namespace, "qdisc", "add", "dev", end, "root", "tbf", *limit)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ManyhandsError(f"{' '.join(words)} failed: {done.stderr.strip()}")

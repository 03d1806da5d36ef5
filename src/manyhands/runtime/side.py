"""The side process: a watcher for ranks that something else has started (torchrun, Slurm).

One rank of each host starts it (`start_side`), hands it what it must know on its standard input, and hears on its
standard output whether it is there. It is in a session of its own, so that the death of that rank does not end it; it
ends when all ranks of its host have ended.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from manyhands.core.errors import ManyhandsError
from manyhands.runtime.hosts import Hub, Uplink, reach_hub
from manyhands.runtime.seat import VARIABLE, Seat, from_environment
from manyhands.runtime.watch import Authority, Watcher


def start_side(seat: Seat, pids: Mapping[int, int], hub: str | None) -> str:
    """Start it for the processes `pids` of this host; the address of the hub, if this is it.

    `hub` is where the hub listens: None if there is only one host, "" if it is to be here.
    """
    facts = {"seat": seat.environment()[VARIABLE], "pids": [*pids.items()], "hub": hub}
    command = [sys.executable, "-m", "manyhands.runtime.side"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as side:
        said, _ = side.communicate(json.dumps(facts))
    state, _, text = said.strip().partition(" ")
    if state != "ready":
        raise ManyhandsError(text or f"the process that is to watch over rank {seat.rank}'s host did not start")
    return text


def main() -> None:
    """Go on in a child, so that the rank which started us need not wait for our end."""
    facts = json.loads(sys.stdin.read())
    if os.fork():
        os._exit(0)
    seat = from_environment({VARIABLE: facts["seat"]})
    assert seat is not None
    pids: dict[int, int] = dict(facts["pids"])
    try:
        authority, address = _authority(seat, pids, facts["hub"])
        watcher = Watcher(seat, pids, authority=authority)
    except (ManyhandsError, OSError) as error:
        print("failed", error)
        return
    with watcher:
        _say_ready(address)
        watcher.start()
        for rank, pid in pids.items():
            watcher.watch(rank, pid)
        watcher.wait()


def _say_ready(address: str) -> None:
    """Whoever reads our output waits for its end."""
    print("ready", address, flush=True)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)


def _authority(seat: Seat, ranks: Iterable[int], hub: str | None) -> tuple[Callable[[Watcher], Authority] | None, str]:
    """Who decides: our own roll, the hub which is here, or the hub at that address; and where ours listens."""
    if hub is None:
        return None, ""
    if hub:
        return partial(Uplink, sock=reach_hub(hub, seat.secret, ranks, seat.deadline)), ""
    listener = socket.create_server((seat.bind, 0), backlog=128)
    return partial(Hub, listener=listener), f"{seat.bind}:{listener.getsockname()[1]}"


if __name__ == "__main__":
    main()

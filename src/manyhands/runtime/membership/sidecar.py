"""The sidecar: a process with the watcher of ranks that another launcher has started (torchrun, Slurm).

One rank of each host starts it (`start_sidecar`), passes the rank spec and the process ids on its standard input, and
reads from its standard output whether it is ready. It has a session of its own, so that the death of that rank does not
end it; it ends when all ranks of its host have left or ended. A script that joins again starts another one.
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
from manyhands.runtime.membership.multi_host import Hub, Uplink, reach_hub
from manyhands.runtime.membership.session import Authority
from manyhands.runtime.membership.watcher import Watcher
from manyhands.runtime.rank_spec import VARIABLE, RankSpec, from_environment


def start_sidecar(spec: RankSpec, pids: Mapping[int, int], hub: str | None) -> str:
    """Start it for the processes `pids` of this host; returns the address of the hub, if this is the hub.

    `hub` is where the hub listens: None if there is only one host, "" if this host is to be the hub.
    """
    facts = {"spec": spec.environment()[VARIABLE], "pids": [*pids.items()], "hub": hub}
    command = [sys.executable, "-m", "manyhands.runtime.membership.sidecar"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as sidecar:
        output, _ = sidecar.communicate(json.dumps(facts))
    state, _, text = output.strip().partition(" ")
    if state != "ready":
        raise ManyhandsError(text or f"the sidecar process of rank {spec.rank}'s host did not start")
    return text


def main() -> None:
    """Run the watcher in a child process, so that the rank that started this one need not wait for its end."""
    facts = json.loads(sys.stdin.read())
    if os.fork():
        os._exit(0)
    spec = from_environment({VARIABLE: facts["spec"]})
    assert spec is not None
    pids: dict[int, int] = dict(facts["pids"])
    try:
        authority, address = _authority(spec, pids, facts["hub"])
        watcher = Watcher(spec, pids, authority=authority, until_left=True, own_loop=True)
    except (ManyhandsError, OSError) as error:
        print("failed", error)
        return
    with watcher:
        _report_ready(address)
        watcher.start()
        for rank, pid in pids.items():
            watcher.watch(rank, pid)
        watcher.wait()


def _report_ready(address: str) -> None:
    """The starting rank reads the output to its end, so the output is closed here."""
    print("ready", address, flush=True)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)


def _authority(
    spec: RankSpec, ranks: Iterable[int], hub: str | None
) -> tuple[Callable[[Watcher], Authority] | None, str]:
    """What makes the watcher's authority (None: its own `Membership`), and the address of the hub if it is here."""
    if hub is None:
        return None, ""
    if hub:
        return partial(Uplink, sock=reach_hub(hub, spec.secret, ranks, spec.deadline)), ""
    listener = socket.create_server((spec.bind, 0), backlog=128)
    return partial(Hub, listener=listener), f"{spec.bind}:{listener.getsockname()[1]}"


if __name__ == "__main__":
    main()

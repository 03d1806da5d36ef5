"""Which engine a call asks for: `on=`, or its short forms."""

from __future__ import annotations

from dataclasses import replace

from manyhands.core.errors import Refused, refuse_unless
from manyhands.engines.engine import Engine
from manyhands.engines.local import Local
from manyhands.engines.virtual import Virtual
from manyhands.virtual.cluster import Cluster

On = Local | Cluster | Engine
"""The types that `on=` accepts; a Cluster runs on the engine `Virtual`."""


def choose_engine(
    on: On | None = None,
    *,
    workers: int | None = None,
    servers: int | None = None,
    cluster: Cluster | None = None,
    link: str | None = None,
    bind: str | None = None,
    spares: int | None = None,
) -> Engine:
    """The engine of a run.

    on=mh.Local(4, link="tcp")     or  workers=4, link="tcp"       real processes of this machine
    on=mh.Cluster(64, servers=2)   or  cluster=mh.Cluster(64), servers=2       a virtual cluster
                                       neither                     the virtual cluster mh.Cluster()
    """
    short = {"workers": workers, "servers": servers, "cluster": cluster, "link": link, "bind": bind, "spares": spares}
    given = {name: value for name, value in short.items() if value is not None}
    if on is not None:
        for name, value in given.items():
            raise Refused(f"{name} is {value}, but must be left out beside on={on}: give it to mh.Local or mh.Cluster")
        return _engine(on)
    if cluster is None and workers is not None:
        return Local(**given)  # type: ignore[arg-type]
    refuse_unless(not spares, "spares", spares, "0 in a virtual cluster: its `newcomers` say when workers join")
    cluster = cluster or Cluster()
    if workers not in (None, cluster.workers):
        raise Refused(f"workers is {workers}, but the cluster has {cluster.workers}")
    if servers is not None and cluster.servers not in (0, servers):
        raise Refused(f"servers is {servers}, but the cluster has {cluster.servers}")
    return Virtual(cluster if servers is None else replace(cluster, servers=servers))


def _engine(on: On) -> Engine:
    if isinstance(on, Cluster):
        return Virtual(on)
    if isinstance(on, type) or not isinstance(on, Engine):  # the class itself has all members of the protocol, too
        raise Refused(f"on is {on!r}, but must be mh.Local(...) or mh.Cluster(...)")
    return on

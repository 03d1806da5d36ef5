"""Shards that follow another one: they accept and refuse what it accepts and refuses."""

from types import SimpleNamespace

import torch

from manyhands.core.flat import Span
from manyhands.core.vector_ops import UNCHARGED
from manyhands.servers.remote_shard import RemoteShard
from manyhands.servers.shard_server import PUSH


class Wire:
    """A transport that answers with weights of given versions and records the version of each push."""

    def __init__(self, versions):
        self.versions, self.pushed = versions, {}

    def recv(self, *tags, frm):
        meta = self.versions[frm], 0, 0
        return SimpleNamespace(meta=meta, tensors=(torch.zeros(2),), release=lambda: None)

    def send(self, to, tag, meta=(), tensors=()):
        if tag == PUSH:
            self.pushed[to] = meta[0]


def test_a_gradient_is_as_old_everywhere_as_where_it_is_decided():
    """Between the two reads there was an update: the first shard refuses the gradient, so the other one must too."""
    wire = Wire({7: 2, 8: 3})
    w = SimpleNamespace(transport=wire, flat=SimpleNamespace(slots=[]), ops=UNCHARGED, options=())
    first = RemoteShard(w, 7, [Span(0, 0, 2)])
    clients = [first, RemoteShard(w, 8, [Span(0, 2, 4)], first)]
    for client in clients:
        client.pull([torch.zeros(2)])
    for client in clients:
        client.push_pull([(torch.ones(2),)], ())
    assert wire.pushed == {7: 2, 8: 2}

"""Shards that follow another one: they take and refuse what it takes and refuses."""

from types import SimpleNamespace

import torch

from manyhands.core.flat import Span
from manyhands.topology.servers.messages import PUSH, MessageLane


class Wire:
    """A transport on which weights of given versions lie; it notes what is pushed."""

    def __init__(self, versions):
        self.versions, self.pushed = versions, {}

    def recv(self, *tags, frm):
        meta = self.versions[frm], 0, 0
        return SimpleNamespace(meta=meta, tensors=(torch.zeros(2),), release=lambda: None)

    def send(self, to, tag, meta=(), tensors=()):
        if tag == PUSH:
            self.pushed[to] = meta[0]


def test_a_gradient_is_as_old_everywhere_as_where_it_is_decided():
    """Between the two reads an update came: the first shard will refuse the gradient, so the other one must too."""
    wire = Wire({7: 2, 8: 3})
    w = SimpleNamespace(transport=wire, flat=SimpleNamespace(places=[]))
    first = MessageLane(w, 7, [Span(0, 0, 2)])
    lanes = [first, MessageLane(w, 8, [Span(0, 2, 4)], first)]
    for lane in lanes:
        lane.pull([torch.zeros(2)])
    for lane in lanes:
        lane.push([(torch.ones(2),)], ())
    assert wire.pushed == {7: 2, 8: 2}

"""An aggregator, message by message: what it sums, when it sends, which children it answers."""

from types import SimpleNamespace

import pytest
import torch

from manyhands.codecs import Raw
from manyhands.core.flat import Span
from manyhands.core.lag import Outcomes
from manyhands.core.vector_ops import UNCHARGED
from manyhands.servers.aggregation import INNER, AggregationTree, AggregatorUplink
from manyhands.servers.shard_server import ASK, DONE, JOIN, PUSH, QUIESCE, READY, WEIGHTS, PushHeader

SERVER, CHILDREN = 9, (2, 3, 4)
GROUP_WEIGHTS = f"{INNER[WEIGHTS].name}:{SERVER}"


def dropped(count):
    """The outcomes of so many gradients, all dropped with a lag of 1."""
    return Outcomes(dropped=count, dropped_lag_sum=count)


class Port:
    """A transport that records what is sent; READY can always be received."""

    def __init__(self):
        self.sent = []

    def send(self, to, tag, meta=(), tensors=()):
        self.sent.append((to, tag.name, tuple(meta), [x.clone() for x in tensors]))

    def recv(self, *tags, frm):
        assert (tags, frm) == ((READY,), SERVER)
        return SimpleNamespace()

    def sent_since(self):
        """What was sent since the last call: receivers and tags."""
        found, self.sent = [(to, name) for to, name, *_ in self.sent], []
        return found


class Brought(SimpleNamespace):
    """A message with two numbers."""

    released = False

    def release(self):
        self.released = True

    def keep(self):
        self.release()
        return self.tensors


class Talk:
    """An uplink, and short ways to send it messages."""

    def __init__(self, waits):
        self.port = Port()
        flat = SimpleNamespace(weights=lambda span: torch.zeros(span.numel, dtype=torch.float64), slots=[])
        w = SimpleNamespace(transport=self.port, flat=flat, ops=UNCHARGED)
        self.uplink = AggregatorUplink(w, SERVER, [Span(0, 0, 2)], CHILDREN, Raw(), Raw(), waits)

    def push(self, child, value=1.0, seen=0, untouched=(), batches=1):
        message = Brought(tensors=(torch.full((2,), value, dtype=torch.float64),))
        self.uplink.push(child, PushHeader(seen, untouched, (1,), batches), message)
        assert message.released
        return self._then()

    def ask(self, child, wanted=0):
        self.uplink.ask(child, wanted)
        return self._then()

    def answer(self, version, refused=0):
        self.uplink.answer(Brought(meta=(version, 0, *dropped(refused)), tensors=(torch.zeros(2),)))
        return self._then()

    def leave(self, child, **how):
        self.uplink.leave(child, **how)
        return self._then()

    def join(self, child):
        self.uplink.join(child)
        return self._then()

    def _then(self):
        self.uplink.advance()
        return self.port.sent_since()


PUSHED, ASKED, GONE, QUIESCED = ((SERVER, tag.name) for tag in (PUSH, ASK, DONE, QUIESCE))


def given(*children):
    return [(child, GROUP_WEIGHTS) for child in children]


# -- groups -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "groups", "picture"),
    [
        (5, 2, "012 34"),
        (4, 2, "01 23"),
        (7, 3, "012 34 56"),
        (3, 3, "0 1 2"),
        (8, 3, "012 345 67"),
    ],
)
def test_neighbours_are_together_and_groups_are_even(workers, groups, picture):
    tree = AggregationTree(groups, Raw())
    assert " ".join("".join(map(str, group)) for group in tree.divide(range(workers))) == picture
    assert tree.aggregators(range(workers)) == [int(group[0]) for group in picture.split()]


# -- when all are waited for ------------------------------------------------------------------------


def test_a_sum_is_pushed_when_all_children_have_pushed():
    talk = Talk(waits=True)
    assert talk.push(3, 10.0, seen=5, untouched=(0, 1)) == []
    assert talk.ask(3) == [], "its own gradient was not pushed yet"
    assert talk.push(4, 100.0, seen=4, untouched=(1,), batches=2) == []
    talk.uplink.push(2, PushHeader(6, (1, 2), (1,), 1), Brought(tensors=(torch.ones(2, dtype=torch.float64),)))
    talk.uplink.advance()
    (to, name, meta, (total,)), ask = talk.port.sent
    assert (to, name) == PUSHED and ask[:2] == ASKED
    assert PushHeader(*meta) == PushHeader(seen=4, untouched=(1,), lengths=(1,), batches=4, terms=3)
    assert total.tolist() == [111.0, 111.0]


def test_children_that_ask_before_the_answer_share_it():
    talk = Talk(waits=True)
    for child in (2, 3):
        assert talk.push(child) == talk.ask(child) == []
    assert talk.push(4) == [PUSHED, ASKED]
    assert talk.ask(4) == []
    assert talk.answer(1) == given(2, 3, 4)
    assert talk.ask(4) == [ASKED], "a later request is sent to the server"


def test_a_child_that_leaves_is_not_waited_for_and_its_gradient_remains():
    talk = Talk(waits=True)
    assert talk.push(4) == talk.push(2) == talk.ask(2) == []
    assert talk.leave(4) == []
    assert talk.leave(3) == [PUSHED, ASKED]
    assert talk.answer(1) == given(2)
    assert talk.push(2) == [PUSHED]
    assert talk.leave(2) == [GONE]
    assert talk.uplink.is_over


def test_all_children_of_a_refused_sum_are_informed_once():
    talk = Talk(waits=True)
    for child in CHILDREN:
        talk.push(child)
        talk.uplink.ask(child, 0)
    talk.uplink.advance()
    talk.uplink.answer(Brought(meta=(7, 1, *dropped(1)), tensors=(torch.zeros(2),)))
    down = [meta for _, name, meta, _ in talk.port.sent if name == GROUP_WEIGHTS]
    assert down == [(7, 1, *dropped(1))] * 3
    talk.port.sent_since()
    talk.ask(3)
    talk.uplink.answer(Brought(meta=(7, 0, *dropped(0)), tensors=(torch.zeros(2),)))
    assert [meta for *_, meta, _ in talk.port.sent] == [(7, 0, *dropped(0))]


# -- when no child is waited for --------------------------------------------------------------------


def test_a_sum_is_pushed_at_once_but_only_one_is_in_flight():
    talk = Talk(waits=False)
    assert talk.push(2) == [PUSHED, ASKED]
    assert talk.ask(2) == []
    assert talk.push(3) == talk.ask(3) == talk.push(4) == talk.push(4) == []
    assert talk.answer(1) == [*given(2), PUSHED, ASKED], "not to 3, whose own gradient it does not contain"
    assert talk.answer(2) == given(3)
    assert talk.push(4) == [PUSHED, ASKED]


def test_an_answer_that_is_too_old_is_asked_for_again():
    talk = Talk(waits=False)
    assert talk.ask(2, 3) == [ASKED]
    assert talk.ask(3, 5) == []
    assert talk.answer(4) == [*given(2), ASKED]
    assert talk.answer(5) == given(3)


def test_a_child_that_is_lost_before_the_answer_is_not_answered():
    talk = Talk(waits=False)
    assert talk.ask(3) == [ASKED]
    for child in CHILDREN:
        assert talk.leave(child) == []
    assert talk.answer(1) == [GONE]


# -- quiesce ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_the_last_child_to_quiesce_and_the_first_to_join_do_it_for_the_group(waits):
    talk = Talk(waits)
    assert talk.leave(2, quiesces=True) == talk.leave(3, quiesces=True) == []
    assert talk.leave(4, quiesces=True) == [QUIESCED]
    assert not talk.uplink.is_over
    assert talk.join(3) == [(SERVER, JOIN.name), (3, INNER[READY].name)]
    assert talk.join(2) == [(2, INNER[READY].name)]
    assert talk.join(4) == [(4, INNER[READY].name)]
    for child in CHILDREN:
        talk.leave(child)
    assert talk.uplink.is_over

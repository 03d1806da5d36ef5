"""A relay, message by message: what it sums, when it speaks, whom it answers."""

from types import SimpleNamespace

import pytest
import torch

from manyhands.codecs import Raw
from manyhands.core.flat import Span
from manyhands.topology.servers.messages import ASK, DONE, JOIN, PUSH, READY, REST, WEIGHTS, Pushed
from manyhands.topology.servers.relay import INNER, Branch, Tree

KEEPER, CHILDREN = 9, (2, 3, 4)
GROUP_WEIGHTS = f"{INNER[WEIGHTS].name}:{KEEPER}"


class Port:
    """It notes what is sent; READY is always there."""

    def __init__(self):
        self.sent = []

    def send(self, to, tag, meta=(), tensors=()):
        self.sent.append((to, tag.name, tuple(meta), [x.clone() for x in tensors]))

    def recv(self, *tags, frm):
        assert (tags, frm) == ((READY,), KEEPER)
        return SimpleNamespace()

    def heard(self):
        """What was sent since the last time: to whom, and which word."""
        found, self.sent = [(to, name) for to, name, *_ in self.sent], []
        return found


class Letter(SimpleNamespace):
    """A message with two numbers."""

    released = False

    def release(self):
        self.released = True

    def keep(self):
        self.release()
        return self.tensors


class Talk:
    """A branch, and short ways to speak to it."""

    def __init__(self, waits):
        self.port = Port()
        flat = SimpleNamespace(weights=lambda span: torch.zeros(span.numel, dtype=torch.float64), places=[])
        w = SimpleNamespace(transport=self.port, flat=flat, move=lambda nbytes: None)
        self.branch = Branch(w, KEEPER, [Span(0, 0, 2)], CHILDREN, Raw(), Raw(), waits)

    def push(self, child, value=1.0, seen=0, untouched=(), batches=1):
        letter = Letter(tensors=(torch.full((2,), value, dtype=torch.float64),))
        self.branch.push(child, Pushed(seen, untouched, (1,), batches), letter)
        assert letter.released
        return self._then()

    def ask(self, child, wanted=0):
        self.branch.ask(child, wanted)
        return self._then()

    def answer(self, version, refused=0):
        self.branch.answer(Letter(meta=(version, 0, refused), tensors=(torch.zeros(2),)))
        return self._then()

    def leave(self, child, **how):
        self.branch.leave(child, **how)
        return self._then()

    def join(self, child):
        self.branch.join(child)
        return self._then()

    def _then(self):
        self.branch.advance()
        return self.port.heard()


PUSHED, ASKED, GONE, RESTS = ((KEEPER, tag.name) for tag in (PUSH, ASK, DONE, REST))


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
    tree = Tree(groups, Raw())
    assert " ".join("".join(map(str, group)) for group in tree.divide(range(workers))) == picture
    assert tree.relays(range(workers)) == [int(group[0]) for group in picture.split()]


# -- when all are waited for ------------------------------------------------------------------------


def test_a_sum_goes_up_when_all_have_brought_theirs():
    talk = Talk(waits=True)
    assert talk.push(3, 10.0, seen=5, untouched=(0, 1)) == []
    assert talk.ask(3) == [], "its own gradient is still here"
    assert talk.push(4, 100.0, seen=4, untouched=(1,), batches=2) == []
    talk.branch.push(2, Pushed(6, (1, 2), (1,), 1), Letter(tensors=(torch.ones(2, dtype=torch.float64),)))
    talk.branch.advance()
    (to, name, meta, (total,)), ask = talk.port.sent
    assert (to, name) == PUSHED and ask[:2] == ASKED
    assert Pushed(*meta) == Pushed(seen=4, untouched=(1,), lengths=(1,), batches=4, terms=3)
    assert total.tolist() == [111.0, 111.0]


def test_children_who_ask_meanwhile_share_the_answer():
    talk = Talk(waits=True)
    for child in (2, 3):
        assert talk.push(child) == talk.ask(child) == []
    assert talk.push(4) == [PUSHED, ASKED]
    assert talk.ask(4) == []
    assert talk.answer(1) == given(2, 3, 4)
    assert talk.ask(4) == [ASKED], "who comes later asks anew"


def test_who_leaves_is_no_longer_waited_for_and_what_it_brought_stays():
    talk = Talk(waits=True)
    assert talk.push(4) == talk.push(2) == talk.ask(2) == []
    assert talk.leave(4) == []
    assert talk.leave(3) == [PUSHED, ASKED]
    assert talk.answer(1) == given(2)
    assert talk.push(2) == [PUSHED]
    assert talk.leave(2) == [GONE]
    assert talk.branch.is_over


def test_all_of_a_sum_hear_once_that_it_was_not_accepted():
    talk = Talk(waits=True)
    for child in CHILDREN:
        talk.push(child)
        talk.branch.ask(child, 0)
    talk.branch.advance()
    talk.branch.answer(Letter(meta=(7, 1, 1), tensors=(torch.zeros(2),)))
    down = [meta for _, name, meta, _ in talk.port.sent if name == GROUP_WEIGHTS]
    assert down == [(7, 1, 1)] * 3
    talk.port.heard()
    talk.ask(3)
    talk.branch.answer(Letter(meta=(7, 0, 0), tensors=(torch.zeros(2),)))
    assert [meta for *_, meta, _ in talk.port.sent] == [(7, 0, 0)]


# -- when nobody is -----------------------------------------------------------------------------------


def test_at_once_but_only_one_sum_is_in_the_air():
    talk = Talk(waits=False)
    assert talk.push(2) == [PUSHED, ASKED]
    assert talk.ask(2) == []
    assert talk.push(3) == talk.ask(3) == talk.push(4) == talk.push(4) == []
    assert talk.answer(1) == [*given(2), PUSHED, ASKED], "not to 3, whose own gradient is not in it"
    assert talk.answer(2) == given(3)
    assert talk.push(4) == [PUSHED, ASKED]


def test_an_answer_that_is_too_old_is_asked_for_again():
    talk = Talk(waits=False)
    assert talk.ask(2, 3) == [ASKED]
    assert talk.ask(3, 5) == []
    assert talk.answer(4) == [*given(2), ASKED]
    assert talk.answer(5) == given(3)


def test_who_is_lost_while_its_answer_is_under_way_is_not_answered():
    talk = Talk(waits=False)
    assert talk.ask(3) == [ASKED]
    for child in CHILDREN:
        assert talk.leave(child) == []
    assert talk.answer(1) == [GONE]


# -- rest -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_the_last_to_rest_and_the_first_to_come_back_speak_for_all(waits):
    talk = Talk(waits)
    assert talk.leave(2, rests=True) == talk.leave(3, rests=True) == []
    assert talk.leave(4, rests=True) == [RESTS]
    assert not talk.branch.is_over
    assert talk.join(3) == [(KEEPER, JOIN.name), (3, INNER[READY].name)]
    assert talk.join(2) == [(2, INNER[READY].name)]
    assert talk.join(4) == [(4, INNER[READY].name)]
    for child in CHILDREN:
        talk.leave(child)
    assert talk.branch.is_over

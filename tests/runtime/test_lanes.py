"""Credit: who waits for it, how it comes back, and that no receiver ever holds back what its sender waits for."""

import threading
from itertools import pairwise

import pytest
import torch

from manyhands.core.errors import ManyhandsError
from manyhands.core.protocols import Tag
from manyhands.runtime.lanes import SPARE, Debts, Lanes, Loan

A, B = Tag("a", credit=2), Tag("b", credit=1)
PATIENCE = 20
SOON = 0.05
"""Seconds in which a call that need not wait would have returned."""


def nothing():
    pass


@pytest.fixture
def lanes():
    return Lanes(0, nothing)


class Waiting:
    """An `open` in another thread."""

    def __init__(self, lanes, to, tag, latest=False):
        self._answer = None
        self._thread = threading.Thread(target=self._run, args=(lanes, to, tag, latest))
        self._thread.start()

    def _run(self, lanes, to, tag, latest):
        try:
            self._answer = lanes.open(to, tag, latest=latest)
        except ManyhandsError as error:
            self._answer = error

    def is_waiting(self):
        self._thread.join(SOON)
        return self._thread.is_alive()

    def answer(self):
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self._answer


def open_all(lanes, to, tag, number, latest=False):
    return [lanes.open(to, tag, latest=latest) for _ in range(number)]


# The sending side


def test_serial_numbers_grow_over_all_lanes(lanes):
    serials = [lanes.open(1, A, latest=False), lanes.open(2, A, latest=False), lanes.open(1, B, latest=False)]
    assert all(one < other for one, other in pairwise(serials))


def test_a_lane_that_is_full_waits_until_one_of_its_own_comes_back(lanes):
    first, _ = open_all(lanes, 1, A, 2)
    other = lanes.open(1, B, latest=False)
    elsewhere = lanes.open(2, A, latest=False)
    waiting = Waiting(lanes, 1, A.of(7))
    assert waiting.is_waiting()
    lanes.come_back(1, (("b", other),))
    lanes.come_back(2, (("a", elsewhere),))
    lanes.come_back(1, (("a", 10**6), ("never", 1)))
    assert waiting.is_waiting()
    lanes.come_back(1, (("a", first),))
    assert waiting.answer() > elsewhere


def test_one_that_comes_back_lets_one_more_go_not_two(lanes):
    first, second = open_all(lanes, 1, A, 2)
    waiting = [Waiting(lanes, 1, A), Waiting(lanes, 1, A)]
    lanes.come_back(1, (("a", first), ("a", first)))
    while all(one.is_waiting() for one in waiting):
        pass
    assert [one.is_waiting() for one in waiting].count(True) == 1
    lanes.come_back(1, (("a", second),))
    assert None not in [one.answer() for one in waiting]


def test_messages_that_replace_unread_ones_have_a_few_more_out(lanes):
    serials = open_all(lanes, 1, A, A.credit + SPARE, latest=True)
    waiting = Waiting(lanes, 1, A, latest=True)
    assert waiting.is_waiting()
    lanes.come_back(1, (("a", serials[0]),))
    assert waiting.answer()


def test_an_ordinary_message_waits_also_for_those_that_replace(lanes):
    serials = open_all(lanes, 1, A, A.credit + SPARE, latest=True)
    waiting = Waiting(lanes, 1, A)
    lanes.come_back(1, tuple(("a", serial) for serial in serials[:SPARE]))
    assert waiting.is_waiting()
    lanes.come_back(1, (("a", serials[SPARE]),))
    assert waiting.answer()


def test_closing_frees_whoever_waits_and_nothing_goes_there_any_more(lanes):
    open_all(lanes, 1, A, 2)
    open_all(lanes, 2, A, 2)
    gone, here = Waiting(lanes, 1, A), Waiting(lanes, 2, A)
    assert gone.is_waiting() and here.is_waiting()
    lanes.close(1)
    assert gone.answer() is None
    assert open_all(lanes, 1, A, 5) == [None] * 5
    assert lanes.open(1, B, latest=True) is None
    assert here.is_waiting()
    lanes.close(2)
    assert here.answer() is None


def test_the_end_of_the_run_reaches_whoever_waits_and_whoever_comes():
    over = []

    def check():
        if over:
            raise ManyhandsError("it is over")

    lanes = Lanes(0, check)
    open_all(lanes, 1, A, 2)
    waiting = Waiting(lanes, 1, A)
    assert waiting.is_waiting()
    over.append(True)
    lanes.wake()
    assert str(waiting.answer()) == "it is over"
    with pytest.raises(ManyhandsError, match="it is over"):
        lanes.open(2, B, latest=False)


def test_a_loan_is_found_once_however_often_it_is_named(lanes):
    """Its memory would otherwise be given to two messages at once."""
    serial = lanes.open(1, A, latest=False)
    loan = Loan(A, torch.zeros(3))
    lanes.lend(1, serial, loan)
    acks = (("a", serial), ("a", serial))
    assert [found is loan for found in lanes.lent(1, acks)] == [True]
    lanes.come_back(1, acks)
    assert lanes.lent(1, acks) == []


@pytest.mark.parametrize(("to", "name", "off"), [(2, "a", 0), (1, "b", 0), (1, "a", 1), (1, "x", 0), (0, "a", 0)])
def test_a_loan_is_not_found_by_another_rank_name_or_number(lanes, to, name, off):
    serial = lanes.open(1, A, latest=False)
    lanes.lend(1, serial, Loan(A))
    assert lanes.lent(to, ((name, serial + off),)) == []
    lanes.come_back(to, ((name, serial + off),))
    assert lanes.lent(1, (("a", serial),)) == [Loan(A)]


def test_a_loan_to_one_who_has_gone_meanwhile_is_forgotten(lanes):
    serial = lanes.open(1, A, latest=False)
    lanes.close(1)
    lanes.lend(1, serial, Loan(A))
    assert lanes.lent(1, (("a", serial),)) == []
    lanes.wait_until_back(PATIENCE)


def test_waiting_until_all_is_back(lanes):
    first, second = lanes.open(1, A, latest=False), lanes.open(2, B, latest=False)
    lanes.wait_until_back(0.001)
    waiting = threading.Thread(target=lanes.wait_until_back, args=(PATIENCE * 10,))
    waiting.start()
    lanes.come_back(1, (("a", first),))
    waiting.join(SOON)
    assert waiting.is_alive()
    lanes.come_back(2, (("b", second),))
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


# The receiving side


def test_below_the_credit_releases_wait_for_a_message_to_ride_on():
    debts = Debts(at_once=False)
    assert debts.arrived(1, "a", 2) == ()
    assert debts.released(1, "a", 5, 2) == ()
    assert debts.take(2) == ()
    assert debts.take(1) == (("a", 5),)
    assert debts.take(1) == ()


def test_at_the_credit_a_release_goes_back_alone_with_all_that_waited():
    debts = Debts(at_once=False)
    for name in "aab":
        assert debts.arrived(1, name, 2) == ()
    assert debts.released(1, "b", 3, 2) == ()
    assert debts.released(1, "a", 1, 2) == (("b", 3), ("a", 1))
    assert debts.released(1, "a", 2, 2) == ()


def test_an_arrival_that_uses_the_credit_up_sends_back_what_waited():
    debts = Debts(at_once=False)
    debts.arrived(1, "a", 2)
    debts.released(1, "a", 1, 2)
    assert debts.arrived(1, "a", 2) == (("a", 1),)


def test_ranks_have_debts_of_their_own():
    debts = Debts(at_once=False)
    for frm in (1, 2):
        debts.arrived(frm, "a", 2)
        debts.released(frm, "a", 10 + frm, 2)
    assert debts.arrived(1, "a", 2) == (("a", 11),)
    assert debts.take(2) == (("a", 12),)


def test_if_lending_is_watched_everything_goes_back_at_once():
    debts = Debts(at_once=True)
    debts.arrived(1, "a", 8)
    assert debts.released(1, "a", 1, 8) == (("a", 1),)


# All interleavings


class Model:
    """One sender and one receiver, and everything that is between them. Its moves are all that can happen next.

    out        the sender's: sent and not back                       (by lane)
    coming     messages on their way, in order
    held       the receiver's program has them
    debts      released and not said: what is looked at here
    going      releases on their way back
    """

    def __init__(self, credits, left, debts):
        self.credits, self.left, self.debts = credits, left, debts
        self.out = {name: 0 for name in credits}
        self.coming, self.held, self.going = (), (), ()

    def key(self):
        unsaid = tuple(name for name, _ in self.debts._unsaid.get(0, ()))
        out = tuple(sorted(self.debts._out.items()))
        held = tuple(sorted(self.held))
        return self.left, tuple(self.out.values()), self.coming, held, unsaid, out, self.going

    def copy(self):
        debts = type(self.debts)(at_once=self.debts._at_once)
        debts._unsaid = {rank: list(unsaid) for rank, unsaid in self.debts._unsaid.items()}
        debts._out = dict(self.debts._out)
        other = Model(self.credits, self.left, debts)
        other.out, other.coming, other.held, other.going = dict(self.out), self.coming, self.held, self.going
        return other

    def moves(self):
        if self.left:
            yield from [("send", name) for name in self.credits if not self.is_full(name)]
        if self.coming:
            yield "arrive", self.coming[0]
        yield from [("release", name) for name in sorted(set(self.held))]
        yield "ride", None
        if self.going:
            yield "return", None

    def is_full(self, name):
        return self.out[name] >= self.credits[name]

    def do(self, move, name):
        if move == "send":
            self.left -= 1
            self.out[name] += 1
            self.coming += (name,)
        elif move == "arrive":
            self.coming, self.held = self.coming[1:], (*self.held, name)
            self._give_back(self.debts.arrived(0, name, self.credits[name]))
        elif move == "release":
            held = list(self.held)
            held.remove(name)
            self.held = tuple(held)
            self._give_back(self.debts.released(0, name, 1, self.credits[name]))
        elif move == "ride":
            self._give_back(self.debts.take(0))
        else:
            for back in self.going[0]:
                self.out[back] -= 1
            self.going = self.going[1:]

    def _give_back(self, acks):
        if acks:
            self.going += (tuple(name for name, _ in acks),)

    def unsaid(self, name):
        return sum(one == name for one, _ in self.debts._unsaid.get(0, ()))

    def everything(self, name):
        on_the_way = self.coming.count(name) + sum(back.count(name) for back in self.going)
        return on_the_way + self.held.count(name) + self.unsaid(name)

    def holds_up(self):
        """The lane whose sender waits while nothing is on its way and the receiver keeps a release to itself."""
        if self.coming or self.going:
            return None
        return next((name for name in self.credits if self.is_full(name) and self.unsaid(name)), None)


def every_state(credits, messages, debts):
    """All states that can be reached, each once."""
    first = Model(credits, messages, debts)
    seen, open_ends = {first.key()}, [first]
    while open_ends:
        model = open_ends.pop()
        yield model
        for move in model.moves():
            after = model.copy()
            after.do(*move)
            if after.key() not in seen:
                seen.add(after.key())
                open_ends.append(after)


CASES = [
    ({"a": 1}, 5),
    ({"a": 2}, 6),
    ({"a": 3}, 7),
    ({"a": 1, "b": 1}, 5),
    ({"a": 2, "b": 1}, 5),
    ({"a": 2, "b": 3}, 6),
]


@pytest.mark.parametrize(("credits", "messages"), CASES, ids=str)
@pytest.mark.parametrize("at_once", [False, True])
def test_no_sender_waits_for_what_its_receiver_holds_back(credits, messages, at_once):
    ends = 0
    for model in every_state(credits, messages, Debts(at_once=at_once)):
        assert model.holds_up() is None, model.key()
        for name, credit in credits.items():
            assert model.out[name] == model.everything(name) <= credit
            assert not (at_once and model.unsaid(name))
        ends += not (model.left or model.coming or model.held or model.going)
    assert ends


@pytest.mark.parametrize(("credits", "messages"), CASES, ids=str)
def test_what_a_receiver_counts_as_out_is_what_it_has_and_has_not_said(credits, messages):
    for model in every_state(credits, messages, Debts(at_once=False)):
        for name in credits:
            counted = model.debts._out.get((0, name), 0)
            assert counted == model.held.count(name) + model.unsaid(name)


class Forgetful(Debts):
    """Looks at the credit only when something is released."""

    def arrived(self, frm, name, credit):
        self._out[frm, name] = self._out.get((frm, name), 0) + 1
        return ()


class Late(Debts):
    """Gives back one message too late."""

    def _due(self, frm, name, credit):
        return super()._due(frm, name, credit + 1)


@pytest.mark.parametrize("faulty", [Forgetful, Late])
def test_the_model_finds_faults(faulty):
    assert any(model.holds_up() for model in every_state({"a": 2}, 4, faulty(at_once=False)))

"""Flow control: senders wait for credit, releases free it, and no receiver withholds an acknowledgement that its sender
waits for."""

import threading
from itertools import pairwise

import pytest
import torch

from manyhands.core.errors import ManyhandsError
from manyhands.core.port import Tag
from manyhands.runtime.transport.flow_control import SPARE, Channels, InFlight, PendingAcks

A, B = Tag("a", credit=2), Tag("b", credit=1)
PATIENCE = 20
SOON = 0.05
"""Seconds in which a call that need not wait would have returned."""


def nothing():
    pass


@pytest.fixture
def channels():
    return Channels(0, nothing)


class Waiting:
    """An `open` in another thread."""

    def __init__(self, channels, to, tag, latest=False):
        self._answer = None
        self._thread = threading.Thread(target=self._run, args=(channels, to, tag, latest))
        self._thread.start()

    def _run(self, channels, to, tag, latest):
        try:
            self._answer = channels.open(to, tag, latest=latest)
        except ManyhandsError as error:
            self._answer = error

    def is_waiting(self):
        self._thread.join(SOON)
        return self._thread.is_alive()

    def answer(self):
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self._answer


def open_all(channels, to, tag, number, latest=False):
    return [channels.open(to, tag, latest=latest) for _ in range(number)]


# The sending side


def test_serial_numbers_grow_over_all_channels(channels):
    serials = [channels.open(1, A, latest=False), channels.open(2, A, latest=False), channels.open(1, B, latest=False)]
    assert all(one < other for one, other in pairwise(serials))


def test_a_channel_that_is_full_waits_until_one_of_its_own_comes_back(channels):
    first, _ = open_all(channels, 1, A, 2)
    other = channels.open(1, B, latest=False)
    elsewhere = channels.open(2, A, latest=False)
    waiting = Waiting(channels, 1, A.of(7))
    assert waiting.is_waiting()
    channels.acknowledge(1, (("b", other),))
    channels.acknowledge(2, (("a", elsewhere),))
    channels.acknowledge(1, (("a", 10**6), ("never", 1)))
    assert waiting.is_waiting()
    channels.acknowledge(1, (("a", first),))
    assert waiting.answer() > elsewhere


def test_one_that_comes_back_lets_one_more_go_not_two(channels):
    first, second = open_all(channels, 1, A, 2)
    waiting = [Waiting(channels, 1, A), Waiting(channels, 1, A)]
    channels.acknowledge(1, (("a", first), ("a", first)))
    while all(one.is_waiting() for one in waiting):
        pass
    assert [one.is_waiting() for one in waiting].count(True) == 1
    channels.acknowledge(1, (("a", second),))
    assert None not in [one.answer() for one in waiting]


def test_messages_that_replace_unread_ones_have_a_few_more_out(channels):
    serials = open_all(channels, 1, A, A.credit + SPARE, latest=True)
    waiting = Waiting(channels, 1, A, latest=True)
    assert waiting.is_waiting()
    channels.acknowledge(1, (("a", serials[0]),))
    assert waiting.answer()


def test_an_ordinary_message_waits_also_for_those_that_replace(channels):
    serials = open_all(channels, 1, A, A.credit + SPARE, latest=True)
    waiting = Waiting(channels, 1, A)
    channels.acknowledge(1, tuple(("a", serial) for serial in serials[:SPARE]))
    assert waiting.is_waiting()
    channels.acknowledge(1, (("a", serials[SPARE]),))
    assert waiting.answer()


def test_closing_wakes_waiting_senders_and_drops_what_is_sent_later(channels):
    open_all(channels, 1, A, 2)
    open_all(channels, 2, A, 2)
    gone, here = Waiting(channels, 1, A), Waiting(channels, 2, A)
    assert gone.is_waiting() and here.is_waiting()
    channels.close(1)
    assert gone.answer() is None
    assert open_all(channels, 1, A, 5) == [None] * 5
    assert channels.open(1, B, latest=True) is None
    assert here.is_waiting()
    channels.close(2)
    assert here.answer() is None


def test_the_end_of_the_run_is_raised_in_waiting_and_later_senders():
    over = []

    def check():
        if over:
            raise ManyhandsError("it is over")

    channels = Channels(0, check)
    open_all(channels, 1, A, 2)
    waiting = Waiting(channels, 1, A)
    assert waiting.is_waiting()
    over.append(True)
    channels.wake()
    assert str(waiting.answer()) == "it is over"
    with pytest.raises(ManyhandsError, match="it is over"):
        channels.open(2, B, latest=False)


def test_a_message_is_found_once_however_often_it_is_named(channels):
    """Its memory would otherwise be given to two messages at once."""
    serial = channels.open(1, A, latest=False)
    message = InFlight(A, torch.zeros(3))
    channels.sent(1, serial, message)
    acks = (("a", serial), ("a", serial))
    assert [found is message for found in channels.in_flight(1, acks)] == [True]
    channels.acknowledge(1, acks)
    assert channels.in_flight(1, acks) == []


@pytest.mark.parametrize(("to", "name", "off"), [(2, "a", 0), (1, "b", 0), (1, "a", 1), (1, "x", 0), (0, "a", 0)])
def test_a_message_is_not_found_by_another_rank_name_or_number(channels, to, name, off):
    serial = channels.open(1, A, latest=False)
    channels.sent(1, serial, InFlight(A))
    assert channels.in_flight(to, ((name, serial + off),)) == []
    channels.acknowledge(to, ((name, serial + off),))
    assert channels.in_flight(1, (("a", serial),)) == [InFlight(A)]


def test_a_message_to_a_rank_that_has_left_since_is_forgotten(channels):
    serial = channels.open(1, A, latest=False)
    channels.close(1)
    channels.sent(1, serial, InFlight(A))
    assert channels.in_flight(1, (("a", serial),)) == []
    channels.wait_until_acknowledged(PATIENCE)


def test_waiting_until_all_is_back(channels):
    first, second = channels.open(1, A, latest=False), channels.open(2, B, latest=False)
    channels.wait_until_acknowledged(0.001)
    waiting = threading.Thread(target=channels.wait_until_acknowledged, args=(PATIENCE * 10,))
    waiting.start()
    channels.acknowledge(1, (("a", first),))
    waiting.join(SOON)
    assert waiting.is_alive()
    channels.acknowledge(2, (("b", second),))
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


# The receiving side


def test_below_the_credit_acknowledgements_are_piggybacked_on_the_next_message():
    acks = PendingAcks(at_once=False)
    assert acks.received(1, "a", 2) == ()
    assert acks.released(1, "a", 5, 2) == ()
    assert acks.take(2) == ()
    assert acks.take(1) == (("a", 5),)
    assert acks.take(1) == ()


def test_at_the_credit_a_release_goes_back_alone_with_all_that_waited():
    acks = PendingAcks(at_once=False)
    for name in "aab":
        assert acks.received(1, name, 2) == ()
    assert acks.released(1, "b", 3, 2) == ()
    assert acks.released(1, "a", 1, 2) == (("b", 3), ("a", 1))
    assert acks.released(1, "a", 2, 2) == ()


def test_an_arrival_that_uses_the_credit_up_sends_back_what_waited():
    acks = PendingAcks(at_once=False)
    acks.received(1, "a", 2)
    acks.released(1, "a", 1, 2)
    assert acks.received(1, "a", 2) == (("a", 1),)


def test_each_rank_has_pending_acks_of_its_own():
    acks = PendingAcks(at_once=False)
    for frm in (1, 2):
        acks.received(frm, "a", 2)
        acks.released(frm, "a", 10 + frm, 2)
    assert acks.received(1, "a", 2) == (("a", 11),)
    assert acks.take(2) == (("a", 12),)


def test_if_writes_are_checked_every_release_is_acknowledged_at_once():
    acks = PendingAcks(at_once=True)
    acks.received(1, "a", 8)
    assert acks.released(1, "a", 1, 8) == (("a", 1),)


# All interleavings


class Model:
    """One sender and one receiver, and everything that is between them. Its moves are all that can happen next.

    out        sent and not acknowledged, as the sender counts          (by channel)
    coming     messages in transit, in order
    held       messages that the receiver's program has not released
    acks       released and not acknowledged: the part under test
    going      acknowledgements in transit
    """

    def __init__(self, credits, left, acks):
        self.credits, self.left, self.acks = credits, left, acks
        self.out = {name: 0 for name in credits}
        self.coming, self.held, self.going = (), (), ()

    def key(self):
        unacknowledged = tuple(name for name, _ in self.acks._pending.get(0, ()))
        out = tuple(sorted(self.acks._in_flight.items()))
        held = tuple(sorted(self.held))
        return self.left, tuple(self.out.values()), self.coming, held, unacknowledged, out, self.going

    def copy(self):
        acks = type(self.acks)(at_once=self.acks._at_once)
        acks._pending = {rank: list(unacknowledged) for rank, unacknowledged in self.acks._pending.items()}
        acks._in_flight = dict(self.acks._in_flight)
        other = Model(self.credits, self.left, acks)
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
            self._send_back(self.acks.received(0, name, self.credits[name]))
        elif move == "release":
            held = list(self.held)
            held.remove(name)
            self.held = tuple(held)
            self._send_back(self.acks.released(0, name, 1, self.credits[name]))
        elif move == "ride":
            self._send_back(self.acks.take(0))
        else:
            for back in self.going[0]:
                self.out[back] -= 1
            self.going = self.going[1:]

    def _send_back(self, acks):
        if acks:
            self.going += (tuple(name for name, _ in acks),)

    def unacknowledged(self, name):
        return sum(one == name for one, _ in self.acks._pending.get(0, ()))

    def everything(self, name):
        in_transit = self.coming.count(name) + sum(back.count(name) for back in self.going)
        return in_transit + self.held.count(name) + self.unacknowledged(name)

    def holds_up(self):
        """The channel whose sender waits while nothing is in transit and the receiver withholds an acknowledgement."""
        if self.coming or self.going:
            return None
        return next((name for name in self.credits if self.is_full(name) and self.unacknowledged(name)), None)


def every_state(credits, messages, acks):
    """All states that can be reached, each once."""
    first = Model(credits, messages, acks)
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
    for model in every_state(credits, messages, PendingAcks(at_once=at_once)):
        assert model.holds_up() is None, model.key()
        for name, credit in credits.items():
            assert model.out[name] == model.everything(name) <= credit
            assert not (at_once and model.unacknowledged(name))
        ends += not (model.left or model.coming or model.held or model.going)
    assert ends


@pytest.mark.parametrize(("credits", "messages"), CASES, ids=str)
def test_what_a_receiver_counts_as_out_is_what_it_has_and_has_not_said(credits, messages):
    for model in every_state(credits, messages, PendingAcks(at_once=False)):
        for name in credits:
            counted = model.acks._in_flight.get((0, name), 0)
            assert counted == model.held.count(name) + model.unacknowledged(name)


class Forgetful(PendingAcks):
    """Checks the credit only when a message is released."""

    def received(self, frm, name, credit):
        self._in_flight[frm, name] = self._in_flight.get((frm, name), 0) + 1
        return ()


class Late(PendingAcks):
    """Acknowledges one message too late."""

    def _due(self, frm, name, credit):
        return super()._due(frm, name, credit + 1)


@pytest.mark.parametrize("faulty", [Forgetful, Late])
def test_the_model_finds_faults(faulty):
    assert any(model.holds_up() for model in every_state({"a": 2}, 4, faulty(at_once=False)))

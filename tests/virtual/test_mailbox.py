"""The virtual mailbox: the first message that matches, from any rank or from one, among however many others."""

from manyhands.core.port import ANY, Tag
from manyhands.virtual.kernel import Kernel
from manyhands.virtual.mailbox import VirtualMailbox
from manyhands.virtual.messages import VirtualChannel, VirtualMessage

A, B = Tag("test-a"), Tag("test-b")


def filled(*letters):
    box = VirtualMailbox()
    messages = [VirtualMessage(Kernel(), VirtualChannel(), frm, tag, (), (), 1) for frm, tag in letters]
    for message in messages:
        box.add(message)
    return box, messages


def test_the_first_that_fits_is_taken():
    box, (b2, a1, a2, b1) = filled((2, B), (1, A), (2, A), (1, B))
    assert box.take((A,), ANY) is a1
    assert box.take((A, B), 1) is b1
    assert box.take((A,), 1) is None
    assert box.take((A, B), ANY) is b2
    assert box.take((B,), 2) is None
    assert (len(box), a2 in box, b2 in box) == (1, True, False)


def test_what_is_removed_and_comes_again_is_the_last():
    box, (first, second) = filled((1, A), (1, A))
    box.remove(first)
    box.add(first)
    assert [box.take((A,), 1), box.take((A,), ANY), box.take((A,), ANY)] == [second, first, None]

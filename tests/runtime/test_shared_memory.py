"""Memory and locks of a host: one mapping per name, locks that no dead process keeps, buffers that are used again."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from manyhands.core.errors import ManyhandsError
from manyhands.runtime.membership.memfd import Memories
from manyhands.runtime.transport.shared_memory import Buffers, HostLock, Memory

PATIENCE = 20
SOON = 0.05


@pytest.fixture
def host():
    """Hands out regions, and counts the requests."""
    memories, asked = Memories(), []

    def ask(name, nbytes):
        asked.append((name, nbytes))
        file, error = memories.ask(0, name, nbytes)
        if file is None:
            raise ManyhandsError(error)
        return os.dup(file)

    ask.asked = asked
    yield ask
    memories.close()


# Regions


def test_a_region_is_mapped_once_and_its_file_closed(host):
    memory = Memory(host, 0)
    before = len(os.listdir("/proc/self/fd"))
    first = memory.region("shared/x", 100)
    first.fill_(7)
    assert memory.region("shared/x", 100) is first
    assert host.asked == [("shared/x", 100)]
    del memory, first
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the region's own, and that of its mapping


def test_two_ranks_see_one_region(host):
    one, other = Memory(host, 0), Memory(host, 1)
    one.shared("weights", 5, torch.float64).copy_(torch.arange(5.0))
    assert other.shared("weights", 5, torch.float64).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_slots_are_zeroed_and_of_ones_own(host):
    one, other = Memory(host, 0), Memory(host, 1)
    slots = [one.slot(3, torch.float32), one.slot(3, torch.float32), other.slot(3, torch.float32)]
    for number, slot in enumerate(slots):
        assert slot.tolist() == [0.0] * 3
        slot.fill_(number + 1)
    assert [slot.tolist() for slot in slots] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    assert len({name for name, _ in host.asked}) == 3


def test_empty_memory_is_fine(host):
    memory = Memory(host, 0)
    assert memory.slot(0, torch.float32).tolist() == []
    assert memory.shared("none", 0, torch.int64).tolist() == []


@pytest.mark.parametrize("claimed", [1, 63, 4096, 2**60])
def test_a_region_of_another_size_than_claimed_is_refused(host, claimed):
    """A peer says where its tensors lie: a place beyond the region must not be looked at."""
    memory = Memory(host, 0)
    memory.slot(16, torch.float32)
    with pytest.raises(ManyhandsError, match=f"has 64 bytes, but {claimed}"):
        memory.region("own/0/1", claimed)


def test_a_region_that_another_rank_has_mapped_keeps_its_size_too(host):
    Memory(host, 0).shared("x", 100, torch.float32)
    with pytest.raises(ManyhandsError, match="400 bytes, but 800 were requested"):
        Memory(host, 1).shared("x", 200, torch.float32)


def test_a_tensor_is_found_where_it_lies(host):
    memory = Memory(host, 3)
    slot, shared = memory.slot(100, torch.float64), memory.shared("x", 10, torch.int32)
    assert memory.find(slot) == ("own/3/1", 800, 0)
    assert memory.find(slot[7:9]) == ("own/3/1", 800, 56)
    assert memory.find(slot[99:]) == ("own/3/1", 800, 792)
    assert memory.find(shared[2:]) == ("shared/x", 64, 8)


def test_a_tensor_elsewhere_is_not_found(host):
    memory = Memory(host, 0)
    slot = memory.slot(100, torch.float64)
    assert memory.find(slot.clone()) is None
    assert memory.find(torch.zeros(0)) is None
    assert Memory(host, 1).find(slot) is None


def test_threads_that_want_one_region_get_the_same(host):
    memory, got = Memory(host, 0), []
    start = threading.Barrier(8)

    def take():
        start.wait()
        got.append(memory.region("r", 4096).data_ptr())

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(got)) == 1 and host.asked == [("r", 4096)]


# Locks


HOLDS = """
import sys
from manyhands.runtime.transport.shared_memory import HostLock

lock = HostLock(int(sys.argv[1]), sys.argv[2], lambda seconds: print("waited", flush=True))
with lock:
    print("inside", flush=True)
    sys.stdin.read(1)
print("outside", flush=True)
sys.stdin.read()
"""


class Holder:
    """A process that acquires a lock, and releases it on request."""

    def __init__(self, file, name="lock"):
        command = [sys.executable, "-c", HOLDS, str(file), name]
        self._process = subprocess.Popen(
            command, pass_fds=[file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def says(self):
        return self._process.stdout.readline().strip()

    def go_out(self):
        self._process.stdin.write("x")
        self._process.stdin.flush()

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture
def file():
    made = os.memfd_create("locks")
    yield made
    os.close(made)


@pytest.fixture
def holder(file):
    made = []

    def make(name="lock"):
        made.append(Holder(file, name))
        return made[-1]

    yield make
    for one in made:
        one.close()


def entering(lock):
    """A thread that goes in and out again."""

    def enter():
        with lock:
            pass

    thread = threading.Thread(target=enter)
    thread.start()
    return thread


def is_waiting(thread):
    thread.join(SOON)
    return thread.is_alive()


def ends(thread):
    thread.join(PATIENCE)
    return not thread.is_alive()


def test_a_lock_held_by_another_process_is_waited_for_and_counted_as_waiting(file, holder):
    other, waited = holder(), []
    assert other.says() == "inside"
    waiting = entering(HostLock(file, "lock", waited.append))
    assert is_waiting(waiting) and waited == []
    other.go_out()
    assert ends(waiting)
    assert len(waited) == 1 and waited[0] >= SOON * 0.9


def test_a_lock_held_by_a_killed_process_is_free(file, holder):
    other = holder()
    assert other.says() == "inside"
    waiting = entering(HostLock(file, "lock", lambda seconds: None))
    assert is_waiting(waiting)
    other.kill()
    assert ends(waiting)


def test_a_lock_that_we_hold_keeps_another_process_out_until_we_go(file, holder):
    waited = []
    with HostLock(file, "lock", waited.append):
        other, elsewhere = holder(), holder("another lock")
        assert elsewhere.says() == "inside"
    assert waited == []
    while (said := other.says()) == "waited":
        pass
    assert said == "inside"


def test_a_process_outside_keeps_no_rank_out(file, holder):
    other = holder()
    assert other.says() == "inside"
    other.go_out()
    assert other.says() == "outside"
    assert ends(entering(HostLock(file, "lock", pytest.fail)))


def test_threads_of_one_process_keep_each_other_out(file):
    lock = HostLock(file, "lock", lambda seconds: None)
    with lock:
        waiting = entering(lock)
        assert is_waiting(waiting)
    assert ends(waiting)


def test_other_names_are_other_locks(file):
    one, other = HostLock(file, "one", pytest.fail), HostLock(file, "other", pytest.fail)
    with one, other:
        pass


def test_an_error_inside_frees_the_lock(file, holder):
    lock = HostLock(file, "lock", pytest.fail)
    with pytest.raises(KeyError), lock:
        raise KeyError
    assert ends(entering(lock))
    assert holder().says() == "inside"


CIRCLES = """
import errno, fcntl, sys, threading
from manyhands.runtime.transport.shared_memory import HostLock

def lockf(*arguments, really=fcntl.lockf):
    try:
        really(*arguments)
    except OSError as error:
        if error.errno == errno.EDEADLK and not seen:
            seen.append(True)
            print("circle", flush=True)
        raise

def hold(lock):
    with lock:
        print("inside", flush=True)
        told.wait()

seen, told, fcntl.lockf = [], threading.Event(), lockf
for name in sys.argv[2:]:
    threading.Thread(target=hold, args=[HostLock(int(sys.argv[1]), name, lambda seconds: None)]).start()
    sys.stdin.readline()
told.set()
"""


def is_blocked(process):
    """Whether the kernel lets this process wait for a lock."""
    return any("->" in line and f" {process.pid} " in line for line in Path("/proc/locks").read_text().splitlines())


def test_a_circle_that_only_the_kernel_sees_is_none(file):
    """Two processes hold a lock each in one thread and wait for the other's in another: to the kernel, which takes all
    threads of a process for one, that is a deadlock."""
    knobs = {"pass_fds": [file], "text": True, "bufsize": 1}
    knobs |= dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    first, second = both = [
        subprocess.Popen([sys.executable, "-c", CIRCLES, str(file), *names], **knobs)
        for names in [("one", "other"), ("other", "one")]
    ]
    try:
        assert [process.stdout.readline() for process in both] == ["inside\n"] * 2
        first.stdin.write("x\n")
        while not is_blocked(first):
            pass
        second.stdin.write("x\n")
        assert second.stdout.readline() == "circle\n"
        for process in both:
            process.stdin.write("x\n")
        told = [process.communicate(timeout=PATIENCE) for process in both]
        assert told == [("inside\n", "")] * 2
    finally:
        for process in both:
            process.kill()
            process.wait()


# Buffers


class Makes:
    """Counts what is made."""

    def __init__(self):
        self.sizes = []

    def __call__(self, nbytes):
        self.sizes.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)


KIND = (1, "a")


def test_a_buffer_that_came_back_is_used_again_for_anything_that_fits():
    makes = Makes()
    buffers = Buffers(makes)
    first = buffers.take(KIND, 10_000)
    assert first.numel() >= 10_000
    for nbytes in (10_000, 1, 0, first.numel()):
        buffers.give_back(KIND, first)
        assert buffers.take(KIND, nbytes) is first
    assert len(makes.sizes) == 1


def test_one_that_is_out_is_not_given_twice():
    buffers = Buffers(Makes())
    taken = [buffers.take(KIND, 100) for _ in range(3)]
    assert len({x.data_ptr() for x in taken}) == 3
    for x in taken:
        buffers.give_back(KIND, x)
    again = [buffers.take(KIND, 100) for _ in range(4)]
    assert len({x.data_ptr() for x in [*taken, *again]}) == 4


def test_kinds_do_not_share():
    buffers = Buffers(Makes())
    first = buffers.take(KIND, 100)
    buffers.give_back(KIND, first)
    assert buffers.take((2, "a"), 100) is not first
    assert buffers.take((1, "b"), 100) is not first
    assert buffers.take(KIND, 100) is first


def test_a_little_growth_fits_and_much_growth_replaces():
    makes = Makes()
    buffers = Buffers(makes)
    buffers.give_back(KIND, buffers.take(KIND, 1_000_000))
    buffers.give_back(KIND, buffers.take(KIND, 1_000_001))
    assert len(makes.sizes) == 1
    buffers.give_back(KIND, buffers.take(KIND, 5_000_000))
    buffers.give_back(KIND, buffers.take(KIND, 1_000_000))
    assert len(makes.sizes) == 2


@pytest.mark.parametrize("back", [[0, 1], [1, 0]], ids=["in order", "the other way"])
def test_sizes_that_take_turns_need_no_new_memory(back):
    """Memory of a host is never freed: what is given up for another size would be lost each time."""
    makes = Makes()
    buffers = Buffers(makes)
    for _ in range(50):
        out = [buffers.take(KIND, 1_000_000), buffers.take(KIND, 10_000)]
        assert [x.numel() >= need for x, need in zip(out, (1_000_000, 10_000), strict=True)] == [True, True]
        for place in back:
            buffers.give_back(KIND, out[place])
    assert len(makes.sizes) == 2


def test_only_one_is_given_up_for_a_larger_one():
    makes = Makes()
    buffers = Buffers(makes)
    for x in [buffers.take(KIND, 10_000) for _ in range(3)]:
        buffers.give_back(KIND, x)
    out = [buffers.take(KIND, 1_000_000), buffers.take(KIND, 10_000), buffers.take(KIND, 10_000)]
    assert len({x.data_ptr() for x in out}) == 3
    assert len(makes.sizes) == 4


def test_the_smallest_that_fits_is_taken():
    buffers = Buffers(Makes())
    sizes = (100_000, 10_000, 1_000_000)
    out = [buffers.take(KIND, size) for size in sizes]
    for x in out:
        buffers.give_back(KIND, x)
    assert buffers.take(KIND, 50_000) is out[0]
    assert buffers.take(KIND, 50_000) is out[2]
    assert buffers.take(KIND, 5_000) is out[1]


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 10**6, 2**20, 2**20 + 1, 10**8 + 7])
def test_there_is_room_and_little_of_it_to_spare(nbytes):
    makes = Makes()
    made = makes.sizes
    Buffers(lambda size: made.append(size) or torch.empty(0)).take(KIND, nbytes)
    assert nbytes <= made[0] <= max(nbytes + 4096, nbytes * 1.25)

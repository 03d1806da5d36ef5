"""The peers do the work they are said to do."""

import socket
import threading
from itertools import islice

import hogwild
import pytest
import server
import start
import torch
from _models import BATCHES, CASES, batches, model, plain_step

from manyhands.core.errors import ManyhandsError

WRITE = "import os, time; open(os.environ['FIRST_STEP_FILE'], 'a').write(f'{time.time() + %s!r}\\n' * %d)"


def numel(name):
    return sum(p.numel() for p in model(name).parameters())


def test_models_have_the_sizes_they_are_said_to_have():
    assert [numel(name) for name in ("mlp", "cnn", "small")] == [10_020_874, 458_570, 9_610]


@pytest.mark.parametrize("name", CASES)
def test_weights_are_the_same_everywhere_and_data_differ_by_rank(name):
    assert all(map(torch.equal, model(name).parameters(), model(name).parameters()))
    (x, y), (again, same), (other, _) = (next(batches(name, rank)) for rank in (0, 0, 1))
    assert torch.equal(x, again) and torch.equal(y, same) and not torch.equal(x, other)
    assert len(x) == len(y) == CASES[name].batch_size


def test_data_begin_again():
    walked = list(islice(batches("small", 0), BATCHES + 1))
    assert walked[0][0] is walked[BATCHES][0] and not torch.equal(walked[0][0], walked[1][0])


def test_a_plain_step_is_sgd_on_the_next_batch():
    net, twin = model("small"), model("small")
    step = plain_step(net, batches("small", 0))
    for x, y in islice(batches("small", 0), 2):
        step()
        loss = torch.nn.functional.cross_entropy(twin(x), y)
        with torch.no_grad():
            for p, g in zip(twin.parameters(), torch.autograd.grad(loss, list(twin.parameters())), strict=True):
                p -= 0.01 * g
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_two_processes_are_compared_by_samples_not_by_steps(monkeypatch):
    asked = []

    def measured(title, sides, steps):
        asked.append([(side.name, side.ranks) for side in sides])
        return {"one": [3.0] * 3, "two": [4.0] * 3}

    monkeypatch.setattr(hogwild, "measure", measured)
    found = {one["name"]: (one["value"], one["goal"]) for one in hogwild.run(None)}
    assert found == {"mlp-2-over-1": (1.5, ">= 1.8"), "sparse-2-over-1": (1.5, ">= 1.3")}
    assert asked == [[("one", 1), ("two", 2)]] * 2


def test_sparse_batches_begin_again_and_differ_by_rank():
    walked = list(islice(hogwild.sparse_batches(0), BATCHES + 1))
    (v, x, y), (other, *_) = walked[0], next(hogwild.sparse_batches(1))
    assert v.shape == x.shape == (hogwild.SPARSE_BATCH, 64) and y.shape == (hogwild.SPARSE_BATCH,)
    assert all(field.is_contiguous() for field in walked[1]), "or no kernel could walk them"
    assert walked[BATCHES] is walked[0] and not torch.equal(v, walked[1][0]) and not torch.equal(v, other)


def test_exactly_the_memory_is_filled():
    here, there = socket.socketpair()
    sent, got = torch.arange(300_000.0), torch.zeros(300_000)
    with here, there:
        encoder = threading.Thread(target=lambda: [here.sendall(server.bytes_of(sent)), here.sendall(b"more")])
        encoder.start()
        server.fill(server.bytes_of(got), there)
        assert torch.equal(sent, got) and there.recv(10) == b"more"
        encoder.join()


class InPieces:
    """A link that gives three bytes at a time, as a real one may."""

    def __init__(self, data):
        self.data = data

    def recv_into(self, memory, nbytes, flags):
        piece, self.data = self.data[: min(3, len(memory))], self.data[min(3, len(memory)) :]
        memory[: len(piece)] = piece
        return len(piece)


def test_memory_is_filled_piece_by_piece():
    memory = bytearray(8)
    server.fill(memoryview(memory), InPieces(b"12345678more"))
    assert memory == b"12345678"


def test_a_server_that_has_gone_is_an_error():
    here, there = socket.socketpair()
    with there:
        here.sendall(b"half")
        here.close()
        with pytest.raises(ConnectionError):
            server.fill(memoryview(bytearray(8)), there)


def test_the_slower_rank_makes_the_first_step():
    lines = f"{WRITE % (1000, 1)}; {WRITE % (2000, 1)}"
    assert 2000 < start.first_step(["-c", lines]) < 2060


def test_the_ratio_is_ours_over_torchrun():
    result = start.compare(["-c", WRITE % (1000, 2)], ["-c", WRITE % (2000, 2)], rounds=2)[0]
    assert result["value"] == pytest.approx(0.5, abs=0.02) and result["goal"] == "<= 0.8"


def test_a_missing_rank_is_an_error():
    with pytest.raises(ManyhandsError, match="1 ranks made a first step, but 2 should"):
        start.first_step(["-c", WRITE % (0, 1)])


def test_a_failed_launch_shows_what_it_printed():
    with pytest.raises(ManyhandsError, match=r"(?s)exit code 7.*no such port"):
        start.first_step(["-c", f"{WRITE % (0, 2)}; print('no such port'); raise SystemExit(7)"])


def test_a_launch_that_never_ends_is_ended(monkeypatch):
    monkeypatch.setattr(start, "DEADLINE", 1.0)
    monkeypatch.setattr(start, "PATIENCE", 0.1)
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    with pytest.raises(ManyhandsError, match="no end within 1 s"):
        start.first_step(["-c", stubborn])

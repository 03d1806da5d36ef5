"""How far a run is: a line every tenth of the way, or a bar."""

import io
import os
import pty
import subprocess
import sys
import threading

import pytest

from manyhands.report.progress import Bar, ProgressLines, Tally, clock


def play(progress, steps=40, samples=25, loss=0.5):
    progress.start(steps * samples, "digits")
    for _ in range(steps):
        progress.step({"kind": "step", "samples": samples, "loss": loss})
    progress.stop()
    progress.stop()
    return progress.stream.getvalue()


def test_lines_come_every_tenth():
    lines = play(ProgressLines("ssp on digits", io.StringIO())).splitlines()
    assert lines[0] == "ssp on digits: 1,000 samples"
    assert [line[:5] for line in lines[1:]] == [f"{share:3d} %" for share in range(10, 101, 10)]
    assert all("loss 0.5000" in line and "samples/s" in line and line.endswith("left") for line in lines[1:])


def test_few_large_steps_give_few_lines():
    assert len(play(ProgressLines("", io.StringIO()), steps=3).splitlines()) == 4


def test_the_shown_loss_is_the_mean_since_it_was_last_shown():
    progress = ProgressLines("", io.StringIO())
    progress.start(40, "digits")
    for loss in (1.0, 3.0, None, None):
        progress.step({"kind": "step", "samples": 2, "loss": loss})
    assert "loss 2.0000" in progress.stream.getvalue().splitlines()[1]


def test_a_run_without_losses_shows_none():
    assert "loss" not in play(ProgressLines("", io.StringIO()), loss=None)


def test_the_bar_ends_full():
    text = play(Bar("ssp on digits", io.StringIO()))
    assert "ssp on digits" in text and "100%" in text and "loss 0.5000" in text and "0:00:00 left" in text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00:00"), (0.2, "0:00:01"), (61, "0:01:01"), (7325, "2:02:05")])
def test_the_clock(seconds, text):
    assert clock(seconds) == text


def test_a_terminal_gets_a_bar_and_a_pipe_lines():
    code = "from manyhands.report.progress import choose; print(type(choose()).__name__)"
    mine, theirs = pty.openpty()
    watched = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, text=True)
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    os.close(mine)
    os.close(theirs)
    assert (watched.stdout.strip(), piped.stdout.strip()) == ("Bar", "ProgressLines")


@pytest.fixture
def hands_of_the_clock(monkeypatch):
    """A clock that the test moves."""
    now = [100.0]
    monkeypatch.setattr("manyhands.report.progress.time.monotonic", lambda: now[0])
    return now


def test_the_rate_does_not_count_the_time_it_took_to_start(hands_of_the_clock):
    tally = Tally(1000)
    hands_of_the_clock[0] += 10
    tally.add({"kind": "step", "samples": 50, "loss": None})
    assert tally.rate() == 5, "one step says nothing about the rate yet"
    hands_of_the_clock[0] += 2
    tally.add({"kind": "step", "samples": 100, "loss": None})
    assert (tally.rate(), tally.seconds_left()) == (50, 17)


def test_a_bar_is_not_stopped_while_another_thread_draws():
    bar = Bar("ssp on digits", io.StringIO())
    bar.start(100, "digits")
    draw, stopping, seen = bar.drawing.update, threading.Thread(target=bar.stop), []

    def stopped_meanwhile(*words, **named):
        bar.drawing.update = draw
        stopping.start()
        stopping.join(0.2)  # it would be done by then
        seen.append(bar.drawing)
        draw(*words, **named)

    bar.drawing.update = stopped_meanwhile
    bar.step({"kind": "step", "samples": 1, "loss": 0.5})
    stopping.join()
    assert seen != [None] and bar.drawing is None
    bar.step({"kind": "step", "samples": 1, "loss": 0.5})  # one that comes late is no error

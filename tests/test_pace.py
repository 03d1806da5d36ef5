"""The yardstick of promises about seconds."""

import subprocess
import sys

import pytest

import pace


def test_what_took_less_needs_no_yardstick(monkeypatch):
    monkeypatch.setattr(pace, "slowdown", lambda: pytest.fail("it was within the limit"))
    pace.assert_within(2.0, 1.9)


@pytest.mark.parametrize(("seconds", "factor", "holds"), [(2.1, 1.0, False), (2.1, 1.5, True), (3.1, 1.5, False)])
def test_what_took_more_is_held_against_the_machine(monkeypatch, seconds, factor, holds):
    monkeypatch.setattr(pace, "slowdown", lambda: factor)
    if holds:
        pace.assert_within(2.0, seconds)
    else:
        with pytest.raises(AssertionError, match=f"{seconds:.2f} s instead of 2.0 s"):
            pace.assert_within(2.0, seconds)


def test_processes_beside_slow_a_bare_process_down():
    """Six more processes than cores: whatever else runs, a process gets less than a core."""
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(6)]
    try:
        assert pace.slowdown() > 1.5
    finally:
        for process in busy:
            process.kill()
            process.wait()

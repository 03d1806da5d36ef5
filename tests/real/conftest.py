"""What tests of real processes share: nothing is left over by any of them, and some may start quickly."""

import os
import threading
from functools import partial

import pytest

from manyhands.engines import local
from manyhands.runtime.launch.launch import launch

from .tools import Started, children, memories, sockets


@pytest.fixture(autouse=True)
def nothing_is_left_over():
    before = children(os.getpid()), threading.active_count(), memories(), sockets()
    yield
    assert (children(os.getpid()), threading.active_count(), memories(), sockets()) == before


@pytest.fixture
def quickly(monkeypatch):
    """Processes are forked from one that has imported torch already, which the methods cannot tell."""
    monkeypatch.setattr(local, "launch", partial(launch, context="forkserver"))


@pytest.fixture
def start():
    """Start programs; when the test is over nothing of them may be there any more."""
    programs = []

    def begin(*words, **environment):
        programs.append(Started(*words, **environment))
        return programs[-1]

    yield begin
    left = [pid for program in programs for pid in program.others()]
    for program in programs:
        program.clear()
    assert not left

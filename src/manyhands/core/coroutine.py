"""Coroutine: two programs of one rank that take turns on one thread.

    caller      ... resume()                     ... resume()
    coroutine          | run ... pause()                | ... run ... pause()

A strategy runs in a coroutine beside a user's own loop: it pauses where it would have computed a gradient. Both are
ordinary code, and either may wait for messages: the rank waits. In virtual time the kernel continues whichever of the
two has waited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from greenlet import GreenletExit, getcurrent, greenlet

DEVICES = ("cpu", "cuda")
"""Devices with an autocast mode of their own."""


class Coroutine:
    """A function that runs in turns with the one that made this.

    Args:
        run: the function; it runs without autograd and autocast, whatever the modes of the caller are.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._green = greenlet(run, getcurrent())

    @property
    def ended(self) -> bool:
        return self._green.dead

    def resume(self) -> None:
        """Run it until it pauses or ends; an error in it is raised here."""
        self._green.parent = getcurrent()
        with _plain_modes():
            value = self._green.switch()
        if isinstance(value, GreenletExit):  # the rank was killed while the coroutine waited
            raise value

    def pause(self) -> None:
        """Return to the caller until it resumes; called within the function."""
        parent = self._green.parent
        assert parent is not None
        parent.switch()

    def stop(self) -> None:
        """End it where it has paused."""
        if self._green:
            self._green.parent = getcurrent()
            self._green.throw(GreenletExit)


@contextmanager
def _plain_modes() -> Iterator[None]:
    """Neither autograd nor autocast, whose states belong to the thread and not to a coroutine."""
    autocast = [device for device in DEVICES if torch.is_autocast_enabled(device)]
    grad = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    for device in autocast:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in autocast:
            torch.set_autocast_enabled(device, True)
        torch.set_grad_enabled(grad)

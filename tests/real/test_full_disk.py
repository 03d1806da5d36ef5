"""A disk that is full under real processes: how the launching process reports what happened in another one."""

import errno
import os
import signal
from functools import partial

import pytest

import manyhands as mh
from manyhands.runtime import checkpoint

from .tools import Strike, messages, small, struck, until

pytestmark = pytest.mark.timeout(60)

FULL = "cannot be written: No space left on device"


def fill_the_disk(w, batch):
    """From now on files of this process do not fit on the disk, except for their first half."""

    def attempt(path, data):
        path.write_bytes(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    checkpoint._write = attempt
    return batch


def fill_and_stop(launcher, w, batch):
    os.kill(launcher, signal.SIGTERM)
    until(lambda: w.transport.control.finishing)
    return fill_the_disk(w, batch)


def train(act, folder, **settings):
    strategy = struck(mh.ssp(lr=0.01), Strike(act, folder, rank=0))
    return mh.train(small(), strategy, workers=2, steps=40, per_worker=True, out=folder / "out", **settings)


def test_the_lead_cannot_save_any_more(tmp_path, caplog):
    checkpoints = tmp_path / "out" / "checkpoints"
    with pytest.raises(mh.ManyhandsError) as raised:
        train(fill_the_disk, tmp_path, checkpoint_every=20)
    assert messages(caplog) == [
        f"{checkpoints / 'step-00000020'} {FULL}; the run continues, and saves again at the next checkpoint"
    ]
    assert str(raised.value) == f"the run is complete, but could not be saved: {checkpoints / 'step-00000040'} {FULL}"
    assert os.listdir(checkpoints) == []


def test_a_run_that_is_asked_to_stop_says_that_it_could_not_be_saved(tmp_path, capfd):
    with pytest.raises(mh.ManyhandsError, match=r"^the run was stopped at step \d+, but could not be saved: .*step-0"):
        train(partial(fill_and_stop, os.getpid()), tmp_path)
    assert os.listdir(tmp_path / "out" / "checkpoints") == []
    assert capfd.readouterr().err == "", "no traceback"

"""The command line as its users see it, without the seconds in which it imports torch."""

import multiprocessing
from types import SimpleNamespace

import pytest
from one_command import answer


@pytest.fixture
def manyhands(tmp_path, tmp_path_factory):
    """Run a command in a folder of its own, in a new process that has torch already."""

    def call(*words):
        said = tmp_path_factory.mktemp("said")
        out, err = said / "out", said / "err"
        arguments = ([str(word) for word in words], tmp_path, out, err)
        process = multiprocessing.get_context("forkserver").Process(target=answer, args=arguments)
        process.start()
        process.join()
        return SimpleNamespace(returncode=process.exitcode, stdout=out.read_text(), stderr=err.read_text())

    return call

"""The output of `manyhands run`: whole lines with their rank, at once, on the stream they were written to."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from manyhands.cli import main
from manyhands.runtime.launch import rank_output
from manyhands.runtime.launch.rank_output import OutputLines, RankOutput

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text("import os, sys\nrank = os.environ['RANK']\n" + text)
        return str(path)

    return write


# Lines


@pytest.mark.parametrize(
    ("chunks", "lines", "rest"),
    [
        ([b"one\ntwo\n"], [b"one", b"two"], b""),
        ([b"on", b"e\ntw", b"o"], [b"one"], b"two"),
        ([b"\n\na\n"], [b"", b"", b"a"], b""),
        ([b"one\r", b"\ntwo\r\r\n"], [b"one", b"two"], b""),
        ([b"\r 1%", b"\r 2%", b"\r 3%\n"], [(b" 1%",), (b" 2%",), b" 3%"], b""),
        ([b"1%\r", b"2%\r"], [(b"1%",)], b"2%"),
        ([b"1%\r   \rdone\n"], [(b"1%",), b"done"], b""),
    ],
)
def test_lines_end_with_a_newline_and_states_of_a_progress_bar_with_a_return(chunks, lines, rest):
    output = OutputLines()
    found = [(text,) if is_state else text for chunk in chunks for text, is_state in output.feed(chunk)]
    assert (found, output.rest()) == (lines, rest)


def test_a_line_that_never_ends_is_broken(monkeypatch):
    monkeypatch.setattr(rank_output, "LONGEST", 10)
    output = OutputLines()
    assert [output.feed(b"1234567") for _ in range(3)] == [[], [(b"1234567" * 2, False)], []]


# Ranks

LONG = """
for _ in range(5):
    for piece in range(100):
        os.write(1, rank.encode() * 3000)
        os.write(2, rank.encode() * 3000)
    os.write(1, b"\\n")
    os.write(2, b"\\n")
os.write(1, b"the end of " + rank.encode())
"""
WHOLE = {f"{rank}" * 300_000: 5 for rank in range(3)}


def test_lines_of_ranks_are_whole_and_begin_with_the_rank(script, capfd):
    assert main(["run", "-n", "2", "--servers", "1", script(LONG)]) == 0
    out, err = (Counter(text.splitlines()) for text in capfd.readouterr())
    marked = {f"[{line[0]}] {line}": count for line, count in WHOLE.items()}
    assert err == marked
    assert out == marked | {f"[{rank}] the end of {rank}": 1 for rank in range(3)}


def test_without_a_prefix_they_are_whole_too(script, capfd):
    assert main(["run", "--no-prefix", "-n", "3", script(LONG)]) == 0
    out, err = (Counter(text.splitlines()) for text in capfd.readouterr())
    assert err == WHOLE
    assert out == WHOLE | {f"the end of {rank}": 1 for rank in range(3)}


@pytest.mark.parametrize("words", [[], ["--log-dir", "logs"]])
def test_one_rank_alone_has_no_prefix(words, script, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["run", *words, script("print('one', flush=True); print('two', file=sys.stderr)")]) == 0
    assert capfd.readouterr() == ("one\n", "two\n")


def test_every_rank_has_a_log_file(script, capfd, tmp_path):
    folder = tmp_path / "new" / "logs"
    text = "print('out', rank); print('err', rank, file=sys.stderr)"
    assert main(["run", "-n", "2", "--log-dir", str(folder), script(text)]) == 0
    for rank in range(2):
        lines = (folder / f"rank{rank}.log").read_text().splitlines()
        assert sorted(lines) == [f"err {rank}", f"out {rank}"]
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] out 0", "[1] out 1"]


def test_a_folder_that_cannot_be_made_is_refused(script, capfd):
    path = script("print('started')")
    assert main(["run", "-n", "2", "--log-dir", path, path]) == 2
    refusal = f"manyhands: log_dir is {path}, but must be a folder that can be written: File exists\n"
    assert capfd.readouterr() == ("", refusal)


def test_of_a_progress_bar_some_states_are_printed_and_the_last(script, capfd):
    bar = "for n in range(1001): sys.stderr.write(f'\\r{n} of 1000')\nsys.stderr.write('\\n')"
    assert main(["run", "-n", "2", script(bar)]) == 0
    lines = capfd.readouterr().err.splitlines()
    for rank in range(2):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert (own[0], own[-1]) == (f"[{rank}] 0 of 1000", f"[{rank}] 1000 of 1000")
        assert len(own) < 100
        assert all(line.endswith(" of 1000") for line in own)


def test_the_newest_state_is_printed_though_no_other_follows(monkeypatch, capfd):
    """The pipe stays open: what is printed here comes from the timer."""
    monkeypatch.setattr(rank_output, "PAUSE", 0.01)
    seen = bytearray()

    class Seen:
        def write(self, data):
            seen.extend(data)

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stdout", type("Out", (), {"buffer": Seen()}))
    output = RankOutput(1, prefix=False, folder=None)
    with output.pipes(0) as (out, _):
        os.write(out, b"1%\r2%\r3%\r")
        while seen != b"1%\n2%\n":
            os.sched_yield()
        output.close()
    assert seen == b"1%\n2%\n3%\n"


def test_a_process_that_outlives_its_rank_is_not_waited_for(capfd):
    output = RankOutput(1, prefix=True, folder=None)
    with output.pipes(0) as (out, _):
        os.write(out, b"one\ntwo")
        output.close()
    assert capfd.readouterr().out == "[0] one\n[0] two\n"


def started(path, *words):
    command = [sys.executable, "-m", "manyhands.cli", "run", *words, path]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_line_is_printed_at_once(script, tmp_path):
    """The ranks wait for a file, which is made when their lines have arrived."""
    text = f"print('up')\nwhile not os.path.exists({str(tmp_path / 'go')!r}): pass"
    with started(script(text), "-n", "2") as process:
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] up\n", "[1] up\n"]
        (tmp_path / "go").touch()
        assert process.communicate() == ("", "")
    assert process.returncode == 0


def test_a_closed_output_ends_the_ranks_that_write_to_it(script):
    with started(script("while True: print('more')"), "-n", "2") as process:
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 1
    assert "BrokenPipeError" in said

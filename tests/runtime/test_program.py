"""How a program is sent to other processes: by name where a file has it, by value where none has."""

import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

import manyhands
from manyhands.core.errors import Refused
from manyhands.runtime.launch.program import pickled, without_imaginary_main


def by_name():
    return 7


def in_session(monkeypatch, text, **names):
    """What a session without a file has after this text."""
    session = ModuleType("__main__")
    vars(session).update(names)
    monkeypatch.setitem(sys.modules, "__main__", session)
    exec(text, vars(session))
    return session


def elsewhere(program):
    """What another process gets when it calls the program."""
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer)())"
    found = subprocess.run([sys.executable, "-c", code], input=program, capture_output=True, timeout=60)
    return found.stdout.decode().strip() or found.stderr.decode()


def test_a_function_of_a_module_is_sent_by_name(monkeypatch):
    assert pickled(by_name) == pickle.dumps(by_name)
    in_session(monkeypatch, "")
    assert pickled(by_name) == pickle.dumps(by_name)


def test_a_function_of_a_session_is_sent_by_value_with_what_it_uses(monkeypatch):
    text = """
SIDE = 4
class Square:
    def area(self):
        return SIDE**2
def area():
    return Square().area()
"""
    session = in_session(monkeypatch, text)
    assert elsewhere(pickled(session.area)) == "16"
    assert elsewhere(pickled(session.Square().area)) == "16"


def test_a_function_without_a_name_is_sent_by_value():
    side = 5
    assert elsewhere(pickled(lambda: side**2)) == "25"


def test_what_cannot_be_sent_at_all_is_refused_with_the_way_out(monkeypatch):
    session = in_session(monkeypatch, "def waits():\n    return lock", lock=threading.Lock())
    way_out = r"\(cannot pickle '_thread.lock' object\): write a function .*%%writefile my_task.py.*my_task:function"
    with pytest.raises(Refused, match=way_out):
        pickled(session.waits)


def test_a_script_whose_functions_have_names_does_not_wait_for_cloudpickle(tmp_path):
    script = tmp_path / "script.py"
    lines = [
        "import sys",
        "from manyhands.runtime.launch.program import pickled",
        "def work(): pass",
        "pickled(work)",
        "sys.exit('cloudpickle' in sys.modules)",
    ]
    script.write_text("\n".join(lines))
    assert subprocess.run([sys.executable, script], timeout=60).returncode == 0


def test_only_the_launch_sends_code_by_value():
    files = Path(manyhands.__file__).parent.rglob("*.py")
    assert [path.name for path in files if "import cloudpickle" in path.read_text(encoding="utf-8")] == ["program.py"]


def test_a_file_that_does_not_exist_is_hidden_from_new_processes_only_while_they_start(monkeypatch, tmp_path):
    session = in_session(monkeypatch, "", __file__="<stdin>")
    with without_imaginary_main():
        assert session.__file__ is None
    assert session.__file__ == "<stdin>"
    there = tmp_path / "script.py"
    there.touch()
    session.__file__ = str(there)
    with without_imaginary_main():
        assert session.__file__ == str(there)

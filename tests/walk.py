"""`make walk METHOD=ssp`: the files and functions that a gradient passes, measured.

Trains with two real processes, and prints which files and functions of the package run between the moment a mini-batch
is granted and the moment the strategy's step has moved the weights: in the order of their first call, with the mean
number of calls per step and worker. Functions that run in some steps only (fewer than 0.5 calls per step and worker,
such as waking a parked worker) are listed apart. Other threads of a rank (readers, writers, activities) are included.

    make walk METHOD=ssp
    make walk METHOD='bsp:codec=feedback(topk(0.01))' LINK=tcp
"""

import argparse
import atexit
import json
import os
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from pathlib import Path

FIRST, LAST = 5, 25
"""The steps of a worker that are measured: not the first ones, in which buffers are made."""
SOMETIMES = 0.5
"""Functions with fewer calls per step and worker run in some steps only."""
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""They have frames of their own, but are part of the function they stand in."""
FOLDER = "MANYHANDS_WALK"


class Walk:
    """A profiler that counts calls of package functions while a window is open.

    The window opens when a budget's `grant` returns, and closes when the outermost `step` of a strategy does.
    """

    def __init__(self, package):
        self.package = package
        self.grants = 0
        self.open = False
        self.outermost = None
        self.calls = Counter()

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if not code.co_filename.startswith(self.package):
            return
        if event == "call":
            self._called(frame, code)
        elif event == "return":
            self._returned(frame, code, argument)

    def _called(self, frame, code):
        if not self.open or code.co_name in COMPREHENSIONS:
            return
        self.calls[code.co_filename[len(self.package) :], code.co_qualname] += 1
        if self.outermost is None and code.co_name == "step" and "/strategies/" in code.co_filename:
            self.outermost = frame

    def _returned(self, frame, code, argument):
        if code.co_name == "grant" and argument and threading.current_thread() is threading.main_thread():
            self.grants += 1
            self.open = FIRST <= self.grants < LAST
        elif frame is self.outermost:
            self.open, self.outermost = False, None

    def dump(self, folder):
        """Write the counts to a file, if this process was a worker."""
        if self.calls:
            rows = [[file, function, count] for (file, function), count in self.calls.items()]
            Path(folder, f"{os.getpid()}.json").write_text(json.dumps(rows), encoding="utf-8")


def install(folder):
    """Profile this process from now on, with all threads it starts."""
    import manyhands

    walk = Walk(str(Path(manyhands.__file__).parent) + os.sep)
    threading.setprofile(walk)
    sys.setprofile(walk)
    atexit.register(walk.dump, folder)


def walked(method, link, task):
    """Calls per step and worker, by file and function, in the order of the first call."""
    import manyhands as mh
    from manyhands.cli.train import read
    from manyhands.run.methods import build

    recipe, knobs, _ = read([method])
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        mh.train(task, build(recipe, knobs), workers=2, link=link, steps=40)
        ranks = sorted((json.loads(path.read_text()) for path in Path(folder).iterdir()), key=len, reverse=True)
    found = defaultdict(float)
    for rows in ranks:
        for file, function, count in rows:
            found[file, function] += count / (LAST - FIRST) / len(ranks)
    return found


def show(title, found):
    """Print functions by file, each with its calls per step and worker."""
    by_file = defaultdict(list)
    for (file, function), calls in found.items():
        by_file[file].append((function, calls))
    print(f"{title}:")
    for number, (file, functions) in enumerate(by_file.items(), start=1):
        print(f"{number:3} {file}")
        for function, calls in functions:
            print(f"      {calls:8.2f}  {function}")


def main():
    """Print the walk of one method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", nargs="?", default="ssp")
    parser.add_argument("--link", default="shm", choices=["shm", "tcp"])
    parser.add_argument("--task", default="digits")
    options = parser.parse_args()
    found = walked(options.method, options.link, options.task)
    always = {name: calls for name, calls in found.items() if calls >= SOMETIMES}
    show("in every step", always)
    show("in some steps only", {name: calls for name, calls in found.items() if name not in always})
    files, all_files = ({file for file, _ in some} for some in (always, found))
    print(
        f"{options.method} on {options.link}: {len(files)} files ({len(all_files)}), "
        f"{len(always)} functions ({len(found)}), {sum(found.values()):.0f} calls per step and worker; "
        "in brackets: with those that run in some steps only"
    )


if __name__ == "__mp_main__" and FOLDER in os.environ:
    install(os.environ[FOLDER])
if __name__ == "__main__":
    main()

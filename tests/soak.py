"""`make soak`: tests that are marked so, whole runs of every method, and the fault tests again and again.

Repeating them finds what happens only sometimes. One line at the end says how it went; the first run of pytest that
fails ends it and shows what that said.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

from manyhands.core.method_index import methods

TESTS = Path(__file__).parent
FAULTS = ["-x", *(TESTS / name for name in ("real/test_faults.py", "real/test_stops.py", "runtime/test_hostile.py"))]
ALL = "soak or not soak"
MATRIX = ["--dist", "loadgroup", TESTS / "matrix"]
MARKED = ["-m", "soak", TESTS]
"""What is marked as more of what other tests show."""


class Failed(Exception):
    """A test has failed: what pytest said."""


def passed(*words):
    """How many tests pytest has passed, two at a time."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-m", ALL, *words], capture_output=True, text=True
    )
    if done.returncode:
        raise Failed(done.stdout + done.stderr)
    return int(re.findall(r"(\d+) passed", done.stdout)[-1])


def main(rounds=20, matrices=1):
    """The exit code: 0 if nothing has failed."""
    began, tests = time.monotonic(), {"marked": 0, "matrix": 0, "round": 0}
    runs = [("marked", MARKED, 1, 1)]
    runs += [("matrix", MATRIX, number, matrices) for number in range(1, matrices + 1)]
    runs += [("round", FAULTS, number, rounds) for number in range(1, rounds + 1)]
    for what, words, number, of in runs:
        where = f"{what} {number} of {of}"
        try:
            tests[what] = passed(*words)
        except Failed as failure:
            print(failure)
            print(f"soak: failed in {where}, {minutes_since(began):.0f} min")
            return 1
        print(f"{where}: {tests[what]} tests, {minutes_since(began):.1f} min so far", flush=True)
    parts = [f"{tests['marked']} marked tests"]
    parts += [f"{rounds} of {rounds} rounds of {tests['round']} tests"] if rounds else []
    parts += [f"matrix of {len(methods())} methods: {tests['matrix']} tests"] if matrices else []
    print(f"soak: {', '.join(parts)}, no failure, {minutes_since(began):.0f} min")
    return 0


def minutes_since(began):
    return (time.monotonic() - began) / 60


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))

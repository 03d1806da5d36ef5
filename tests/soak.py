"""Runs the fault tests again and again, two at a time, to find what happens only sometimes: `make soak`.

One line at the end says how it went; the first round that fails ends it and shows what pytest said.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent
FILES = [TESTS / name for name in ("real/test_faults.py", "real/test_stops.py", "runtime/test_hostile.py")]


def main(rounds):
    """The exit code: that of pytest in the first round that failed, else 0."""
    began, tests = time.monotonic(), "0"
    for number in range(1, rounds + 1):
        done = subprocess.run([sys.executable, "-m", "pytest", "-x", "-n", "2", *FILES], capture_output=True, text=True)
        minutes = (time.monotonic() - began) / 60
        if done.returncode:
            print(done.stdout + done.stderr)
            print(f"soak: failed in round {number} of {rounds}, {minutes:.0f} min")
            return done.returncode
        tests = re.findall(r"(\d+) passed", done.stdout)[-1]
        print(f"round {number} of {rounds}: {tests} tests, {minutes:.1f} min so far", flush=True)
    print(f"soak: {rounds} of {rounds} rounds, {tests} tests each, no failure, {minutes:.0f} min")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 20))

"""What only `make soak` runs can be imported: a name that no longer exists is found at once, and not an hour later."""

import subprocess
import sys
from pathlib import Path


def test_the_matrix_of_all_methods_can_be_collected():
    tests = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", str(tests / "matrix")]
    collected = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert collected.returncode == 0, collected.stdout
    assert "test_real.py" in collected.stdout

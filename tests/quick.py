"""Quick tests: those of one part of the package, in about 30 seconds.

    python tests/quick.py codecs            # or: make quick PART=codecs
    python tests/quick.py codecs -x -k topk # further arguments are given to pytest (-n 0: one process)
    python tests/quick.py                   # lists the parts

PARTS is the table "what has changed -> which tests": the contract suite of the part and its own tests. Whole runs
(tests/end_to_end, tests/pins, tests/real) are left to `make test`, except where nothing smaller tests the part.
"""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent

ARCHITECTURE = "test_architecture.py"
PARTS = {
    "core": ("core", ARCHITECTURE),
    "codecs": ("contracts/test_codec_contract.py", "codecs", "core/test_encoder.py"),
    "rules": ("contracts/test_rule_contract.py", "rules", "core/test_weight_slice.py"),
    "consistency": ("contracts/test_consistency_contract.py",),
    "splits": ("contracts/test_schedule_contract.py", "splits", "pins/test_pipelines.py"),
    "collectives": ("contracts/test_collective_contract.py", "collectives"),
    "servers": ("contracts/test_shard_contract.py", "contracts/test_consistency_contract.py", "servers"),
    "teams": (
        "contracts/test_team_contract.py",
        "contracts/test_pass_contract.py",
        "end_to_end/test_teams.py",
        "end_to_end/test_cut_teams.py",
        "end_to_end/test_slices.py",
    ),
    "peers": ("peers", "pins/test_gossip.py"),
    "strategies": (
        "contracts/test_strategy_contract.py",
        "contracts/test_charging_contract.py",
        "end_to_end/test_refusals.py",
        "end_to_end/test_fully_sharded.py",
    ),
    "catalog": ("test_architecture.py", "cli/test_index.py", "test_docs.py", "end_to_end/test_refusals.py"),
    "runtime": ("runtime",),
    "transport": ("contracts/test_transport_contract.py",),
    "virtual": ("virtual",),
    "run": ("end_to_end/test_evaluations.py", "end_to_end/test_comparison.py", "end_to_end/test_display.py"),
    "loops": (
        "end_to_end/test_own_loop.py",
        "end_to_end/test_prepared.py",
        "end_to_end/test_script_lines.py",
        "end_to_end/test_live_optimizers.py",
        "end_to_end/test_sample_weights.py",
        "end_to_end/test_loop_collectives.py",
        "end_to_end/test_loop_checkpoint.py",
        "end_to_end/test_loop_records.py",
    ),
    "tasks": ("tasks",),
    "cost": ("cost", "core/test_work.py", "splits/test_stage_cut.py", "cli/test_cost.py"),
    "cli": ("cli",),
    "report": ("report",),
    "docs": ("test_docs.py", "test_surveys.py", "real/test_training_loops.py"),
    "examples": ("test_examples.py", "test_scripts.py"),
}
"""What has changed (a folder of the package, own loops, or docs) -> test paths below tests/."""

LONGER = ("teams", "strategies", "transport", "runtime", "loops", "cli", "docs", "examples")
"""Parts whose tests take longer than 30 seconds: they start processes or train whole models."""


def paths(part):
    """The test files and folders of a part."""
    if part not in PARTS:
        raise SystemExit(f"PART is {part!r}, but must be one of {', '.join(PARTS)}")
    return [str(TESTS / path) for path in PARTS[part]]


def main(arguments):
    """Run pytest for the part that comes first."""
    if not arguments:
        width = max(map(len, PARTS))
        for part, tests in PARTS.items():
            print(f"{part.ljust(width)}  {' '.join(tests)}{'  (longer than 30 s)' * (part in LONGER)}")
        return 0
    part, *others = arguments
    return subprocess.call([sys.executable, "-m", "pytest", "-n", "2", *paths(part), *others])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

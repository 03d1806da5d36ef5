"""Whole runs of real processes start quickly and leave nothing over, as in tests/real/."""

from real.conftest import nothing_is_left_over, quickly  # noqa: F401

"""What a launcher chooses for a user's script, passed in the environment and read by `mh.join`:

MANYHANDS_METHOD  the method, as the command line writes it; it replaces the script's own (`manyhands run --method`)
MANYHANDS_SEED    the seed of a script that sets none (`manyhands compare --seeds`)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from manyhands.core.errors import refuse_unless

METHOD, SEED = "MANYHANDS_METHOD", "MANYHANDS_SEED"


@dataclass(frozen=True)
class ScriptSettings:
    """The method and the seed; None where the launcher chooses none."""

    method: str | None = None
    seed: int | None = None

    def environment(self) -> dict[str, str]:
        """The variables that carry what was chosen."""
        chosen = {METHOD: self.method, SEED: self.seed}
        return {name: str(value) for name, value in chosen.items() if value is not None}


def script_settings(environment: Mapping[str, str] | None = None) -> ScriptSettings:
    """What the launcher of this process has chosen."""
    given = os.environ if environment is None else environment
    seed = given.get(SEED) or None
    refuse_unless(seed is None or seed.isdecimal(), SEED, seed, "a whole number >= 0")
    return ScriptSettings(given.get(METHOD) or None, None if seed is None else int(seed))

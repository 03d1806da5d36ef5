"""Compile every kernels.c of the package into one shared library during installation; a failure is only a warning.

The library is loaded with ctypes and does not use Python's C API; each kernel has an equivalent in torch.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "src/manyhands/_native/kernels.so"
FLAGS = ["-O3", "-fPIC", "-shared", "-ffp-contract=off"]
"""No fused multiply-add: the equivalents in torch round twice."""


class KernelHook(BuildHookInterface):
    """Runs before a wheel, also an editable one, is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into the source tree; a standard wheel includes the library and the benchmarks."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        problem = compile_kernels(sorted(root.glob("src/manyhands/**/kernels.c")), root / LIBRARY)
        if problem:
            self.app.display_warning(f"no compiled kernels, torch is used instead: {problem}")
        elif version == "standard":
            build_data["artifacts"].append(f"/{LIBRARY}")
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
        if version == "standard":  # an editable install finds them beside the source
            build_data["force_include"][str(root / "benchmarks")] = "manyhands/benchmarks"


def compile_kernels(sources: list[Path], library: Path) -> str:
    """Compile the library; returns the error, or an empty text. Running processes keep the old one."""
    compiler = next(filter(None, map(shutil.which, ["cc", "gcc", "clang"])), None)
    fresh = library.with_suffix(".tmp")
    try:
        library.parent.mkdir(exist_ok=True)
        library.unlink(missing_ok=True)
        if not sources or compiler is None:
            return "there is no C compiler" if sources else "there are no sources"
        subprocess.run([compiler, *FLAGS, "-o", fresh, *sources], check=True, capture_output=True, text=True)
        fresh.replace(library)
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()
    except OSError as error:
        return str(error)
    return ""

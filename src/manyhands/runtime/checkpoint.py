"""Checkpoints on disk: complete or absent, and checked for damage when they are read.

    DIR/step-00000120/weights.safetensors     the trained weights
                      buffers.safetensors     such as BatchNorm's statistics, averaged
                      state.safetensors       everything else that a resumed run needs
                      manifest.json           facts about the run; size and SHA-256 of every file; its own SHA-256

A checkpoint is written under a temporary name, file by file, each synced, the manifest last, and then renamed; older
checkpoints are removed only after that. A process that is killed before the rename leaves the last good checkpoint in
place, and a partial folder which is never read and which the next save removes; if writing fails, as on a full disk,
the partial folder is removed at once. Reading verifies sizes and hashes before it parses anything, and nothing is ever
unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from manyhands.core.errors import Refused, not_written, refuse_unless
from manyhands.core.strategy import Saved, Weights

FORMAT = 1
MANIFEST = "manifest.json"
FILES = ("weights.safetensors", "buffers.safetensors", "state.safetensors")
LARGEST_MANIFEST = 64 * 2**20
_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
_LEFTOVER = re.compile(r"\.step-.*\.partial-\d+")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, read; `facts` describe the run that it was saved from (task, seed, strategy, ...)."""

    path: Path
    facts: Mapping[str, Any]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    state: Saved


# -- writing -------------------------------------------------------------------------------------------


def save_checkpoint(
    folder: str | Path,
    step: int,
    facts: Mapping[str, Any],
    weights: Weights,
    buffers: Weights,
    state: Saved,
    *,
    keep: int = 2,
) -> Path:
    """Add a checkpoint to a folder. The newest `keep` stay; those of later steps are removed too: they are obsolete.

    If it cannot be written, nothing of it is left, and all others stay.
    """
    refuse_unless(step >= 0, "step", step, ">= 0")
    refuse_unless(keep >= 1, "keep", keep, ">= 1")
    final = Path(folder) / f"step-{step:08d}"
    try:
        _write_checkpoint(final, {**facts, "step": step}, dict(zip(FILES, (weights, buffers, state), strict=True)))
        _remove_all_but(final.parent, step, keep)
    except OSError as error:
        raise not_written(final, error) from None
    return final


def _write_checkpoint(final: Path, facts: Mapping[str, Any], tensors: Mapping[str, Weights]) -> None:
    folder, partial = final.parent, _partial(final)
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in [path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name)]:
        shutil.rmtree(leftover)
    try:
        partial.mkdir()
        _fill(partial, facts, tensors)
        if final.exists():
            _put_aside(final)
        os.rename(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync(folder)


def _partial(checkpoint: Path) -> Path:
    """The name of a checkpoint that is being written or removed."""
    return checkpoint.with_name(f".{checkpoint.name}.partial-{os.getpid()}")


def _remove_all_but(folder: Path, step: int, keep: int) -> None:
    """Remove all checkpoints but the newest `keep` up to a step."""
    final, *older = [one for one in found_in(folder) if one.step <= step]
    older = [one for one in older if one.step < step]
    for one in found_in(folder):
        if one not in [final, *older[: keep - 1]]:
            _remove(one.path)


def _fill(folder: Path, facts: Mapping[str, Any], tensors: Mapping[str, Weights]) -> None:
    plain = json.loads(json.dumps(facts, allow_nan=False))
    manifest: dict[str, Any] = {"format": FORMAT, "facts": plain, "files": {}}
    for name, named in tensors.items():
        data = safetensors.torch.save({key: x.detach().cpu().contiguous().clone() for key, x in named.items()})
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        _write(folder / name, data)
    manifest["manifest_sha256"] = _digest(manifest)
    _write(folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False).encode())
    _sync(folder)


def _digest(manifest: Mapping[str, Any]) -> str:
    """The hash of a manifest's canonical JSON, without the field of the hash itself."""
    rest = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Sync a folder, so that renames in it are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_aside(final: Path) -> None:
    """Rename a checkpoint of the same step; it can still be found until the new one is complete."""
    aside = final.with_name(f"{final.name}.replaced")
    if aside.exists():
        _remove(aside)
    os.rename(final, aside)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, renamed first: a partial removal must not look like a checkpoint."""
    leftover = _partial(checkpoint)
    os.rename(checkpoint, leftover)
    shutil.rmtree(leftover)


# -- reading -------------------------------------------------------------------------------------------


class FoundCheckpoint(NamedTuple):
    """The step and path of a checkpoint whose files are not read yet."""

    step: int
    path: Path


def found_in(folder: Path) -> list[FoundCheckpoint]:
    """The checkpoints of a folder that have a manifest, newest first."""
    return sorted(_scan(folder), key=lambda one: (one.step, one.path.suffix == ""), reverse=True)


def _scan(folder: Path) -> Iterator[FoundCheckpoint]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if (match := _NAME.fullmatch(path.name)) and (path / MANIFEST).is_file():
            yield FoundCheckpoint(int(match[1]), path)


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint, or the newest one of a folder of them; any damage is refused with the name of the file."""
    path = Path(path)
    if (path / MANIFEST).exists():
        return _load(path)
    if _NAME.fullmatch(path.name):
        raise Refused(f"{path} has no {MANIFEST}, but must have one to be a checkpoint")
    found = found_in(path)
    if not found:
        raise Refused(f"{path} holds no checkpoint, but must be one or a folder of them")
    try:
        return _load(found[0].path)
    except Refused as damage:
        good = next((one.path for one in found[1:] if _is_good(one.path)), None)
        raise Refused(f"{damage}; {good} is good" if good else f"{damage}; there is no other good one") from None


def _is_good(path: Path) -> bool:
    try:
        _load(path)
    except Refused:
        return False
    return True


def _load(path: Path) -> Checkpoint:
    manifest = _manifest(path / MANIFEST)
    tensors = [_tensors(path / name, manifest["files"][name]) for name in FILES]
    return Checkpoint(path, manifest["facts"], *tensors)


def _manifest(path: Path) -> dict[str, Any]:
    data = _read(path)
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path} is not JSON: {error}") from None
    if not isinstance(manifest, dict):
        raise Refused(f"{path} is a JSON {type(manifest).__name__}, but must be an object")
    if manifest.get("format") != FORMAT:
        raise Refused(f"{path} has format {manifest.get('format')!r}, but must have {FORMAT}")
    if manifest.get("manifest_sha256") != _digest(manifest):
        raise Refused(f"{path} is damaged: its SHA-256 is not the one it contains")
    files = manifest.get("files")
    _refuse_other_files(path, files)
    if not isinstance(manifest.get("facts"), dict):
        raise Refused(f"{path} has no facts, but must have some")
    return manifest


def _refuse_other_files(path: Path, files: Any) -> None:
    """Refuse a manifest that does not list exactly `FILES`, so that no name can point outside the folder."""
    names = files.keys() if isinstance(files, dict) else set()
    for name in names - set(FILES):
        raise Refused(f"{path} lists the file {name!r}, but must list {', '.join(FILES)} only")
    for name in FILES:
        entry = files.get(name) if isinstance(files, dict) else None
        if not isinstance(entry, dict) or not {"bytes", "sha256"} <= entry.keys():
            raise Refused(f"{path} lists no size and SHA-256 of {name}, but must do so")


def _read(path: Path, size: int | None = None) -> bytes:
    """The bytes of a file, whose size must be `size` (None: at most `LARGEST_MANIFEST`)."""
    try:
        found = path.stat().st_size
        if size is not None and found != size:
            raise Refused(f"{path} is damaged: it has {found} bytes, but must have {size}")
        refuse_unless(size is not None or found <= LARGEST_MANIFEST, f"the size of {path}", found, "at most 64 MiB")
        return path.read_bytes()
    except FileNotFoundError:
        raise Refused(f"{path} is missing") from None
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}") from None


def _tensors(path: Path, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    data = _read(path, entry["bytes"])
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise Refused(f"{path} is damaged: its SHA-256 is not that of the manifest")
    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:
        raise Refused(f"{path} is not a safetensors file: {error}") from None

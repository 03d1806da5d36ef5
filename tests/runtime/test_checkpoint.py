"""Checkpoints on disk: what was saved comes back, all damage is refused by name, a kill leaves the last good one."""

import json
import subprocess
import sys

import pytest
import torch

from manyhands.core.errors import Refused
from manyhands.runtime import checkpoint
from manyhands.runtime.checkpoint import FILES, MANIFEST, load_checkpoint, save_checkpoint

FACTS = {"task": "toy", "strategy": "Sgd(lr=η)", "seed": 3, "positions": [4, None]}


def tensors(step):
    """Some of every kind; the step tells checkpoints apart."""
    table = torch.arange(12.0).view(3, 4)
    weights = {"w": torch.full((2, 3), float(step)), "b": table.T, "half": table[1].to(torch.bfloat16)}
    buffers = {"seen": torch.tensor(step), "mean": torch.randn(3, dtype=torch.float64)}
    return weights, buffers, {"rule/w/m": torch.empty(0), "rule/w/:updates": torch.tensor(7), "flags": table > 3}


def save(folder, step, **knobs):
    return save_checkpoint(folder, step, FACTS, *tensors(step), **knobs)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def sealed(path, change):
    """Change the manifest of a checkpoint, with a matching checksum."""
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    change(manifest)
    manifest["manifest_sha256"] = checkpoint._digest(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


# -- there and back ---------------------------------------------------------------------------------


def test_what_was_saved_comes_back_to_the_last_bit(tmp_path):
    weights, buffers, state = tensors(5)
    path = save_checkpoint(tmp_path / "new" / "folder", 5, FACTS, weights, buffers, state)
    assert path.name == "step-00000005"
    loaded = load_checkpoint(path)
    assert loaded.path == path
    assert loaded.facts == {**FACTS, "step": 5}
    for given, found in ((weights, loaded.weights), (buffers, loaded.buffers), (state, loaded.state)):
        assert given.keys() == found.keys()
        for name, x in given.items():
            assert found[name].dtype == x.dtype and found[name].shape == x.shape and torch.equal(found[name], x)


def test_tensors_that_share_memory_are_saved_each_by_itself(tmp_path):
    x = torch.arange(6.0)
    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, {}, {"whole": x, "part": x[2:4], "same": x}, {}, {}))
    assert torch.equal(loaded.weights["part"], x[2:4]) and torch.equal(loaded.weights["same"], x)
    assert loaded.buffers == {} and loaded.state == {}


def test_facts_may_have_numbers_for_keys(tmp_path):
    save_checkpoint(tmp_path, 1, {"of": {2: "b", 10: "a"}, "step": 9}, {}, {}, {})
    assert load_checkpoint(tmp_path).facts == {"of": {"2": "b", "10": "a"}, "step": 1}


def test_the_manifest_lists_every_file_and_hashes_itself(tmp_path):
    path = save(tmp_path, 5)
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    assert names(path) == sorted([*FILES, MANIFEST])
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == {
        name: (path / name).stat().st_size for name in FILES
    }
    assert len({entry["sha256"] for entry in manifest["files"].values()} | {manifest["manifest_sha256"]}) == 4


def test_the_newest_of_a_folder_is_loaded_by_number_not_by_name(tmp_path):
    for step in (99999999, 100000000):
        save(tmp_path, step)
    assert load_checkpoint(tmp_path).facts["step"] == 100000000
    assert load_checkpoint(tmp_path / "step-99999999").facts["step"] == 99999999


def test_the_newest_two_are_kept_or_as_many_as_asked_for(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-00000020", "step-00000030"]
    save(tmp_path, 40, keep=3)
    assert names(tmp_path) == ["step-00000020", "step-00000030", "step-00000040"]
    save(tmp_path, 50, keep=1)
    assert names(tmp_path) == ["step-00000050"]


def test_a_run_that_went_back_replaces_the_future_it_gave_up(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, keep=3)
    save_checkpoint(tmp_path, 20, {"again": True}, *tensors(20))
    assert names(tmp_path) == ["step-00000010", "step-00000020"]
    assert load_checkpoint(tmp_path).facts["again"]


def test_leftovers_of_a_killed_save_are_ignored_and_then_removed(tmp_path):
    save(tmp_path, 1)
    leftover = tmp_path / ".step-00000002.partial-123"
    (tmp_path / "step-00000001").rename(leftover)
    with pytest.raises(Refused, match="holds no checkpoint"):
        load_checkpoint(tmp_path)
    save(tmp_path, 1)
    assert names(tmp_path) == ["step-00000001"]


def test_wrong_numbers_are_refused(tmp_path):
    with pytest.raises(Refused, match="keep is 0, but must be >= 1"):
        save(tmp_path, 1, keep=0)
    with pytest.raises(Refused, match="step is -1, but must be >= 0"):
        save(tmp_path, -1)
    assert names(tmp_path) == []


# -- damage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_flipped_bit_anywhere_is_refused(tmp_path, name):
    path = save(tmp_path, 5)
    data = (path / name).read_bytes()
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        (path / name).write_bytes(damaged)
        with pytest.raises(Refused, match=name):
            load_checkpoint(path)
    (path / name).write_bytes(data)
    load_checkpoint(path)


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("left", [0, 1, -1], ids=["empty", "one byte", "all but one"])
def test_a_cut_file_is_refused(tmp_path, name, left):
    path = save(tmp_path, 5)
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[:left])
    with pytest.raises(
        Refused, match=f"{name} (is not JSON|is damaged: it has {len(data[:left])} bytes, but must have)"
    ):
        load_checkpoint(path)


@pytest.mark.parametrize("name", FILES)
def test_a_longer_or_missing_file_is_refused(tmp_path, name):
    path = save(tmp_path, 5)
    data = (path / name).read_bytes()
    (path / name).write_bytes(data + b"\0")
    with pytest.raises(Refused, match=f"{name} is damaged: it has {len(data) + 1} bytes, but must have {len(data)}"):
        load_checkpoint(path)
    (path / name).unlink()
    with pytest.raises(Refused, match=f"{name} is missing"):
        load_checkpoint(path)
    (path / name).mkdir()
    with pytest.raises(Refused, match=name):
        load_checkpoint(path)


def test_a_checkpoint_without_a_manifest_is_none(tmp_path):
    path = save(tmp_path, 5)
    (path / MANIFEST).unlink()
    with pytest.raises(Refused, match=r"step-00000005 has no manifest\.json"):
        load_checkpoint(path)
    with pytest.raises(Refused, match="holds no checkpoint"):
        load_checkpoint(tmp_path)
    with pytest.raises(Refused, match="nowhere holds no checkpoint"):
        load_checkpoint(tmp_path / "nowhere")


def test_a_file_of_another_checkpoint_is_refused(tmp_path):
    one, two = save(tmp_path, 5), save(tmp_path, 6)
    (two / FILES[0]).write_bytes((one / FILES[0]).read_bytes())
    with pytest.raises(Refused, match=r"weights\.safetensors is damaged: its SHA-256 is not that of the manifest"):
        load_checkpoint(two)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "more.safetensors", "state.safetensors/../x"])
def test_a_listed_file_that_is_not_ours_is_refused(tmp_path, name):
    path = save(tmp_path, 5)
    sealed(path, lambda manifest: manifest["files"].update({name: manifest["files"][FILES[0]]}))
    with pytest.raises(Refused, match=f"lists the file '{name}', but must list"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format=2), r"manifest\.json has format 2, but must have 1"),
        (lambda m: m.pop("format"), "has format None"),
        (lambda m: m.pop("facts"), "has no facts"),
        (lambda m: m.pop("files"), r"lists no size and SHA-256 of weights\.safetensors"),
        (lambda m: m.update(files=[]), "lists no size and SHA-256 of weights"),
        (lambda m: m["files"].pop(FILES[2]), "lists no size and SHA-256 of state"),
        (lambda m: m["files"][FILES[1]].pop("sha256"), "lists no size and SHA-256 of buffers"),
    ],
)
def test_a_manifest_that_does_not_say_what_it_must_is_refused(tmp_path, change, message):
    path = save(tmp_path, 5)
    sealed(path, change)
    with pytest.raises(Refused, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", "null", "[" * 100000, '{"format": NaN'])
def test_bad_json_is_refused(tmp_path, text):
    path = save(tmp_path, 5)
    (path / MANIFEST).write_text(text)
    with pytest.raises(Refused, match=r"manifest\.json is (not JSON|a JSON \w+, but must be an object)"):
        load_checkpoint(path)


def test_a_pickle_is_refused_even_if_the_manifest_vouches_for_it(tmp_path):
    path = save(tmp_path, 5)
    torch.save({"w": torch.zeros(2)}, path / FILES[0])
    data = (path / FILES[0]).read_bytes()
    entry = {"bytes": len(data), "sha256": checkpoint.hashlib.sha256(data).hexdigest()}
    sealed(path, lambda manifest: manifest["files"].update({FILES[0]: entry}))
    with pytest.raises(Refused, match=r"weights\.safetensors is not a safetensors file"):
        load_checkpoint(path)


def test_a_damaged_newest_is_named_and_so_is_the_last_good_one(tmp_path):
    paths = [save(tmp_path, step, keep=3) for step in (1, 2, 3)]
    for path in paths[1:]:
        (path / FILES[2]).unlink()
    with pytest.raises(Refused) as caught:
        load_checkpoint(tmp_path)
    assert str(caught.value) == f"{paths[2] / FILES[2]} is missing; {paths[0]} is good"
    (paths[0] / FILES[2]).unlink()
    with pytest.raises(Refused, match=r"state\.safetensors is missing; there is no other good one"):
        load_checkpoint(tmp_path)


# -- killed -----------------------------------------------------------------------------------------

KILLED = """
import os, shutil, signal, sys
import torch
from manyhands.runtime.checkpoint import save_checkpoint

folder, first, second = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def save(step, value):
    weights = {"w": torch.full((1000,), float(value))}
    save_checkpoint(folder, step, {"value": value}, weights, {}, {}, keep=1)

def deadly(module, name, countdown):
    real = getattr(module, name)
    def call(*arguments, **knobs):
        countdown[0] -= 1
        if countdown[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **knobs)
        countdown[0] -= 1
        if countdown[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(module, name, call)

moment = 0
while True:
    moment += 1
    shutil.rmtree(folder, ignore_errors=True)
    save(first, 1)
    child = os.fork()
    if not child:
        countdown = [moment]
        for module, name in ((os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "unlink"), (os, "rmdir")):
            deadly(module, name, countdown)
        save(second, 2)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    shutil.copytree(folder, f"{folder}-{moment}")
print(moment - 1)
"""


@pytest.mark.parametrize("second", [8, 7], ids=["another step", "the same step again"])
def test_killed_at_any_moment_of_a_save_the_last_good_one_loads(tmp_path, second):
    folder = tmp_path / "killed"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), "7", str(second)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    moments, values = int(done.stdout), []
    assert moments >= 16, "before and after each sync and rename"
    for moment in range(1, moments + 1):
        left = tmp_path / f"killed-{moment}"
        loaded = load_checkpoint(left)
        values.append(loaded.facts["value"])
        assert torch.equal(loaded.weights["w"], torch.full((1000,), float(values[-1])))
        save(left, 9, keep=1)
        assert names(left) == ["step-00000009"], "the next save removes what was left"
    assert values == sorted(values) and {1, 2} == set(values), "first the old one, then the new one"

"""A rank keeps the memory that a step frees; counted in page faults, in processes of their own."""

import os
import subprocess
import sys

import pytest

FAULTS_PER_STEP = """
import resource, sys
import torch
from manyhands.runtime.launch.allocator import keep_freed_memory

print(keep_freed_memory() if sys.argv[1] == "kept" else False)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for step in range(20):
    if step == 10:
        before = faults()
    gradients = [torch.zeros(2**20) for _ in range(8)]  # 4 MiB each
    del gradients
print((faults() - before) // 10)
"""
PAGES_PER_STEP = 8 * 4 * 2**20 // os.sysconf("SC_PAGE_SIZE")


def in_process(how, **environment):
    plain = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", FAULTS_PER_STEP, how]
    done = subprocess.run(command, env={**plain, **environment}, capture_output=True, text=True, timeout=60, check=True)
    said, faults = done.stdout.split()
    return said == "True", int(faults)


def test_freed_memory_is_used_again_without_page_faults():
    in_force, faults = in_process("kept")
    assert in_force
    assert faults < PAGES_PER_STEP / 20


@pytest.mark.parametrize(
    "settings", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}]
)
def test_the_settings_of_the_user_stay_in_force(settings):
    in_force, faults = in_process("kept", **settings)
    assert not in_force
    assert faults > PAGES_PER_STEP / 2


def test_page_faults_are_what_it_saves():
    _, faults = in_process("as it is")
    assert faults > PAGES_PER_STEP / 2

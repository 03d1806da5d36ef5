"""Two hosts: two network namespaces joined by a virtual cable, one torchrun in each."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("two_hosts.py")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = "29571"


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts():
    """The names of two namespaces that reach each other and nobody else."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command: two hosts were not tested")
    names = [f"mh{os.getpid()}{letter}" for letter in "ab"]
    with ExitStack() as stack:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made here ({error.stderr.decode().strip()})")
            stack.callback(ip, "netns", "del", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names


def torchrun(host, number, method):
    words = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"]
    words += ["--master-addr", ADDRESSES[0], "--master-port", PORT, str(SCRIPT), method]
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(150)
@pytest.mark.parametrize("method", ["ssp", "pipedream"])
def test_a_script_trains_across_two_hosts_under_torchrun(hosts, method):
    nodes = [torchrun(host, number, method) for number, host in enumerate(hosts)]
    try:
        told = [node.communicate(timeout=120) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], told
    outcome = json.loads(told[0][0])
    assert outcome["accuracy"] >= 0.93
    assert outcome["hosts"] == [0, 1]
    assert outcome["sent"] > 1_000_000
    assert told[1][0] == "", "only the lead speaks"

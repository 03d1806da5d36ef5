"""Cluster files: an error in one is refused with the file and the line, and the examples can be trained in."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.core.errors import Refused
from manyhands.tasks import load
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.cluster_file import FAULTS, OF_FAULTS, SETTINGS, TABLES, line_of

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "clusters").glob("*.toml"))


def refusal(folder, text):
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(Refused) as caught:
        Cluster.from_file(path)
    return str(caught.value).replace(f"{folder}/", "")


def test_every_setting_of_a_cluster_and_of_a_fault_has_a_type():
    assert {*SETTINGS, *TABLES} == {field.name for field in fields(Cluster)}
    assert set(OF_FAULTS) == {field.name for fault in FAULTS.values() for field in fields(fault)}


BAD_VALUES = {
    "bandwidth = '10Gbits'": "bandwidth is '10Gbits', but must be a rate such as 10Gbit or 1.25GB",
    "bandwidth = '-1Gbit'": "bandwidth is '-1Gbit', but must be a rate such as 10Gbit or 1.25GB",
    "bandwidth = -5": "bandwidth is -5, but must be a rate such as 10Gbit or 1.25GB",
    "bandwidth = 0": "bandwidth is 0, but must be > 0",
    "local_bandwidth = true": "local_bandwidth is True, but must be a rate such as 10Gbit or 1.25GB",
    "latency = '50'\nlocal_latency = 'soon'": "local_latency is 'soon', but must be a time such as 50us or 2ms",
    "latency = [1]": "latency is [1], but must be a time such as 50us or 2ms",
    "workers = 0": "workers is 0, but must be >= 1",
    "workers = 'four'": "workers is 'four', but must be a whole number",
    "workers = 4.0": "workers is 4.0, but must be a whole number",
    "servers = true": "servers is True, but must be a whole number",
    "workers = 2\nhosts = 3": "hosts is 3, but must be 1 to 2",
    "jitter = '10%'": "jitter is '10%', but must be a number",
    "jitter = -1": "jitter is -1, but must be >= 0",
    "workers = 2\nspeeds = [1.0]": "the number of speeds is 1, but must be 2",
    "workers = 1\nspeeds = ['fast']": "one of speeds is 'fast', but must be a number",
    "workers = 1\nspeeds = 2": "speeds is 2, but must be a list of numbers",
    "workers = 1\nspeeds = [0]": "speeds is [0], but must be all > 0",
    "newcomers = [1, '2 moons']": "one of newcomers is '2 moons', but must be a time such as 50us or 2ms",
    "order = [0, 9]": "a rank in order is 9, but must be 0 to 3",
    "order = [0]\nturns = [4]": "a rank in turns is 4, but must be 0 to 3",
    "worker = 4": "there is no setting 'worker': did you mean workers or order?",
    "\n[speed]": "there is no setting 'speed': did you mean speeds?",
    "faults = 3": "faults is 3, but must be tables: [[faults]]",
    "faults = [3]": "one of faults is 3, but must be a table",
    "faults = [{kind = 'explode'}]": "the kind of a fault is 'explode', but must be die or stop or cut or slow-link or "
    "slow",
}


@pytest.mark.parametrize(("text", "words"), BAD_VALUES.items(), ids=BAD_VALUES)
def test_a_bad_value_is_refused_with_its_line(tmp_path, text, words):
    """It stands on the last line, behind a comment that looks like it."""
    before = f"# what follows is wrong\n#{text.splitlines()[-1]}\n\n"
    line = 3 + len(text.splitlines())
    assert refusal(tmp_path, f"{before}{text}\n") == f"cluster.toml:{line}: {words}"


TWO_FAULTS = """workers = 2

[[faults]]
kind = "die"
rank = 0

[[faults]]
kind = "slow-link"
"""
BAD_FAULTS = {
    "rank = 2": (9, "the rank of a fault or straggler is 2, but must be 0 to 1"),
    "rank = -1": (9, "the rank of a fault is -1, but must be >= 0"),
    "rank = [1]": (9, "rank is [1], but must be a whole number"),
    "rank = 1\nat = 'noon'": (10, "at is 'noon', but must be a time such as 50us or 2ms"),
    "rank = 1\nat = -3": (10, "at is -3, but must be a time such as 50us or 2ms"),
    "rank = 1\nfactor = 0": (10, "factor is 0, but must be > 0 and finite"),
    "rank = 1\nfactor = '3x'": (10, "factor is '3x', but must be a number"),
    "factor = 2": (7, "a fault of kind 'slow-link' has no rank, but must have one"),
    "rank = 1\nwhy = 'rain'": (
        10,
        "there is no setting of a fault of kind 'slow-link' 'why': known are rank, at, factor",
    ),
    "rank = 1\n[[stragglers]]\nranks = [0, 3]": (11, "the rank of a fault or straggler is 3, but must be 0 to 1"),
    "rank = 1\n[stragglers]\nranks = [-1]": (11, "ranks is [-1], but must be all >= 0"),
    "rank = 1\n[[stragglers]]\nkind = 'die'": (11, "the kind of a fault is 'die', but must be slow"),
    "rank = 1\n[[faults]]\nkind = 'dies'\nrank = 1": (
        11,
        "the kind of a fault is 'dies', but must be die or stop or cut or slow-link or slow",
    ),
}


@pytest.mark.parametrize(("text", "where"), BAD_FAULTS.items(), ids=BAD_FAULTS)
def test_a_bad_fault_is_refused_with_the_line_in_its_own_table(tmp_path, text, where):
    line, words = where
    assert refusal(tmp_path, TWO_FAULTS + text) == f"cluster.toml:{line}: {words}"


def test_what_is_no_toml_is_refused_with_its_line(tmp_path):
    assert refusal(tmp_path, "workers = 2\nservers =\n") == "cluster.toml:2: invalid value"
    assert refusal(tmp_path, 'workers = 2\nlatency = "1') == "cluster.toml:2: unterminated string"
    assert refusal(tmp_path, "workers = 2\nworkers = 3\n").startswith("cluster.toml:2: cannot overwrite")


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(Refused, match=r"^cannot read the cluster file .*none.toml: "):
        Cluster.from_file(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"workers = 4 # \xff")
    with pytest.raises(Refused, match=r"^cannot read the cluster file .*bytes.toml: "):
        Cluster.from_file(tmp_path / "bytes.toml")


def test_what_only_looks_like_a_key_is_none():
    text = '''# workers = 1
[[faults]]  # [[faults]]
why = """
workers = 2
[[faults]]
\\""" still """""
note = \'\'\'
workers = 3\'\'\'
ranks = [  # of
    0,
    [1], "]", # ]
]
"rank" = {workers = 4, x = "}"}

[[ faults ]]
a.b = 1 ; workers = 5
'''.replace(" ; workers = 5", "")
    assert tomllib.loads(text)
    assert [line_of(text, ("faults", 0, key)) for key in ("why", "note", "ranks", "rank")] == [3, 7, 9, 13]
    assert [line_of(text, ("faults", number)) for number in (0, 1)] == [2, 15]
    assert line_of(text, ("faults", 1, "a")) == 16
    assert line_of(text, ("faults", 1, "rank")) == 15, "it is nowhere: the line of its table"
    assert line_of(text, ("workers",)) == 1, "it is nowhere"


# -- the examples -------------------------------------------------------------------------------------


def test_there_are_examples():
    assert [path.stem for path in EXAMPLES] == ["box-8gpu", "internet-100", "rack-10gbe"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_says_what_it_stands_for_and_can_be_trained_in(path):
    assert path.read_text(encoding="utf-8").startswith("# ")
    cluster = Cluster.from_file(path)
    for method in (mh.bsp(collective="native"), mh.diloco(period=1), mh.ad_psgd()):
        result = mh.train(load("vgg16"), method, cluster=cluster, steps=2)
        assert result.seconds > 0
        assert sum("loss" in line for line in result.records) == 2 * cluster.workers


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_digits_are_trained_in_an_example(path):
    cluster = Cluster.from_file(path)
    result = mh.train("digits", mh.ad_psgd(), cluster=cluster, steps=240 // cluster.workers)
    assert re.fullmatch("[0-9a-f]{64}", result.weights_sha256)


def test_the_rack_has_one_straggler_and_the_box_fast_links():
    box, internet, rack = (Cluster.from_file(path) for path in EXAMPLES)
    (slow,) = rack.slow
    assert (rack.workers, len(slow.ranks)) == (8, 1)
    assert 3 <= slow.factor <= 5
    assert (box.workers, box.hosts) == (8, 1)
    assert (internet.workers, len(internet.speeds)) == (100, 100)

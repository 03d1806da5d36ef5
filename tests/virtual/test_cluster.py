"""Cluster: units, refusals that name the value and the bound, placement of ranks, and TOML files."""

import math
import re

import pytest

from manyhands.core.errors import Refused
from manyhands.core.units import bytes_per_second, seconds
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.faults import CutLink, Die, Slow, SlowLink, Stop

# -- units --------------------------------------------------------------------------------------------

RATES = {
    "10Gbit": 1.25e9,
    "1.25GB": 1.25e9,
    "1.25GB/s": 1.25e9,
    "100 Mbit/s": 12.5e6,
    "8bit": 1.0,
    "64kbit": 8e3,
    "3KB": 3e3,
    "2MB": 2e6,
    "1TB": 1e12,
    "7B": 7.0,
    "12": 12.0,
    "1e9": 1e9,
    "2.5e3kB": 2.5e6,
    "inf": math.inf,
    5: 5.0,
    2.5e9: 2.5e9,
    math.inf: math.inf,
}
TIMES = {
    "50us": 50e-6,
    "50µs": 50e-6,
    "2ms": 2e-3,
    "1.5 s": 1.5,
    "10ns": 10e-9,
    "2min": 120.0,
    "3": 3.0,
    "1e-3": 1e-3,
    "0": 0.0,
    7: 7.0,
    0.25: 0.25,
}


@pytest.mark.parametrize(("text", "value"), RATES.items(), ids=str)
def test_rates_the_way_people_write_them(text, value):
    assert bytes_per_second(text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(("text", "value"), TIMES.items(), ids=str)
def test_times_the_way_people_write_them(text, value):
    assert seconds(text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("text", ["10Gb", "fast", "", "-1GB", "1.2.3GB", "50us", "GB", -1, math.nan, "nan"], ids=str)
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(Refused, match=re.escape(f"x is {text!r}, but must be a rate such as 10Gbit or 1.25GB")):
        bytes_per_second(text, "x")


@pytest.mark.parametrize("text", ["50 lightyears", "", "-1s", "1..5s", "10Gbit", "us", -0.1, math.nan], ids=str)
def test_what_is_no_time_is_refused(text):
    with pytest.raises(Refused, match=re.escape(f"x is {text!r}, but must be a time such as 50us or 2ms")):
        seconds(text, "x")


# -- refusals -----------------------------------------------------------------------------------------

REFUSED = [
    ({"workers": 0}, "workers is 0, but must be >= 1"),
    ({"servers": -1}, "servers is -1, but must be >= 0"),
    ({"workers": 4, "hosts": 5}, "hosts is 5, but must be 1 to 4"),
    ({"workers": 4, "hosts": 0}, "hosts is 0, but must be 1 to 4"),
    ({"workers": 4, "hosts": -1}, "hosts is -1, but must be 1 to 4"),
    ({"cores": 0}, "cores is 0, but must be >= 1"),
    ({"cores": -2}, "cores is -2, but must be >= 1"),
    ({"jitter": -0.1}, "jitter is -0.1, but must be >= 0"),
    ({"jitter": math.nan}, "jitter is nan, but must be >= 0"),
    ({"cpu_per_byte": -1e-9}, "cpu_per_byte is -1e-09, but must be >= 0"),
    ({"workers": 2, "speeds": [1.0]}, "the number of speeds is 1, but must be 2"),
    ({"workers": 2, "speeds": [1.0, 0.0]}, "speeds is [1.0, 0.0], but must be all > 0"),
    ({"workers": 1, "speeds": [math.inf]}, "speeds is [inf], but must be all > 0"),
    ({"latency": "slow"}, "latency is 'slow', but must be a time such as 50us or 2ms"),
    ({"local_latency": -1}, "local_latency is -1, but must be a time such as 50us or 2ms"),
    ({"bandwidth": "10G"}, "bandwidth is '10G', but must be a rate such as 10Gbit or 1.25GB"),
    ({"bandwidth": 0}, "bandwidth is 0, but must be > 0"),
    ({"local_bandwidth": "0GB"}, "local_bandwidth is 0GB, but must be > 0"),
    ({"workers": 2, "faults": [Die(2)]}, "the rank of a fault or straggler is 2, but must be 0 to 1"),
    ({"workers": 2, "servers": 1, "faults": [Stop(3)]}, "the rank of a fault or straggler is 3, but must be 0 to 2"),
    ({"workers": 2, "stragglers": Slow([0, 2])}, "the rank of a fault or straggler is 2, but must be 0 to 1"),
    ({"workers": 2, "faults": [Slow([4])]}, "the rank of a fault or straggler is 4, but must be 0 to 1"),
    ({"workers": 2, "servers": 1, "order": [0, 2]}, "a rank in order is 2, but must be 0 to 1"),
    ({"workers": 2, "turns": [-1]}, "a rank in turns is -1, but must be 0 to 1"),
]


@pytest.mark.parametrize(("knobs", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_cannot_be_is_refused_with_the_value_and_the_bound(knobs, text):
    with pytest.raises(Refused) as caught:
        Cluster(**knobs)
    assert str(caught.value) == text


BAD_FAULTS = [
    (lambda: Die(-1), "the rank of a fault is -1, but must be >= 0"),
    (lambda: CutLink(0, at="later"), "the time of a fault is 'later', but must be a time such as 50us or 2ms"),
    (lambda: Stop(0, at=-1.0), "the time of a fault is -1.0, but must be a time such as 50us or 2ms"),
    (lambda: SlowLink(0, factor=0), "factor is 0, but must be "),
    (lambda: SlowLink(0, factor=math.inf), "factor is inf, but must be "),
    (lambda: Slow([0], factor=-2), "factor is -2, but must be "),
    (lambda: Slow([0, -1]), "ranks is [0, -1], but must be all >= 0"),
    (lambda: Slow([0], at="soon"), "the time of a fault is 'soon', but must be a time such as 50us or 2ms"),
]


@pytest.mark.parametrize(("make", "text"), BAD_FAULTS, ids=[text for _, text in BAD_FAULTS])
def test_what_cannot_happen_is_refused(make, text):
    with pytest.raises(Refused) as caught:
        make()
    assert str(caught.value).startswith(text)


# -- placement ----------------------------------------------------------------------------------------

PLACES = [
    ({"workers": 4}, [0, 1, 2, 3]),
    ({"workers": 4, "hosts": 1}, [0, 0, 0, 0]),
    ({"workers": 4, "hosts": 2}, [0, 0, 1, 1]),
    ({"workers": 5, "hosts": 2}, [0, 0, 0, 1, 1]),
    ({"workers": 7, "hosts": 3}, [0, 0, 0, 1, 1, 2, 2]),
    ({"workers": 2, "servers": 2}, [0, 1, 2, 3]),
    ({"workers": 4, "servers": 2, "hosts": 2}, [0, 0, 1, 1, 2, 3]),
    ({"workers": 3, "servers": 1, "hosts": 1}, [0, 0, 0, 1]),
]


@pytest.mark.parametrize(("knobs", "hosts"), PLACES, ids=str)
def test_workers_spread_evenly_and_servers_have_hosts_of_their_own(knobs, hosts):
    cluster = Cluster(**knobs)
    assert cluster.placement() == hosts
    assert cluster.size == len(hosts)


def test_on_one_host():
    cluster = Cluster(workers=3, servers=1, speeds=[1, 2, 3], latency="1ms")
    together = cluster.on_one_host()
    assert together.placement() == [0, 0, 0, 1]
    assert (together.speeds, together.latency, cluster.hosts) == ([1, 2, 3], "1ms", None)
    assert Cluster(workers=3, hosts=1).on_one_host().placement() == [0, 0, 0]
    with pytest.raises(Refused, match=r"^hosts is 2, but this method needs all workers on 1 host: they share memory$"):
        Cluster(workers=3, hosts=2).on_one_host()


def test_stragglers_are_one_or_several_and_may_be_faults():
    one, two = Slow([0]), Slow([1], factor=2.0)
    assert Cluster().slow == []
    assert Cluster(stragglers=one).slow == [one]
    assert Cluster(stragglers=[one, two]).slow == [one, two]
    assert Cluster(stragglers=one, faults=[Die(3), two]).slow == [one, two]


# -- files --------------------------------------------------------------------------------------------


def from_text(folder, text):
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return Cluster.from_file(path)


def test_a_cluster_from_a_file(tmp_path):
    text = """
        workers = 4
        servers = 1
        hosts = 2
        cores = 3
        speeds = [1.0, 2.0, 1.0, 0.5]
        jitter = 0.1
        latency = "2ms"
        bandwidth = "1Gbit"
        local_bandwidth = 8e9
        cpu_per_byte = 5e-10
        order = [0, 1]

        [[stragglers]]
        ranks = [1, 2]
        factor = 3.0
        at = "10s"

        [[faults]]
        kind = "die"
        rank = 0
        at = 1.5

        [[faults]]
        kind = "stop"
        rank = 1

        [[faults]]
        kind = "cut"
        rank = 4
        at = "2min"
        why = "the cable was unplugged"

        [[faults]]
        kind = "slow-link"
        rank = 3
        factor = 4

        [[faults]]
        kind = "slow"
        ranks = [0]
    """
    assert from_text(tmp_path, text) == Cluster(
        workers=4,
        servers=1,
        hosts=2,
        cores=3,
        speeds=[1.0, 2.0, 1.0, 0.5],
        jitter=0.1,
        latency="2ms",
        bandwidth="1Gbit",
        local_bandwidth=8e9,
        cpu_per_byte=5e-10,
        order=[0, 1],
        stragglers=[Slow([1, 2], factor=3.0, at="10s")],
        faults=[
            Die(0, at=1.5),
            Stop(1),
            CutLink(4, at="2min", why="the cable was unplugged"),
            SlowLink(3, factor=4),
            Slow([0]),
        ],
    )


def test_an_empty_file_is_the_default_cluster(tmp_path):
    assert from_text(tmp_path, "") == Cluster(stragglers=[], faults=[])


def test_one_straggler_may_be_one_table(tmp_path):
    assert from_text(tmp_path, "[stragglers]\nranks = [2]\n").slow == [Slow([2])]

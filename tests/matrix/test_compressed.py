"""Methods that send less learn as well as bsp: to within a point, in both worlds, on digits and on mnist."""

import functools

import pytest

import manyhands as mh
from every_method import METHODS, SAMPLES
from manyhands.core.method_index import methods
from manyhands.tasks import load

COMPRESSED = [name for name, method in methods().items() if method.family == "compressed"]
POINT = 0.01
EIGHT = mh.Cluster(workers=8)
NOISE = 3 / (1797 - SAMPLES)
"""What three of the few samples that digits is tested on are worth: another seed makes as much of a difference."""


@functools.cache
def bulk(task, epochs, **world):
    """What bsp comes to, on the average of two seeds."""
    return mean_accuracy("bsp", task, epochs, world or {"cluster": EIGHT})


def mean_accuracy(name, task, epochs, world):
    results = [mh.train(task, METHODS[name](), epochs=epochs, seed=seed, **world) for seed in range(2)]
    return sum(result.test_accuracy for result in results) / 2


@pytest.mark.parametrize("name", COMPRESSED)
def test_eight_virtual_workers_learn_digits_as_well(name):
    found = mean_accuracy(name, "digits", 40, {"cluster": EIGHT})
    assert found >= bulk("digits", 40) - POINT - NOISE


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.usefixtures("quickly")
def test_two_processes_learn_digits_as_well(name):
    found = mean_accuracy(name, "digits", 40, {"workers": 2, "link": "tcp"})
    assert found >= bulk("digits", 40, workers=2) - POINT - NOISE


@pytest.mark.parametrize("name", COMPRESSED)
def test_eight_virtual_workers_learn_mnist_as_well(name, data_dir):
    task = load("mnist", data_dir / "mnist")
    found = mh.train(task, METHODS[name](), cluster=EIGHT, epochs=2).test_accuracy
    assert found >= mh.train(task, METHODS["bsp"](), cluster=EIGHT, epochs=2).test_accuracy - POINT


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.usefixtures("quickly")
def test_two_processes_learn_mnist_as_well(name, data_dir):
    task = load("mnist", data_dir / "mnist")
    found = mh.train(task, METHODS[name](), workers=2, epochs=1).test_accuracy
    assert found >= mh.train(task, METHODS["bsp"](), workers=2, epochs=1).test_accuracy - POINT

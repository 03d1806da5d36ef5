"""Every method learns the bundled digits with its default settings, in a virtual cluster of four."""

import pytest

import manyhands as mh
from manyhands.codecs import Half
from manyhands.tasks import load

from .small import METHODS


@pytest.fixture(scope="module")
def digits():
    return load("digits")


@pytest.mark.parametrize("method", METHODS)
def test_digits_are_learned_within_forty_passes(digits, method):
    result = mh.train(digits, METHODS[method](), cluster=mh.Cluster(workers=4))
    assert result.test_accuracy >= 0.93, f"{method} reached only {result.test_accuracy:.3f}"
    assert result.final_loss < 0.1
    replicas = 1 if method in ("gpipe", "pipedream") else 4
    passes = result.samples / len(digits.data)
    assert 40 - 32 * replicas / len(digits.data) < passes <= 40, "one step more would be too many"


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_spring_in_half_precision_will_do(digits, kind):
    result = mh.train(digits, mh.easgd(asynchronous=True, codec=Half(kind)), cluster=mh.Cluster(workers=4), epochs=20)
    assert result.test_accuracy >= 0.93, f"{kind} reached only {result.test_accuracy:.3f}"


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_half_of_them_would_do_whatever_the_seed(digits, method, seed):
    result = mh.train(digits, METHODS[method](), cluster=mh.Cluster(workers=4), seed=seed, epochs=20)
    assert result.test_accuracy >= 0.93, f"{method} with seed {seed} reached only {result.test_accuracy:.3f}"

"""Some methods learn the bundled digits with default settings, in a virtual cluster of four.

All of them do, with eight workers, with other seeds and among real processes: tests/matrix/.
"""

import pytest

import manyhands as mh
from every_method import BATCH_SIZE, EVERY, GOOD, SAMPLES, replicas


@pytest.mark.parametrize("name", ["ssp", "diloco", "easgd in fp16", "pipedream"])
def test_digits_are_learned_within_forty_passes(name):
    strategy = EVERY[name]()
    result = mh.train("digits", strategy, cluster=mh.Cluster(workers=4))
    assert result.test_accuracy >= GOOD, f"{name} reached only {result.test_accuracy:.3f}"
    assert result.final_loss < 0.1
    step = BATCH_SIZE * replicas(strategy, 4)
    assert 40 - step / SAMPLES < result.samples / SAMPLES <= 40, "one step more would be too many"

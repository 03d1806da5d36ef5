"""Which server keeps what: the loads of VGG-16, pinned."""

import pytest

from manyhands.core.errors import Refused
from manyhands.core.flat import Flat
from manyhands.core.sharding import by_layer, by_size, cut, in_turn
from manyhands.rules import Sgd
from manyhands.tasks import load

TOTAL, LARGEST = 138_357_544, 102_764_544


@pytest.fixture(scope="module")
def vgg16():
    return Flat(dict(load("vgg16").build(0).named_parameters()))


def loads(shards):
    return [sum(span.numel for span in spans) for spans in shards]


@pytest.mark.parametrize(("servers", "ratio"), [(1, 1.0), (2, 1.4855), (4, 2.9710)])
def test_by_layer_the_largest_layer_decides(vgg16, servers, ratio):
    kept = loads(by_layer(vgg16, servers))
    assert sum(kept) == TOTAL
    assert max(kept) == (TOTAL if servers == 1 else LARGEST)
    assert max(kept) / (TOTAL / servers) == pytest.approx(ratio, abs=5e-5)


@pytest.mark.parametrize(("servers", "ratio"), [(1, 1.0), (2, 1.6412), (4, 3.0573)])
def test_in_turn_the_largest_layer_has_company(vgg16, servers, ratio):
    kept = loads(in_turn(vgg16, servers))
    assert sum(kept) == TOTAL
    assert max(kept) / (TOTAL / servers) == pytest.approx(ratio, abs=5e-5)


@pytest.mark.parametrize(("servers", "largest"), [(2, 69_178_772), (4, 34_589_386)])
def test_by_size_the_load_is_even(vgg16, servers, largest):
    assert loads(by_size(vgg16, servers)) == [largest] * servers


@pytest.mark.parametrize("servers", [3, 7, 1000])
def test_by_size_is_uneven_by_one_element_at_most(vgg16, servers):
    kept = loads(by_size(vgg16, servers))
    assert sum(kept) == TOTAL
    assert max(kept) - min(kept) <= 1


def test_too_many_servers_are_refused(vgg16):
    with pytest.raises(Refused, match="servers is 17, but must be <= 16, the number of layers"):
        by_layer(vgg16, 17)
    with pytest.raises(Refused, match="servers is 17, but must be <= 16, the number of layers"):
        in_turn(vgg16, 17)
    with pytest.raises(Refused, match=f"servers is {TOTAL + 1}, but must be <= {TOTAL}"):
        by_size(vgg16, TOTAL + 1)
    assert len(cut(vgg16, "layer", 17, Sgd(0.1), at_most=True)) == 16

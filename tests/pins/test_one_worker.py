"""One worker is plain SGD, whatever the method; with Hogwild! and HogBatch to the last bit."""

import pytest
import torch

import manyhands as mh
from manyhands.rules import Sgd
from manyhands.splits.data import Share

LR = 0.1
METHODS = {
    "bsp": mh.bsp(lr=LR),
    "bsp-server": mh.bsp_server(lr=LR),
    "ssp": mh.ssp(lr=LR),
    "downpour": mh.downpour(rule=Sgd(LR)),
    "downpour without prefetch": mh.downpour(rule=Sgd(LR), prefetch=False),
    "ad-psgd": mh.ad_psgd(lr=LR),
    "d-psgd": mh.d_psgd(lr=LR),
    "gossip": mh.gossip(lr=LR),
    "hogwild": mh.hogwild(lr=LR),
    "hogbatch": mh.hogbatch(lr=LR),
    "gpipe": mh.gpipe(lr=LR, micro_batches=1),
    "pipedream": mh.pipedream(lr=LR),
}


@pytest.mark.parametrize("method", METHODS)
def test_one_worker_is_plain_sgd(digits64, plain_sgd, method):
    share = Share(digits64.data, 0, 1, 32, seed=3)
    reference = plain_sgd(digits64, [share.next_batch() for _ in range(6)], LR, seed=3)
    result = mh.train(digits64, METHODS[method], cluster=mh.Cluster(workers=1), steps=6, seed=3)
    assert list(result.weights) == list(reference)
    for name, w in reference.items():
        assert torch.allclose(result.weights[name], w, rtol=0, atol=1e-13)


@pytest.mark.parametrize("method", [mh.hogwild, mh.hogbatch])
def test_one_lock_free_worker_is_sequential_bit_for_bit(digits64, plain_sgd, method):
    share = Share(digits64.data, 0, 1, 32, seed=0)
    reference = plain_sgd(digits64, [share.next_batch() for _ in range(6)], LR)
    result = mh.train(digits64, method(lr=LR), cluster=mh.Cluster(workers=1), steps=6)
    assert all(torch.equal(result.weights[name], w) for name, w in reference.items())

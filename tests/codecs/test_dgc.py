"""Deep gradient compression: SGD with momentum if everything is sent, masking, clipping, and the memory."""

import math

import pytest
import torch

from manyhands.codecs import Dgc, SampledTopK, TopK

GRADIENTS = [1.0, 0.5, -0.2, 0.3]


def run(codec, gradients, lr=0.1, w=1.0):
    x = torch.tensor([w], dtype=torch.float64)
    memory, out = codec.memory(x), torch.empty_like(x)
    for g in gradients:
        codec.decode(codec.encode(torch.tensor([g], dtype=torch.float64), memory), out)
        x -= lr * out
    return x.item()


def test_everything_without_masking_is_momentum():
    u, w = 0.0, 1.0
    for g in GRADIENTS:
        u = 0.9 * u + g
        w -= 0.1 * u
    assert run(Dgc(TopK(1.0), masking=False), GRADIENTS) == pytest.approx(w) == pytest.approx(0.5286)


def test_everything_with_masking_is_plain():
    assert run(Dgc(TopK(1.0)), GRADIENTS) == pytest.approx(1 - 0.1 * sum(GRADIENTS)) == pytest.approx(0.84)


def test_everything_of_nesterov_is_nesterov():
    p = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9, nesterov=True)
    for g in GRADIENTS:
        p.grad = torch.full_like(p, g)
        optimizer.step()
    assert run(Dgc(TopK(1.0), nesterov=True, masking=False), GRADIENTS) == pytest.approx(p.item())


def test_by_hand():
    codec = Dgc(TopK(0.5), momentum=0.5)
    memory = codec.memory(torch.zeros(2))
    sent = [tuple(part.item() for part in codec.encode(torch.tensor(g), memory)) for g in ([2.0, 1.0], [0.0, 1.0])]
    assert sent == [(0, 2.0), (1, 2.5)], "1, and 1 again with half of the first as momentum"
    assert memory.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(("masking", "u"), [(True, 0.0), (False, 2.0)])
def test_masking_ends_a_momentum(masking, u):
    codec = Dgc(TopK(0.5), masking=masking)
    memory = codec.memory(torch.zeros(2))
    codec.encode(torch.tensor([2.0, 1.0]), memory)
    assert memory.tolist() == [[0, 1], [u, 1]], "v, then u"


def test_without_momentum_nothing_is_lost():
    generator = torch.Generator().manual_seed(0)
    codec, inputs = Dgc(TopK(0.1), momentum=0.0), torch.randn(20, 100, generator=generator, dtype=torch.float64)
    memory, sent = codec.memory(inputs[0]), torch.zeros(100, dtype=torch.float64)
    for x in inputs:
        out = torch.empty_like(x)
        codec.decode(codec.encode(x, memory), out)
        sent += out
    torch.testing.assert_close(sent + memory[0], inputs.sum(0), rtol=0, atol=1e-12)


def test_a_velocity_is_sent_or_kept():
    """Whatever is masked, v holds the sum of all u since a number was sent last."""
    generator = torch.Generator().manual_seed(0)
    for masking in True, False:
        codec = Dgc(TopK(0.2), masking=masking)
        memory = codec.memory(torch.zeros(30, dtype=torch.float64))
        total, sent = torch.zeros(30, dtype=torch.float64), torch.zeros(30, dtype=torch.float64)
        for _ in range(15):
            x, before = torch.randn(30, generator=generator, dtype=torch.float64), memory[1].clone()
            total += 0.9 * before + x
            out = torch.empty_like(x)
            codec.decode(codec.encode(x, memory), out)
            sent += out
        torch.testing.assert_close(sent + memory[0], total, rtol=0, atol=1e-12)


def test_a_gradient_is_clipped_before_it_is_added():
    x = torch.tensor([3.0, 4.0])
    for clip, length in (0.0, 5.0), (1.0, 1.0), (9.0, 5.0):
        codec = Dgc(TopK(1.0), clip=clip)
        _, values = codec.encode(x, codec.memory(x))
        assert values.norm().item() == pytest.approx(length)
        assert values[1] / values[0] == pytest.approx(4 / 3)
    assert x.tolist() == [3, 4]


def test_a_sampled_codec_will_do():
    codec, x = Dgc(SampledTopK(0.1)), torch.randn(1000)
    memory = codec.memory(x)
    indices, _ = codec.encode(x, memory)
    assert not memory[:, indices.long()].any()
    assert math.isclose(memory[0].count_nonzero(), 1000 - len(indices), abs_tol=1)

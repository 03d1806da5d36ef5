"""Pipelines that stream, of models that are no chains of layers; and models that are given as a list of stages."""

from bisect import bisect_right

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

import manyhands as mh
from branched_models import WORDS, Gpt, UNet
from manyhands.rules import Momentum, Sgd
from manyhands.run.methods import strategy_of
from manyhands.splits.data import Share
from manyhands.tasks import load
from repeats import diagonals

from . import small
from .test_cut_teams import difference, images, task, words
from .test_own_loop import Joined, same
from .test_streams import EVERY as STREAMS
from .test_streams import REWRITES

EVERY = {name: make for name, make in STREAMS.items() if name != "dni with predicted inputs"}
"""That predicts one activation from floating-point data; here skip connections travel, and data are words."""
every = pytest.mark.parametrize("method", EVERY)


def loss_of_words(logits, targets):
    return cross_entropy(logits.reshape(-1, WORDS), targets.flatten())


class Embedded(nn.Module):
    """What the GPT does before its blocks."""

    def __init__(self, gpt):
        super().__init__()
        self.words, self.places = gpt.words, gpt.places

    def forward(self, words):
        return self.words(words) + self.places(torch.arange(words.shape[1]))


def chain():
    """The layers of the GPT, with the same weights."""
    gpt = Gpt(rate=0.2)
    return nn.Sequential(Embedded(gpt), *gpt.h, gpt.norm, gpt.head)


def named_as_in_chain(name):
    before = {"words": "0.words", "places": "0.places", "norm": "5", "head": "6"}
    first, _, rest = name.partition(".")
    block, _, inside = rest.partition(".")
    return f"{1 + int(block)}.{inside}" if first == "h" else f"{before[first]}.{rest}"


def run(data, method, workers=3, steps=9, **knobs):
    strategy = EVERY[method](rule=Momentum(0.05, 0.5), **knobs)
    return mh.train(data, strategy, cluster=mh.Cluster(workers), steps=steps, batch_size=8)


@every
def test_a_gpt_is_trained_as_the_chain_of_its_layers_is(method):
    """To the last bit, with dropout: versions of the weights, replays and messages are the same."""
    gpt = task(lambda: Gpt(rate=0.2), words(80), loss_of_words)
    cut = run(gpt, method, cut="h.1, h.3")
    layers = run(task(chain, words(80), loss_of_words), method, cut="2 4")
    plain = run(task(chain, words(80), loss_of_words), method)
    for name, x in cut.weights.items():
        assert torch.equal(x, layers.weights[named_as_in_chain(name)]), name
    assert difference(layers, plain) == 0, "the layers are divided at the same places"


@pytest.mark.parametrize(("method", "model"), diagonals(3, EVERY, ["gpt, loss inside", "u-net", "resnet"]))
def test_every_method_trains_every_model(method, model):
    data = {
        "gpt, loss inside": task(Gpt, words(), None),
        "u-net": task(UNet, images()),
        "resnet": load("resnet-small"),
    }[model]
    short, long = (run(data, method, workers=2, steps=steps) for steps in (2, 40))
    assert long.final_loss < short.final_loss


class FixedUNet(UNet):
    """BatchNorm computes with running statistics, which do not move."""

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


@pytest.mark.parametrize("cut", [["middle"], ["norm", "up"]], ids=["2 stages", "3 stages"])
def test_pipedream_of_a_u_net_is_descent_with_delayed_gradients(cut):
    """w_s(t+1) = w_s(t) - eta grad_s f(w_0(t-K+1), ..., w_(K-1)(t)), with skips over one cut and over two."""
    data, stages, lr, steps = task(lambda: FixedUNet().train(), images(80)), len(cut) + 1, 0.1, 7
    found = mh.train(data, mh.pipedream(lr, cut=cut), cluster=mh.Cluster(stages), steps=steps)
    share, model = Share(data.data, 0, 1, data.batch_size, seed=0), data.build(0)
    order = ["first", "down", "middle", "norm", "up", "last", "classify"]
    begins = [order.index(name) for name in cut]
    delay = {name: stages - 1 - bisect_right(begins, order.index(name.partition(".")[0])) for name in found.weights}
    history = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    for t in range(steps):
        seen = {name: history[max(0, t - by)][name].clone().requires_grad_() for name, by in delay.items()}
        *inputs, target = share.next_batch()
        loss = cross_entropy(torch.func.functional_call(model, seen, tuple(inputs)), target)
        moves = dict(zip(seen, torch.autograd.grad(loss, list(seen.values())), strict=True))
        history.append({name: x - lr * moves[name] for name, x in history[-1].items()})
    assert all(torch.allclose(found.weights[name], x, rtol=0, atol=1e-12) for name, x in history[-1].items())


@pytest.mark.parametrize("method", EVERY)
def test_a_run_is_resumed_with_a_cut_model(method, tmp_path):
    data, knobs = task(Gpt, words(80), None), {"cluster": mh.Cluster(2), "batch_size": 8}
    whole = mh.train(data, EVERY[method](), steps=9, out=tmp_path / "whole", checkpoint_every=5, **knobs)
    mh.train(data, EVERY[method](), steps=5, out=tmp_path / "part", checkpoint_every=5, **knobs)
    again = mh.train(data, EVERY[method](), steps=9, resume=tmp_path / "part", out=tmp_path / "2", **knobs)
    assert difference(whole, again) == 0


@every
def test_a_loop_of_ones_own_gives_an_example(method):
    def program(hands, losses):
        for _ in range(6):
            losses.append(hands.step(torch.randn(8, 1, 8, 8), torch.arange(8)))

    joined = Joined(EVERY[method](), program, mh.Cluster(2), UNet, cross_entropy, example=(torch.randn(2, 1, 8, 8),))
    assert same(joined.models) and len(joined.ranks[0]["losses"]) == 6
    with pytest.raises(mh.Refused, match=r"is cut by running it: give inputs for a few samples, mh\.join\(example="):
        Joined(EVERY[method](), program, mh.Cluster(2), UNet, cross_entropy)


class Wide(nn.Module):
    """Equal layers with a skip over all of them, so that the model is cut by running it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(9))

    def forward(self, x):
        outer = x = self.layers[0](x)
        for layer in self.layers[1:-1]:
            x = x + layer(x).relu()
        return self.layers[-1](x * outer)


@pytest.mark.parametrize("model", [Wide, lambda: nn.Sequential(*Wide().layers)], ids=["cut", "chain"])
@pytest.mark.parametrize(("method", "versions"), [(mh.gpipe, 1), (mh.pipedream, 1), (mh.pipedream_2bw, 2)])
def test_a_rank_keeps_its_own_part_only(method, versions, model):
    """Weights, one gradient, and as many more versions as the method keeps at the end; not those of other stages."""
    x = torch.randn(32, 64)
    data = mh.Task(model, TensorDataset(x, x), mse_loss, batch_size=8)
    result = mh.train(data, method(rule=Sgd(0.01)), cluster=mh.Cluster(3), steps=6)
    part = 3 * (64 * 64 + 64) * 4
    kept = {line["held"]: line["bytes"] for line in result.records if line["kind"] == "memory"}
    assert kept.keys() == {0, 1, 2}
    assert all((1 + versions) * part <= one <= 1.1 * (1 + versions) * part for one in kept.values())


# -- what is refused -----------------------------------------------------------------------------------


@every
def test_tied_weights_over_a_cut_are_refused(method):
    with pytest.raises(mh.Refused, match=r"words\.weight and head\.weight are one parameter of several stages"):
        run(task(lambda: Gpt(tied=True), words(), None), method, workers=2)


def derived():
    gpt = Gpt()
    parametrizations.weight_norm(gpt.h[2].widen)
    return gpt


@every
def test_derived_weights_are_refused_where_the_weights_of_a_graph_are_written(method):
    data = task(derived, words(), None)
    if method in REWRITES:
        with pytest.raises(mh.Refused, match=r"the weights of layer h\.2\.widen are derived from other parameters"):
            run(data, method, workers=2)
    else:
        assert run(data, method, workers=2).weights.keys() == dict(data.build(0).named_parameters()).keys()


def test_casts_of_weights_are_refused_too():
    with pytest.raises(mh.Refused, match="autocast makes copies"), torch.autocast("cpu"):
        run(task(Gpt, words(), None), "pipelined-backprop", workers=2)


class Repeated(nn.Module):
    """A cell that is called before and behind another layer."""

    def __init__(self):
        super().__init__()
        self.cell, self.between, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.cell(self.between(self.cell(x))))


@pytest.mark.parametrize("method", [mh.pipedream, mh.gpipe])
def test_a_module_that_is_called_twice_across_a_cut_is_refused(method):
    with pytest.raises(mh.Refused, match="cannot be cut at between: cell is called before and behind it"):
        mh.train(small.task(model=Repeated), method(cut="between"), cluster=mh.Cluster(2), steps=2)


def test_names_and_balance_are_in_force_in_the_text_of_a_method():
    data = task(Gpt, words(), None)
    texts = ("pipedream:cut=h.1", "pipedream")
    made = [mh.train(data, strategy_of(text), cluster=mh.Cluster(2), steps=4) for text in texts]
    assert difference(made[0], mh.train(data, mh.pipedream(cut=["h.1"]), cluster=mh.Cluster(2), steps=4)) == 0
    assert difference(*made) > 0
    for method in ("pipedream", "gpipe"):
        with pytest.raises(mh.Refused, match=r"there is no module to cut at 'h\.9'"):
            mh.train(data, strategy_of(f"{method}:cut=h.9"), cluster=mh.Cluster(2), steps=4)
        with pytest.raises(mh.Refused, match="balance is 'weight', but must be "):
            mh.train(data, strategy_of(f"{method}:balance=weight"), cluster=mh.Cluster(2), steps=4)


@pytest.mark.parametrize("method", [mh.pipedream, mh.gpipe])
def test_measured_cuts_are_for_real_processes(method):
    with pytest.raises(mh.Refused, match="balance is 'time', but must be work or parameters in virtual time"):
        mh.train(task(Gpt, words(), None), method(balance="time"), cluster=mh.Cluster(2), steps=2)
    with pytest.raises(mh.Refused, match="balance is time, but must be left as it is: the cuts are given by name"):
        method(cut=["h.1"], balance="time")


# -- a list of stages ----------------------------------------------------------------------------------


def listed(kind=list):
    return kind([small.chain(4, 8, 8), small.chain(8, 2)])


@pytest.mark.parametrize("kind", [list, nn.ModuleList])
@pytest.mark.parametrize("method", [mh.gpipe, mh.pipedream])
def test_a_model_may_be_a_list_of_its_stages(method, kind):
    """The larger one first, which would be divided otherwise."""
    data = small.task(model=lambda: listed(kind))
    found = mh.train(data, method(rule=Sgd(0.1)), cluster=mh.Cluster(2), steps=6)
    twin = small.task(model=lambda: nn.Sequential(*listed()))
    assert difference(found, mh.train(twin, method(rule=Sgd(0.1), cut="1"), cluster=mh.Cluster(2), steps=6)) < 1e-6
    with pytest.raises(mh.Refused, match="the number of stages is 3, but must be 2, the length of the list of stages"):
        mh.train(data, method(), cluster=mh.Cluster(3), steps=2)
    with pytest.raises(mh.Refused, match="cut is 1, but must be left out: the model was given as a list of stages"):
        mh.train(data, method(cut="1"), cluster=mh.Cluster(2), steps=2)


@pytest.mark.parametrize("kind", [list, nn.ModuleList])
def test_a_loop_of_ones_own_may_have_a_list_of_stages(kind):
    def program(hands, losses):
        x, y = small.task().data.tensors
        losses.extend(hands.step(x[:8], y[:8]) for _ in range(5))

    for strategy in (mh.pipedream(), mh.gpipe(2, rule=Sgd(0.1))):
        joined = Joined(strategy, program, mh.Cluster(2), lambda: listed(kind))
        assert same(list(map(nn.ModuleList, joined.models)))
    alone = Joined(mh.bsp(rule=Sgd(0.1)), program, mh.Cluster(1), lambda: listed(kind))
    weights = [next(one[0].parameters()) for one in (alone.models[0], joined.models[0])]
    assert torch.allclose(*weights, atol=1e-6), "gpipe is one process"

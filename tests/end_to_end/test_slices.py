"""Teams whose ranks have slices of layers: each kind equals the whole model, alone, in a mesh and with methods."""

import copy
from functools import partial
from itertools import pairwise, product

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.core.param_cut import keep_slices
from manyhands.core.worker import Worker
from manyhands.rules import Adam, ClipNorm, Sgd, chain
from manyhands.run.join import Hands
from manyhands.run.methods import over_team
from manyhands.splits.conv_fc import ConvFc
from manyhands.splits.piped import Piped
from manyhands.splits.sliced import Sliced
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.world import simulate
from repeats import every

SIZES = [2, 3, 4]


class Block(nn.Module):
    """Attention with separate projections, as users write it, and a feed-forward pair."""

    def __init__(self, depth=8, heads=4):
        super().__init__()
        self.norm, self.heads, self.width = nn.LayerNorm(depth), heads, depth // heads
        self.q, self.k, self.v, self.o = (nn.Linear(depth, depth) for _ in range(4))
        self.f = nn.Sequential(nn.Linear(depth, 12), nn.GELU(), nn.Linear(12, depth))

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.f(x)


class Words(nn.Module):
    """Words, a block, an output for each of five classes."""

    def __init__(self, block):
        super().__init__()
        self.words, self.place = nn.Embedding(11, 8, padding_idx=0), nn.Embedding(6, 8)
        self.block, self.out = block(), nn.Linear(8, 5)

    def forward(self, x):
        y = self.block(self.words(x) + self.place(torch.arange(x.shape[1])))
        return self.out(y).mean(1)


class Attending(nn.Module):
    """nn.MultiheadAttention in its other forms: masks, its weights, another key, the batch second."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 4), nn.LayerNorm(8)

    def forward(self, x):
        x = x.transpose(0, 1)
        later = nn.Transformer.generate_square_subsequent_mask(len(x), dtype=x.dtype)
        missing = torch.zeros(x.shape[1], len(x), dtype=x.dtype)
        missing[0, -1] = -torch.inf
        y, shares = self.attention(self.norm(x), x, x, attn_mask=later, key_padding_mask=missing)
        return (x + y).transpose(0, 1) + shares.sum(-1, keepdim=True)


class Maps(nn.Module):
    """Convolutions with a skip connection, normalisation, a padding of another kind."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect")
        self.inside = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1, bias=False))
        self.norm, self.out = nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x):
        y = self.first(x)
        return self.out(self.norm(y + self.inside(y)).mean((2, 3)))


def words():
    return Words(Block)


def torch_words():
    return Words(partial(nn.TransformerEncoderLayer, 8, 4, 12, dropout=0.0, batch_first=True))


def attending_words():
    return Words(Attending)


BY_NAMES = "*.q=column *.k=column *.v=column *.o=row *.f.0=column *.f.2=row words=vocabulary out=gather"
MODELS = {
    "a plan by names": (words, Sliced(plan=BY_NAMES), (2, 4)),
    "pairs in any module": (words, Sliced(), SIZES),
    "neurons in any module": (words, Sliced(kind="neurons"), SIZES),
    "torch's transformer block": (torch_words, Sliced(), SIZES),
    "attention with masks": (attending_words, Sliced(), SIZES),
    "pairs of convolutions": (Maps, Sliced(), SIZES),
    "filters": (Maps, Sliced(kind="filters"), SIZES),
    "channels": (Maps, Sliced(kind="channels"), SIZES),
}
CASES = [(name, size) for name, (_, _, sizes) in MODELS.items() for size in sizes]


def sample(make):
    """A mini-batch of a model."""
    generator = torch.Generator().manual_seed(5)
    y = torch.randint(5, (8,), generator=generator)
    if make is Maps:
        return torch.randn(8, 1, 6, 6, generator=generator, dtype=torch.float64), y
    return torch.randint(11, (8, 6), generator=generator), y


def task(make):
    def built():
        torch.manual_seed(2)
        return make().double()

    return mh.Task(built, TensorDataset(*sample(make)), cross_entropy, batch_size=8)


@torch.no_grad()
def gradients(made, team, steps, transport):
    """The loss and the gradient of a member, and its model."""
    w = Worker(transport, made, made.build(0), seed=1, steps=steps, batch_size=8)
    team, index, size = copy.deepcopy(team), transport.rank, transport.size
    w.trained, cuts = team.part(w.model, index, size), team.cuts(w.model, size)
    keep_slices(w.model, cuts, index)
    team.begin(w, transport)
    for w.step in range(steps):
        loss = w.gradient(made.data.tensors, origin=(0, w.step, 0))
    return loss, {slot.name: w.flat.gradient_of(slot).clone() for slot in w.flat.slots}, w.model


def computed(made, team, size, steps=1):
    return simulate(Cluster(workers=size), partial(gradients, made, team, steps)).results


@pytest.mark.parametrize(("name", "size"), CASES)
def test_every_split_has_the_value_and_the_gradient_of_the_whole_model(name, size):
    make, team, _ = MODELS[name]
    made = task(make)
    plain = made.build(0)
    loss = made.loss_of(plain, made.data.tensors)
    loss.backward()
    found, cuts = computed(made, team, size), team.cuts(plain, size)
    assert cuts
    seen = set()
    for index, (value, mine, _) in enumerate(found):
        assert value == pytest.approx(loss.item(), abs=1e-12)
        for parameter, gradient in mine.items():
            whole = plain.get_parameter(parameter).grad
            expected = cuts[parameter].take(whole, index) if parameter in cuts else whole
            assert torch.allclose(gradient, expected, rtol=0, atol=1e-12), parameter
            seen.add(parameter)
    assert seen == dict(plain.named_parameters()).keys()


@pytest.mark.parametrize("name", MODELS)
def test_a_member_keeps_its_slices_only(name):
    make, team, _ = MODELS[name]
    whole, cuts = make(), team.cuts(make(), 2)
    part = team.part(whole, 0, 2)
    before = sum(p.numel() for p in whole.parameters())
    keep_slices(whole, cuts, 0)
    kept = sum(p.numel() for p in part.parameters())
    assert all(whole.get_parameter(parameter).shape[cut.dim] == cut.width(0) for parameter, cut in cuts.items())
    assert kept < 0.75 * before


# -- what could be silently wrong (numbers of the design's list of traps) -------------------------------


class Uneven(nn.Module):
    """A layer that runs on some members only."""

    def __init__(self):
        super().__init__()
        self.f, self.g, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x):
        first = self.f.weight.shape[0] != 4 and self.chosen == 0
        return self.out(self.f(self.g(x)) if first else self.g(self.f(x)))


def test_sums_of_different_layers_are_an_error():
    """16: a member that calls layers in another order would add what does not belong together."""
    made = mh.Task(Uneven, TensorDataset(torch.randn(8, 4), torch.randint(5, (8,))), cross_entropy, batch_size=8)

    def member(transport):
        w = Worker(transport, made, made.build(0), seed=1, steps=1, batch_size=8)
        team, w.model.chosen = Sliced(kind="neurons"), transport.rank
        w.trained, cuts = team.part(w.model, transport.rank, 2), team.cuts(w.model, 2)
        keep_slices(w.model, cuts, transport.rank)
        team.begin(w, transport)
        w.gradient(made.data.tensors)

    with pytest.raises(mh.ManyhandsError, match=r"member \d of the team is in the forward pass of [fg] \(call 1\)"):
        simulate(Cluster(workers=2), member)


def test_parameters_between_slices_are_an_error():
    """A parameter that each member uses on its own slice only would get a part of its gradient."""

    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.scale, self.g = nn.Linear(4, 6), nn.PReLU(), nn.Linear(6, 5)

        def forward(self, x):
            return self.g(self.scale(self.f(x)))

    made = mh.Task(Between, TensorDataset(torch.randn(8, 4), torch.randint(5, (8,))), cross_entropy, batch_size=8)
    with pytest.raises(mh.ManyhandsError, match=r"the gradient of scale.weight differs"):
        computed(made, Sliced(plan="f=column g=row"), 2)


def test_a_bias_is_added_once():
    """17: the pair equals the whole with biases that are not 0."""
    torch.manual_seed(0)
    x = torch.randn(8, 4, dtype=torch.float64)
    made = mh.Task(
        lambda: _biased(nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)).double()),
        TensorDataset(x, torch.randn(8, 3, dtype=torch.float64)),
        mse_loss,
        batch_size=8,
    )
    expected = made.loss_of(made.build(0), made.data.tensors).item()
    for size in (2, 3):
        assert [loss for loss, *_ in computed(made, Sliced(), size)] == [pytest.approx(expected, abs=1e-15)] * size


def _biased(model):
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.constant_(layer.bias, 1.5)
    return model


@pytest.mark.parametrize("make", [partial(mh.ssp, lr=0.05), partial(mh.ad_psgd, lr=0.05)], ids=["ssp", "ad-psgd"])
def test_copies_are_equal_under_methods_that_are_not_in_lock_step(make):
    """18: what every slice has belongs to one member, which sends it out before each pass."""
    seen = {}

    class Watched(Sliced):
        def gradient(self, w, batch, origin):
            shared = [p for name, p in w.model.named_parameters() if "norm" in name]
            with w.model.register_forward_hook(lambda *_: seen.setdefault(origin, []).append(flat(shared))):
                return super().gradient(w, batch, origin)

    def flat(parameters):
        return torch.cat([p.detach().reshape(-1) for p in parameters])

    cluster = mh.Cluster(workers=4, jitter=0.5)
    mh.train(task(words), make(), team=Watched(2), cluster=cluster, steps=40)
    assert len(seen) >= 2 * 40 - 2
    assert all(torch.equal(*copies) for copies in seen.values())


def test_dropout_differs_between_slices_and_agrees_elsewhere():
    class Masks(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Dropout(0.5)
            self.pair = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 5))
            self.last = nn.Dropout(0.5)

        def forward(self, x):
            self.before = self.first(x)
            inside = self.pair[1].register_forward_hook(lambda _, __, out: setattr(self, "inside", out == 0))
            y = self.pair(self.before)
            inside.remove()
            self.after = self.last(torch.ones(100))
            return y * self.after.mean()

    x = torch.randn(8, 4)
    made = mh.Task(Masks, TensorDataset(x, torch.randint(5, (8,))), cross_entropy, batch_size=8)
    one, other = (model for _, _, model in computed(made, Sliced(), 2))
    assert torch.equal(one.before, other.before)
    assert torch.equal(one.after, other.after)
    assert not torch.equal(one.inside, other.inside)


# -- with methods ---------------------------------------------------------------------------------------


def chain_of_layers():
    torch.manual_seed(4)
    widths = [6, 8, 5, 7, 4]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def plain_task(batch=8):
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(64, 6, dtype=torch.float64, generator=generator)
    return mh.Task(
        chain_of_layers, TensorDataset(x, torch.randint(4, (64,), generator=generator)), cross_entropy, batch_size=batch
    )


def difference(one, other):
    return max(float((one.weights[name] - other.weights[name]).abs().max()) for name in one.weights)


@pytest.mark.parametrize("axes", list(product((1, 2), repeat=3)), ids=str)
def test_every_mesh_equals_one_process(axes):
    data, pipeline, tensor = axes
    ranks = data * pipeline * tensor
    strategy = mh.mesh(pipeline, tensor, micro_batches=2, lr=0.3)
    found = mh.train(plain_task(), strategy, steps=5, cluster=mh.Cluster(workers=ranks))
    one = mh.train(plain_task(), mh.bsp(lr=0.3), cluster=mh.Cluster(workers=data), steps=5)
    assert difference(found, one) <= 1e-12


@pytest.mark.parametrize(
    "team",
    [Sliced(2), Sliced(2, "neurons"), Piped(2, 2, of=Sliced(2)), ConvFc(2)],
    ids=["pairs", "neurons", "both", "conv-fc"],
)
@pytest.mark.parametrize(
    "make", [mh.diloco, mh.easgd, partial(mh.bsp, rule=Adam(0.01))], ids=["diloco", "easgd", "adam"]
)
def test_a_run_is_continued_with_another_team_or_none(team, make, tmp_path):
    """Checkpoints have whole parameters, and whole state of the rule."""
    size = team.size
    straight = mh.train(plain_task(), make(), cluster=mh.Cluster(workers=2), steps=8)
    mh.train(
        plain_task(),
        make(),
        team=team,
        cluster=mh.Cluster(workers=2 * size),
        steps=4,
        out=tmp_path / "a",
        checkpoint_every=4,
    )
    alone = mh.train(plain_task(), make(), cluster=mh.Cluster(workers=2), steps=8, resume=tmp_path / "a")
    assert difference(alone, straight) <= 1e-12
    mh.train(plain_task(), make(), cluster=mh.Cluster(workers=2), steps=4, out=tmp_path / "b", checkpoint_every=4)
    together = mh.train(
        plain_task(), make(), team=team, cluster=mh.Cluster(workers=2 * size), steps=8, resume=tmp_path / "b"
    )
    assert difference(together, straight) <= 1e-12


def test_one_weird_trick_is_sgd_of_all_samples_with_every_scheme():
    one = mh.train(plain_task(16), mh.bsp(lr=0.3), cluster=mh.Cluster(workers=1), steps=5)
    for scheme in "abc":
        for ranks in (2, 3):
            found = mh.train(
                plain_task(16), mh.one_weird_trick(scheme, lr=0.3), cluster=mh.Cluster(workers=ranks), steps=5
            )
            assert difference(found, one) <= 1e-12


TRAINED = {
    "downpour": (partial(mh.downpour, lr=0.05), {"servers": 2}, "neurons"),
    "ssp": (partial(mh.ssp, lr=0.05), {}, "mesh"),
    "easgd": (partial(mh.easgd, lr=0.05, asynchronous=True), {"servers": 1}, "mesh"),
    "diloco": (mh.diloco, {}, "mesh"),
}


@pytest.mark.parametrize("name", every(2, TRAINED))
def test_digits_are_learned_over_teams_of_slices(name):
    make, on, kind = TRAINED[name]
    team = Sliced(2, "neurons") if kind == "neurons" else Piped(2, 2, of=Sliced(2))
    result = mh.train("digits", make(), team=team, cluster=mh.Cluster(workers=2 * team.size, **on), steps=150)
    assert result.test_accuracy > 0.8


def test_a_team_is_chosen_by_its_text():
    team = over_team(mh.bsp(), "piped(2, of=sliced(2, plan='0=column 2=row'))").team
    assert team == Piped(2, of=Sliced(2, plan={"0": "column", "2": "row"}))
    assert over_team(mh.bsp(), "conv_fc(2, 'b')").team == ConvFc(2, "b")


def own_loop(team, transport):
    """A user's loop: the last loss, the shapes in training, the answer, and the model after the loop."""
    made, model = plain_task(), plain_task().build(0)
    with Hands(transport, model, loss=cross_entropy, strategy=over_team(mh.bsp(lr=0.3), team)) as hands:
        for x, y in hands.share(made.data, batch_size=8, epochs=1):
            loss = hands.step(x, y)
        shapes = [p.shape for p in model.parameters()]
        with hands.answer() as whole, torch.no_grad():
            answer = whole(made.data.tensors[0])
    return loss, shapes, answer, [p.detach().clone() for p in model.parameters()]


def test_a_loop_of_ones_own_trains_slices_and_gets_the_whole_model():
    plain = simulate(Cluster(workers=2), partial(own_loop, None)).results
    found = simulate(Cluster(workers=4), partial(own_loop, "sliced(2)")).results
    for rank, (loss, shapes, answer, after) in enumerate(found):
        assert loss == pytest.approx(plain[rank // 2][0], abs=1e-12)
        assert shapes[0] == (4, 6)
        assert torch.allclose(answer, plain[0][2], rtol=0, atol=1e-12)
        assert all(
            torch.allclose(one, other, rtol=0, atol=1e-12) for one, other in zip(after, plain[0][3], strict=True)
        )


# -- refusals --------------------------------------------------------------------------------------------

REFUSED = {
    "a rule of whole parameters": (
        mh.bsp(rule=chain(ClipNorm(1.0), Sgd(0.1))),
        Sliced(2),
        "computes with whole parameters",
    ),
    "no layer": (mh.bsp(), Sliced(2, "filters"), "no layer that filters can be cut of"),
    "too many ranks": (mh.bsp(), Sliced(16, "neurons"), "no layer that neurons can be cut of"),
    "a pattern of nothing": (mh.bsp(), Sliced(2, plan="nothing=column"), "the plan's pattern is nothing"),
    "an unknown word": (mh.bsp(), Sliced(2, plan="0=colum"), "one of column, row"),
    "no layer of that kind": (mh.bsp(), Sliced(2, plan="1=column"), "left out of the plan"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused(name):
    strategy, team, why = REFUSED[name]
    with pytest.raises(mh.Refused, match=why):
        mh.train(plain_task(), strategy, team=team, cluster=mh.Cluster(workers=team.size), steps=1)


def test_an_update_after_each_sub_step_is_for_one_team():
    with pytest.raises(mh.Refused, match=r"substep_lr is 0\.1"):
        strategy = mh.one_weird_trick("b", "each", ranks=2)
        mh.train(plain_task(), strategy, cluster=mh.Cluster(workers=4), steps=1)

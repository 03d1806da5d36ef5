"""Cards 2.0 to 2.10: the rows of the scalar chain for every pipeline that streams, and what they must be equal to."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from toys import SECOND, chain, probed

import manyhands as mh
from manyhands.rules import Momentum, Sgd
from manyhands.splits import schedules
from manyhands.splits.data import Share
from manyhands.splits.versions import Copies, Latest, Stash
from manyhands.strategies.streaming import Streaming

NEWEST = {
    2: [[1, 0.9, 0.819, 0.759951, 0.714569], [1, 0.9, 0.81, 0.74439, 0.694459]],
    3: [
        [1, 0.9, 0.8271, 0.778739, 0.747699, 0.725174],
        [1, 0.9, 0.819, 0.759951, 0.723191, 0.697429],
        [1, 0.9, 0.81, 0.74439, 0.703946, 0.676134],
    ],
}
"""1F1B without stashing."""
STASHED = {
    2: NEWEST[2],
    3: [
        [1, 0.9, 0.819, 0.765856, 0.732405, 0.708966],
        [1, 0.9, 0.819, 0.759951, 0.723191, 0.697932],
        [1, 0.9, 0.81, 0.74439, 0.703946, 0.676676],
    ],
}
FIGURE5 = {
    2: [[1, 0.9, 0.819, 0.75339, 0.70556], [1, 0.9, 0.81, 0.729, 0.669951]],
    3: [
        [1, 0.9, 0.8271, 0.773365, 0.737331, 0.711395],
        [1, 0.9, 0.819, 0.75339, 0.70556, 0.668801],
        [1, 0.9, 0.81, 0.729, 0.669951, 0.625013],
    ],
}
FIGURE5_STASHED = {2: FIGURE5[2], 3: [[1, 0.9, 0.819, 0.75339, 0.710343, 0.680237], *FIGURE5[3][1:]]}
ALIGNED = {2: [[1, 0.9, 0.8, 0.7271, 0.6759, 0.63746]] * 2, 3: [[1, 0.9, 0.8, 0.7, 0.640951, 0.608183]] * 3}
ROWS = {
    "pipelined-backprop": (mh.pipelined_backprop, FIGURE5),
    "figure 5, stashed": (lambda lr: Streaming(Sgd(lr), schedules.figure5, Stash), FIGURE5_STASHED),
    "1F1B, not stashed": (lambda lr: Streaming(Sgd(lr), schedules.alternating, Latest), NEWEST),
    "pipedream": (mh.pipedream, STASHED),
    "vertical sync": (lambda lr: mh.pipedream(lr, vertical_sync=True), ALIGNED),
    "ddg": (mh.ddg, STASHED),
    "ddg as in its code": (lambda lr: mh.ddg(lr, variant="code"), NEWEST),
    "features-replay": (mh.features_replay, NEWEST),
}


def rows_of(strategy, task, workers, steps):
    """Every stage's weight after 0, 1, 2, ... updates."""
    seen = {}

    def note(s, w):
        seen.setdefault(w.rank, []).append(w.flat.groups[0].weights.item())

    mh.train(task, probed(strategy, setup=note, update=note), cluster=mh.Cluster(workers=workers), steps=steps)
    return [seen[rank] for rank in sorted(seen)]


def trained(strategy, task, workers, steps, **settings):
    return mh.train(task, strategy, cluster=mh.Cluster(workers=workers), steps=steps, **settings)


def same(one, other):
    return all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


def apart(one, other):
    return max(float((one.weights[name] - other.weights[name]).abs().max()) for name in one.weights)


def deep(layers=6, width=5, samples=24, batch_size=3):
    """Two layers with tanh in each of three stages, in double precision."""
    draw = torch.Generator().manual_seed(3)
    x, y = (torch.randn(samples, width, generator=draw, dtype=torch.float64) for _ in range(2))

    def model():
        parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
        return nn.Sequential(*parts[:-1]).double()

    return mh.Task(model, TensorDataset(x, y), nn.functional.mse_loss, batch_size)


# -- the table of the cards ----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("method", ROWS)
def test_the_rows_of_the_chain(method, workers):
    make, expected = ROWS[method]
    found = rows_of(make(lr=0.1), chain(workers), workers, len(expected[workers][0]) - 1)
    assert found == [pytest.approx(row, abs=1e-6) for row in expected[workers]]


def test_the_rows_of_spectrain_and_of_the_same_without_prediction():
    """Momentum as in the paper, v <- 0.9 v + 0.1 g, is torch's with a tenth of the rate."""
    rule = Momentum(0.01, 0.9)
    first, *_ = rows_of(mh.spectrain(rule=rule), chain(3), 3, 4)
    assert first == pytest.approx([1, 0.99, 0.971492, 0.9462, 0.916054], abs=1e-6)
    first, *_ = rows_of(Streaming(rule, schedules.alternating, Latest), chain(3), 3, 4)
    assert first == pytest.approx([1, 0.99, 0.971297, 0.945397, 0.913981], abs=1e-6)


def gradients(model, batches):
    """The mean gradient of some mini-batches, by parameter."""
    found = [torch.autograd.grad(nn.functional.mse_loss(model(x), y), list(model.parameters())) for x, y in batches]
    return [sum(gs) / len(batches) for gs in zip(*found, strict=True)]


def set_to(model, weights):
    for p, x in zip(model.parameters(), weights, strict=True):
        p.data.copy_(x)


@pytest.mark.parametrize(("workers", "micro_batches"), [(2, 1), (2, 2), (2, 4), (3, 2), (3, 4)])
def test_2bw_is_sgd_with_the_weights_of_one_update_ago(workers, micro_batches):
    """w(t+1) = w(t) - lr grad f(w(t-1))"""
    task, steps = deep(batch_size=4), 6
    share, model = Share(task.data, 0, 1, 4, seed=0), task.build(0)
    newest = [p.detach().clone() for p in model.parameters()]
    older = newest
    for _ in range(steps):
        set_to(model, older)
        moves = gradients(model, [share.next_batch()])
        older, newest = newest, [x - 0.1 * g for x, g in zip(newest, moves, strict=True)]
    result = trained(mh.pipedream_2bw(micro_batches, lr=0.1), task, workers, steps)
    for found, expected in zip(result.weights.values(), newest, strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-13)


def test_pieces_of_different_sizes_count_by_their_samples():
    """Ten samples in four pieces, of 3, 3, 2 and 2: the mean over all samples, not the mean of the means."""
    task = deep(samples=40, batch_size=10)
    share, model = Share(task.data, 0, 1, 10, seed=0), task.build(0)
    start = [p.detach().clone() for p in model.parameters()]
    x, y = share.next_batch()
    result = trained(mh.pipedream_2bw(4, lr=0.1), task, 3, 1)
    means = gradients(model, list(zip(x.tensor_split(4), y.tensor_split(4), strict=True)))
    for found, w, g, mean in zip(result.weights.values(), start, gradients(model, [(x, y)]), means, strict=True):
        assert torch.allclose(found, w - 0.1 * g, rtol=0, atol=1e-14)
        assert not torch.allclose(found, w - 0.1 * mean, rtol=0, atol=1e-6)


def test_the_row_of_2bw():
    rows = rows_of(mh.pipedream_2bw(1, lr=0.1), chain(2), 2, 5)
    assert rows == [pytest.approx([1, 0.9, 0.8, 0.7271, 0.6759, 0.63746], abs=1e-6)] * 2


def test_an_optimizer_of_torch_moves_both_versions_of_2bw():
    """It is bound to one memory, so that the versions do not swap theirs with it."""
    task = deep(batch_size=4)
    ours = trained(mh.pipedream_2bw(2, rule=Sgd(0.1)), task, 3, 6)
    torchs = trained(mh.pipedream_2bw(2, rule=mh.rules.Torch("SGD", lr=0.1)), task, 3, 6)
    assert apart(ours, torchs) < 1e-14


# -- weight copies -------------------------------------------------------------------------------------


def chains(task, copies, steps, lr, momentum=0.0):
    """So many independent runs of SGD, of which the m-th mini-batch trains the (m mod copies)-th."""
    share, models, memories = Share(task.data, 0, 1, task.batch_size, seed=0), [], []
    for _ in range(copies):
        models.append(task.build(0))
        memories.append([torch.zeros_like(p) for p in models[-1].parameters()])
    for m in range(steps):
        model, memory = models[m % copies], memories[m % copies]
        loss = task.loss_of(model, share.next_batch())
        for p, g, v in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), memory, strict=True
        ):
            v.mul_(momentum).add_(g)
            p.data.add_(v * -lr)
    return [[p.detach() for p in model.parameters()] for model in models]


@pytest.mark.parametrize("order", ["rounds", "1F1B"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("workers", [2, 3])
def test_copies_are_independent_chains_to_the_last_bit(workers, momentum, order):
    task, copies, found = deep(), 2 * workers - 1, {}
    steps = 3 * copies - 1

    def note(s, w):
        for c in range(copies):
            for slot in w.flat.slots:
                memory = s.weights._memories[c][slot.span.group]
                found[c, slot.name] = memory[slot.span.start : slot.span.stop].view(slot.shape).clone()

    rule = Momentum(0.1, momentum) if momentum else Sgd(0.1)
    of_rounds, of_1f1b = mh.weight_copies(rounds=3, rule=rule), Streaming(rule, schedules.alternating, Copies)
    strategy = of_rounds if order == "rounds" else of_1f1b
    result = trained(probed(strategy, update=note), task, workers, steps)
    expected = chains(task, copies, steps, 0.1, momentum)
    for number, name in enumerate(result.weights):
        alone = [weights[number] for weights in expected]
        assert [float((found[c, name] - alone[c]).abs().max()) for c in range(copies)] == [0.0] * copies
        assert torch.allclose(result.weights[name], sum(alone) / copies, rtol=0, atol=1e-15)


def test_the_copies_of_the_card():
    """Ten mini-batches, K = 2: copies .698109, .922354, .546650; their mean is the answer."""
    numbers, seen = [1, 0.5, 2, 1.5, 0.7, 1.1, 0.9, 0.3, 1.2, 0.4], {}
    task = chain(2)
    x = torch.tensor(numbers, dtype=torch.float64).view(-1, 1)
    share = Share(TensorDataset(torch.arange(10.0, dtype=torch.float64).view(-1, 1)), 0, 1, 1, seed=0)
    order = [int(share.next_batch()[0]) for _ in range(10)]
    data = torch.empty_like(x)
    for position, sample in enumerate(order):
        data[sample] = x[position]
    task = mh.Task(task.model, TensorDataset(data, torch.zeros_like(data)), task.loss, batch_size=1)

    def note(s, w):
        seen[w.rank] = [memory[0].item() for memory in s.weights._memories]

    result = trained(probed(mh.weight_copies(lr=0.1, rounds=4), update=note), task, 2, 10)
    assert seen == {rank: pytest.approx([0.698109, 0.922354, 0.546650], abs=1e-6) for rank in range(2)}
    assert [x.item() for x in result.weights.values()] == pytest.approx([0.722371] * 2, abs=1e-6)


def test_a_round_of_copies_ends_with_their_mean():
    """Four rounds of three mini-batches, K = 2: chains that are averaged by hand."""
    task, seen = deep(layers=4), []
    share, model = Share(task.data, 0, 1, 3, seed=0), task.build(0)
    mean = [p.detach().clone() for p in model.parameters()]
    for _ in range(4):
        copies = []
        for _ in range(3):
            set_to(model, mean)
            copies.append([x - 0.1 * g for x, g in zip(mean, gradients(model, [share.next_batch()]), strict=True)])
        mean = [sum(xs) / 3 for xs in zip(*copies, strict=True)]
    strategy = probed(mh.weight_copies(lr=0.1), average=lambda s, w: seen.append(dict(s.in_flight)))
    result = trained(strategy, task, 2, 12)
    assert seen == [{}] * 8
    for found, expected in zip(result.weights.values(), mean, strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-14)


# -- which weights, by hand ----------------------------------------------------------------------------


def by_hand(task, steps, warm, newest_in_backward):
    """Two stages of two layers with tanh: h = tanh(x A) B per stage; rows of 1F1B or Figure 5 with `warm` ahead.

    The activations are those of F(m); the Jacobian has the weights of F(m), or the newest ones.
    """
    share, model = Share(task.data, 0, 1, task.batch_size, seed=0), task.build(0)
    a, b, c, d = (p.detach().clone() for p in model.parameters())
    batches = [share.next_batch() for _ in range(steps)]
    flying = []

    def forward(m):
        x, y = batches[m]
        inner = torch.tanh(x @ a.T)
        flying.append((x, y, inner, inner @ b.T, b.clone()))

    def backward():
        nonlocal a, b, c, d
        x, y, inner, h, b_then = flying.pop(0)
        t = torch.tanh(h @ c.T)
        out = t @ d.T
        error = 2 * (out - y) / out.numel()
        into = (error @ d) * (1 - t**2)
        down = into @ c
        d, c = d - 0.1 * error.T @ t, c - 0.1 * into.T @ h
        b_used = b if newest_in_backward else b_then
        inside = (down @ b_used) * (1 - inner**2)
        b, a = b - 0.1 * down.T @ inner, a - 0.1 * inside.T @ x

    for m in range(steps):
        forward(m)
        if m >= warm:
            backward()
    while flying:
        backward()
    return [a, b, c, d]


def biasless(width=4, samples=24):
    draw = torch.Generator().manual_seed(3)
    x, y = (3 * torch.randn(samples, width, generator=draw, dtype=torch.float64) for _ in range(2))

    def model():
        layer = lambda: nn.Linear(width, width, bias=False, dtype=torch.float64)  # noqa: E731
        return nn.Sequential(layer(), nn.Tanh(), layer(), layer(), nn.Tanh(), layer())

    return mh.Task(model, TensorDataset(x, y), nn.functional.mse_loss, 3)


@pytest.mark.parametrize("warm", [1, 2], ids=["1F1B", "figure 5"])
@pytest.mark.parametrize("newest", [False, True])
def test_stages_of_two_layers_equal_formulas_by_hand(warm, newest):
    task, steps = biasless(), 8
    schedule = schedules.alternating if warm == 1 else schedules.figure5
    result = trained(Streaming(Sgd(0.1), schedule, Latest if newest else Stash), task, 2, steps)
    for found, expected in zip(result.weights.values(), by_hand(task, steps, warm, newest), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_newest_weights_and_stashed_ones_differ():
    task = biasless()
    newest, stashed = (trained(Streaming(Sgd(0.1), schedules.figure5, one), task, 2, 8) for one in (Latest, Stash))
    assert apart(newest, stashed) > 1e-3


def test_ddg_has_the_weights_of_pipedream_and_replay_those_of_neither():
    task = deep()
    pipedream, ddg = trained(mh.pipedream(lr=0.1), task, 3, 12), trained(mh.ddg(lr=0.1), task, 3, 12)
    assert same(pipedream, ddg)
    assert apart(trained(mh.features_replay(lr=0.1), task, 3, 12), pipedream) > 1e-6
    assert apart(trained(mh.features_replay(lr=0.1), task, 3, 12), trained(mh.ddg(variant="code"), task, 3, 12)) > 1e-6


def test_stashing_with_momentum_has_one_memory_that_acts_on_the_newest_weights():
    """K = 2 and one layer per stage: stage 0 is momentum SGD with weights of one update ago, the last one without."""
    rows = rows_of(mh.pipedream(rule=Momentum(0.1, 0.9)), chain(2), 2, 5)
    w, v, seen = [[1.0], [1.0]], [0.0, 0.0], []
    for m in range(5):
        a, b = w[0][max(0, m - 1)], w[1][m]
        error = a * b
        for s, g in enumerate([error * b, error * a]):
            v[s] = 0.9 * v[s] + g
            w[s].append(w[s][-1] - 0.1 * v[s])
        seen.append(error)
    assert rows == [pytest.approx(row, abs=1e-14) for row in w]


# -- time, memory, rates -------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "make", "seconds"), [(2, mh.ddg, 4), (4, mh.ddg, 6), (4, mh.pipedream, 3)])
def test_ddg_takes_k_forward_passes_and_one_backward_pass(workers, make, seconds):
    """For tF = 1 and tB = 2, but 1 at stage 0, which sends no error; once the pipeline is full."""
    plain = chain(workers)
    task = mh.Task(plain.model, plain.data, plain.loss, batch_size=1, work=(3 * workers - 1) * SECOND)
    cluster = mh.Cluster(workers=workers, latency=0, bandwidth="inf")
    whole, part = (mh.train(task, make(), cluster=cluster, steps=steps).seconds for steps in (40, 20))
    assert (whole - part) / 20 == pytest.approx(seconds, rel=0.05)


KEPT = {
    "pipedream": (mh.pipedream, [4, 3, 2, 1]),
    "vertical sync": (lambda: mh.pipedream(vertical_sync=True), [4, 4, 4, 4]),
    "2bw": (lambda: mh.pipedream_2bw(4), [2, 2, 2, 2]),
    "copies": (mh.weight_copies, [7, 7, 7, 7]),
    "pipelined-backprop": (mh.pipelined_backprop, [1, 1, 1, 1]),
    "spectrain": (mh.spectrain, [1, 1, 1, 1]),
    "ddg": (mh.ddg, [4, 3, 2, 1]),
}


@pytest.mark.parametrize("method", KEPT)
def test_how_many_versions_are_kept(digits64, method):
    make, expected = KEPT[method]
    result = mh.train(digits64, make(), cluster=mh.Cluster(workers=4), steps=14)
    kept, flying = {}, {}

    def note(s, w):
        kept[w.rank] = max(kept.get(w.rank, 0), s.weights.kept)
        flying[w.rank] = max(flying.get(w.rank, 0), len(s.passes.stage._saved))

    mh.train(digits64, probed(make(), forward=note), cluster=mh.Cluster(workers=4), steps=14)
    assert [kept[s] for s in range(4)] == expected
    between = method == "vertical sync"  # an update has been made, and the oldest version may still be asked for
    steps, memory = (result.to_pandas(kind) for kind in ("step", "memory"))
    assert all(steps["versions"] <= [expected[rank] + between for rank in steps["rank"]])
    assert memory.sort_values("held")["versions"].tolist() == expected
    forward = [7, 5, 3, 1] if method in ("copies", "pipelined-backprop") else [4, 3, 2, 1]
    assert [flying[s] for s in range(4)] == forward


def test_features_replay_keeps_inputs_only(digits64):
    graphs, inputs = {}, {}

    def note(s, w):
        saved = s.passes.stage._saved.values()
        graphs[w.rank] = max(graphs.get(w.rank, 0), sum(one.out is not None for one in saved))
        inputs[w.rank] = max(inputs.get(w.rank, 0), sum(one.out is None for one in saved))

    mh.train(digits64, probed(mh.features_replay(), forward=note), cluster=mh.Cluster(workers=4), steps=12)
    assert set(graphs.values()) == {0} and inputs == {0: 4, 1: 3, 2: 2, 3: 1}


EVERY = {
    "pipelined-backprop": mh.pipelined_backprop,
    "small-batch-pipeline": mh.small_batch_pipeline,
    "pipedream": mh.pipedream,
    "vertical sync": lambda **knobs: mh.pipedream(vertical_sync=True, **knobs),
    "2bw": lambda **knobs: mh.pipedream_2bw(3, **knobs),
    "spectrain": mh.spectrain,
    "ddg": mh.ddg,
    "features-replay": mh.features_replay,
    "weight-copies": mh.weight_copies,
    "dni": mh.dni,
}
every = pytest.mark.parametrize("method", EVERY)


@every
def test_a_rate_schedule_sees_the_same_samples_on_all_stages_also_in_the_drain(method):
    asked = {}

    class Noted(Sgd):
        def __call__(self, g, at):
            asked.setdefault(len(at.weights), []).append(at.samples)
            return super().__call__(g, at)

        def can_move(self, weights):
            return False

    def model():
        return nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 2), nn.Linear(2, 4))

    x, y = torch.randn(30, 3), torch.randn(30, 4)
    task = mh.Task(model, TensorDataset(x, y), nn.functional.mse_loss, batch_size=6)
    trained(EVERY[method](rule=Noted(0.01)), task, 3, 8)
    first, *others = asked.values()
    assert len(asked) == 3 and others == [first] * 2
    if method == "small-batch-pipeline":
        assert first == [2 * m for m in range(24)]  # three pieces of two samples, not five
    else:
        assert first == [6 * m for m in range(8)]


@every
def test_one_stage_is_plain_sgd(digits64, plain_sgd, method):
    """2BW is one update late with any number of stages, and SpecTrain looks no update ahead."""
    share = Share(digits64.data, 0, 1, 32, seed=0)
    reference = plain_sgd(digits64, [share.next_batch() for _ in range(5)], 0.1)
    result = trained(EVERY[method](rule=Sgd(0.1)), digits64, 1, 5)
    found = max(float((result.weights[name] - w.detach()).abs().max()) for name, w in reference.items())
    assert found < 1e-12 if method != "2bw" else found > 1e-4


def test_small_pieces_move_as_far_as_the_whole_batch_for_a_constant_gradient():
    """f = w: every sample moves the weights by eta / b."""

    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, x):
            return x + self.w

    data = TensorDataset(torch.zeros(16, 1, dtype=torch.float64), torch.zeros(16, 1, dtype=torch.float64))
    task = mh.Task(lambda: nn.Sequential(Shift(), Shift(), Shift()), data, lambda out, y: out.mean(), batch_size=8)
    result = trained(mh.small_batch_pipeline(lr=0.1), task, 3, 4)
    assert [x.item() for x in result.weights.values()] == pytest.approx([-0.4] * 3)


@pytest.mark.parametrize("method", [name for name in EVERY if name not in ("small-batch-pipeline", "2bw")])
def test_running_statistics_follow_the_order_of_the_mini_batches(method):
    """They belong to no version of the weights: if nothing moves they are those of plain forward passes, each once."""

    def model():
        return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 5)).double()

    data = deep(batch_size=6)
    task = mh.Task(model, data.data, data.loss, batch_size=6)
    share, plain = Share(task.data, 0, 1, 6, seed=0), task.build(0)
    for _ in range(9):
        plain(share.next_batch()[0])
    result = trained(EVERY[method](rule=Sgd(1e-300)), task, 3, 9)
    for name, buffer in plain.named_buffers():
        assert torch.equal(result.buffers[name], buffer), name


@pytest.mark.parametrize("method", [name for name in EVERY if name != "dni"])
def test_a_stage_of_a_stream_keeps_its_own_part_only(digits64, method):
    """Its weights, gradient and versions; the rest of the model is freed. DNI has its models of the errors, too."""
    result = trained(EVERY[method](rule=Sgd(0.1)), digits64, 3, 13)
    sizes = [w.nbytes for w in result.weights.values()]
    assert sum(line["weights"] for line in result.memory) == sum(sizes)
    for line in result.memory:
        assert line["bytes"] <= 1.1 * (line["weights"] + line["gradient"] + line["version_bytes"])


@every
def test_the_lag_is_counted(digits64, method):
    result = trained(EVERY[method](), digits64, 3, 30)
    most = {"pipelined-backprop": 4, "small-batch-pipeline": 4, "2bw": 1, "weight-copies": 0, "dni": 0}.get(method, 2)
    assert result.max_lag == most

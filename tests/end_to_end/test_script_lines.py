"""Lines that people write around a training step: each is in force, or refused with the reason and the way out."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import manyhands as mh
from manyhands import Refused
from manyhands.run.join import Hands
from manyhands.virtual.world import simulate

from .small import METHODS, ONE_HOST, chain, model, task
from .test_prepared import EXACT, PREPARED, STEPS, alone, batch, close, distance, fresh, joined, sgd, trained

DATA = task().data
X, Y = DATA.tensors
KEEPS = [name for name in PREPARED if METHODS[name]().traits.keeps_changes or name == "bsp"]
LOSES = [name for name in PREPARED if name not in KEEPS]


def cluster_for(name, workers=2):
    return mh.Cluster(workers=workers, hosts=1 if name in ONE_HOST else None)


def stepped(strategy, body, workers=2, make=model, loss=mse_loss, optimizer=None, cluster=None, **settings):
    """The models that a loop of `hands.step` ends with; `body(hands, net, optimizer)` is the loop."""

    def program(transport):
        net = fresh(make)
        own = optimizer and optimizer(net)
        with Hands(transport, net, strategy=strategy, loss=loss, optimizer=own, **settings) as hands:
            body(hands, net, own)
        return net

    return simulate(cluster or mh.Cluster(workers=workers), program).results


def one_step(hands, step=0):
    return hands.step(*batch(hands.rank, step))


# -- what hands.step returns ---------------------------------------------------------------------------


class WithLoss(nn.Module):
    """A model as those of HuggingFace: it computes its own loss and returns more beside it."""

    def __init__(self, form):
        super().__init__()
        self.body, self.form = model(), form

    def forward(self, x, y):
        out = self.body(x)
        loss = mse_loss(out, y)
        forms = {
            "object": SimpleNamespace(loss=loss, logits=out),
            "dict": {"loss": loss, "logits": out},
            "tuple": (loss, out),
            "tensor": loss,
        }
        return forms[self.form]


READ = {
    "object": lambda outputs: outputs.logits,
    "dict": lambda outputs: outputs["logits"],
    "tuple": lambda outputs: outputs,
}


@pytest.mark.parametrize("form", READ)
def test_a_step_returns_its_loss_with_the_outputs_of_the_model(form):
    def body(hands, net, _):
        before = copy.deepcopy(net.body)
        x, y = batch(hands.rank, 0)
        found = hands.step(x, y)
        assert isinstance(found, float)
        assert found == found.loss == pytest.approx(mse_loss(before(x), y).item())
        assert torch.equal(READ[form](found.outputs).detach(), before(x))

    stepped(mh.bsp(), body, make=lambda: WithLoss(form), loss=None)


def test_a_model_that_returns_only_its_loss_trains():
    nets = stepped(mh.bsp(), lambda hands, *_: one_step(hands), make=lambda: WithLoss("tensor"), loss=None)
    assert distance(nets[0], fresh(lambda: WithLoss("tensor"))) > 0


def test_the_outputs_of_a_model_do_not_keep_its_graph():
    def body(hands, net, _):
        found = one_step(hands)
        assert found.outputs.shape == (4, 2)
        assert not found.outputs.requires_grad

    stepped(mh.ssp(), body)


def test_a_loss_function_may_return_more_than_the_loss():
    def body(hands, net, _):
        found = one_step(hands)
        assert found.outputs == found.loss * 2

    def doubled(out, y):
        loss = mse_loss(out, y)
        return loss, 2 * loss.detach()

    stepped(mh.bsp(), body, loss=doubled)


@pytest.mark.parametrize("name", ["gpipe", "pipedream"])
def test_every_stage_of_a_pipeline_knows_the_loss(name):
    """Each of two stages has the same losses; in a pipeline that streams, they are known later."""
    losses = {}

    def body(hands, net, _):
        losses[hands.rank] = [hands.step(x, y) for x, y in hands.share(DATA, 4, steps=STEPS)]

    stepped(METHODS[name](), body)
    first, last = ([one for one in losses[rank] if one is not None] for rank in range(2))
    assert len(first) == STEPS - (name == "pipedream") and len(last) == STEPS
    assert first == last[: len(first)]


# -- options of the optimizer --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*EXACT, "ssp", "easgd", "ad_psgd"])
def test_a_rate_that_the_script_sets_to_0_moves_nothing_in_a_loop_of_steps(name):
    def body(hands, net, optimizer):
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = 0.0
            one_step(hands, step)

    nets = stepped(METHODS[name](), body, optimizer=lambda net: sgd(net, momentum=0.0))
    assert distance(nets[0], fresh()) < 1e-6


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.filterwarnings("error")
def test_a_scheduler_is_in_force_in_a_loop_of_steps(name):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4)

    def body(hands, net, optimizer):
        scheduler = schedule(optimizer)
        for step in range(STEPS):
            one_step(hands, step)
            scheduler.step()

    close(stepped(METHODS[name](), body, optimizer=sgd), alone(schedule=schedule))


def test_a_step_of_the_optimizer_beside_hands_step_is_refused():
    def body(hands, net, optimizer):
        one_step(hands)
        optimizer.step()

    with pytest.raises(Refused, match=r"hands\.step takes the steps: for a loop with both use prepare"):
        stepped(mh.bsp(), body, optimizer=sgd)


# -- the state of the optimizer ------------------------------------------------------------------------


def test_a_method_with_equal_replicas_leaves_the_state_in_the_users_optimizer():
    def loop(hands, net, optimizer):
        hands.prepare(net, optimizer)
        for step in range(3):
            x, y = batch(hands.rank, step)
            mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(optimizer.state_dict()["state"]) == len(list(net.parameters()))
        optimizer.load_state_dict(optimizer.state_dict())

    joined(mh.bsp(), loop)


@pytest.mark.parametrize("name", [name for name in PREPARED if not METHODS[name]().traits.equal_replicas])
def test_a_state_that_is_elsewhere_is_neither_read_nor_loaded(name):
    def loop(hands, net, optimizer):
        saved = optimizer.state_dict()
        hands.prepare(net, optimizer)
        with pytest.raises(Refused, match=r"where the method keeps the weights.*hands\.save"):
            optimizer.state_dict()
        with pytest.raises(Refused, match=r"where the method keeps the weights.*hands\.load"):
            optimizer.load_state_dict(saved)
        hands.end()
        with pytest.raises(Refused, match=r"hands\.save"):
            optimizer.state_dict()
        mse_loss(net(X), Y).backward()
        optimizer.step()
        assert optimizer.state_dict()["state"], "it is an ordinary optimizer again"

    joined(METHODS[name](), loop, cluster=cluster_for(name))


# -- backward passes of the script's own ---------------------------------------------------------------


def test_a_backward_pass_before_the_first_step_is_refused():
    def body(hands, net, _):
        mse_loss(net(X), Y).backward()
        one_step(hands)

    with pytest.raises(Refused, match=r"0\.weight has a gradient before the first step.*use prepare"):
        stepped(mh.bsp(), body)


@pytest.mark.parametrize("name", ["bsp", "ssp", "gpipe"])
def test_a_backward_pass_between_two_steps_is_refused(name):
    def body(hands, net, _):
        one_step(hands)
        mse_loss(net(X), Y).backward()

    with pytest.raises(Refused, match=r"between two steps.*use hands\.prepare"):
        stepped(METHODS[name](), body)


def test_a_gradient_from_before_prepare_is_refused():
    def loop(hands, net, optimizer):
        mse_loss(net(X), Y).backward()
        hands.prepare(net, optimizer)

    with pytest.raises(Refused, match=r"0\.weight has a gradient before the first step"):
        joined(mh.bsp(), loop)


# -- weights that the script changes -------------------------------------------------------------------


def clamp(net):
    with torch.no_grad():
        for p in net.parameters():
            p.clamp_(-0.01, 0.01)


def clamp_data(net):
    for p in net.parameters():
        p.data.clamp_(-0.01, 0.01)


def load(net):
    net.load_state_dict({name: torch.zeros_like(x) for name, x in net.state_dict().items()})


def clamped(name, change, steps=STEPS):
    def loop(hands, net, optimizer):
        hands.prepare(net, optimizer)
        for step in range(steps):
            x, y = batch(hands.rank, step)
            mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            change(net)

    return joined(METHODS[name](), loop, cluster=cluster_for(name))


@pytest.mark.parametrize("change", [clamp, clamp_data, load])
@pytest.mark.parametrize("name", KEEPS)
def test_a_change_of_the_weights_is_in_force_where_workers_have_their_own(name, change):
    """Except for what a method adds after the last change: an elastic move towards the centre, a last average."""
    (net, *_) = clamped(name, change)
    assert max(p.abs().max().item() for p in net.parameters()) < 0.2


@pytest.mark.parametrize("change", [clamp, clamp_data, load])
@pytest.mark.parametrize("name", LOSES)
def test_a_change_of_the_weights_that_would_be_lost_is_refused(name, change):
    with pytest.raises(Refused, match="the script has changed weights"):
        clamped(name, change)


@pytest.mark.parametrize("name", ["bsp", "ssp"])
def test_so_it_is_in_a_loop_of_steps(name):
    def body(hands, net, _):
        for step in range(STEPS):
            one_step(hands, step)
            clamp(net)

    with pytest.raises(Refused, match="the script has changed weights"):
        stepped(METHODS[name](), body)


# -- random numbers ------------------------------------------------------------------------------------


def dropped():
    return nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 2))


def test_what_a_script_draws_is_what_manual_seed_says():
    expected = torch.Generator().manual_seed(5)
    expected = [torch.rand(2, generator=expected) for _ in range(3)]

    def loop(hands, net, optimizer):
        hands.prepare(net, optimizer)
        torch.manual_seed(5)
        for step in range(3):
            assert torch.equal(torch.rand(2), expected[step])
            x, y = batch(hands.rank, step)
            mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    joined(mh.bsp(), loop, make=dropped, workers=1)

    def body(hands, net, _):
        torch.manual_seed(5)
        for step in range(3):
            assert torch.equal(torch.rand(2), expected[step])
            one_step(hands, step)

    stepped(mh.bsp(), body, make=dropped, workers=1)


def test_dropout_depends_on_rank_and_step_only():
    masks = {}

    def loop(hands, net, optimizer):
        def see(module, inputs, out):
            masks[hands.rank, step] = out == 0

        net[1].register_forward_hook(see)
        hands.prepare(net, optimizer)
        for step in range(3):
            torch.manual_seed(0)
            x, y = batch(hands.rank, step)
            mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    first = joined(mh.bsp(), loop, make=dropped)
    seen = dict(masks)
    masks.clear()
    close(joined(mh.bsp(), loop, make=dropped), first[0], 0)
    assert all(torch.equal(mask, masks[key]) for key, mask in seen.items())
    assert len({mask.numpy().tobytes() for mask in seen.values()}) == 6


# -- what people put around the passes -----------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_hooks_on_gradients_are_in_force_and_remain(name):
    """Those on tensors and those after accumulation."""

    def hooked():
        net = model()
        net[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        net[2].weight.register_post_accumulate_grad_hook(halve)
        return net

    def halve(p):
        p.grad.mul_(0.5)

    def scaled():
        """`alone` has two backward passes per step, so that its hook would halve the first one twice."""
        net = model()
        net[0].weight.register_hook(lambda g: (2 * g).clamp(-0.01, 0.01) / 2)
        net[2].weight.register_hook(lambda g: 0.5 * g)
        return net

    nets = trained(METHODS[name](), make=hooked)
    close(nets, alone(make=scaled))
    assert all(net[2].weight._post_accumulate_grad_hooks for net in nets)


@pytest.mark.parametrize("name", EXACT)
def test_autocast_is_the_scripts_own(name):
    class Bf16(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = model()

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                out = self.body(x)
            assert out.dtype == torch.bfloat16
            return out.float()

    close(trained(METHODS[name](), make=Bf16), alone(make=Bf16), 1e-3)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_works_in_both_forms(name, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.rest = nn.Linear(4, 8), chain(8, 8, 2)

        def forward(self, x):
            return checkpoint(self.rest, self.first(x), use_reentrant=reentrant)

    close(trained(METHODS[name](), make=Checkpointed), alone(make=Checkpointed))


@pytest.mark.parametrize("name", EXACT)
def test_a_compiled_model_trains(name):
    def loop(hands, net, optimizer):
        run, optimizer = hands.prepare(torch.compile(net, backend="eager"), optimizer)
        for step in range(4):
            x, y = batch(hands.rank, step)
            mse_loss(run(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    close(joined(METHODS[name](), loop), alone(steps=4))


def test_a_gradient_without_a_forward_pass_of_the_model_is_refused():
    """In bsp it is averaged as any other; a server must have admitted the worker before it computes."""

    def between(net, *_):
        net.zero_grad()
        x, y = batch(0, 0)
        mse_loss(net.forward(x), y).backward()

    def loop(hands, net, optimizer):
        hands.prepare(net, optimizer)
        between(net)
        optimizer.step()

    with pytest.raises(Refused, match=r"no forward pass of the prepared model: call the model itself"):
        joined(mh.ssp(), loop)
    assert distance(joined(mh.bsp(), loop)[0], fresh()) > 0


@pytest.mark.parametrize("name", EXACT)
def test_a_model_may_be_trained_in_eval_mode(name):
    def loop(hands, net, optimizer):
        hands.prepare(net, optimizer)
        net.eval()
        for step in range(4):
            x, y = batch(hands.rank, step)
            mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    close(joined(METHODS[name](), loop), alone(steps=4))


@pytest.mark.parametrize("name", EXACT)
def test_gradient_norms_for_logging_are_those_of_one_process_or_of_this_worker(name):
    """The mean gradient in bsp, the worker's own where a server applies it: it is what this worker sends."""
    norms = {}

    def look(net, optimizer, step):
        norms.setdefault(step, []).append(torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]).item())

    trained(METHODS[name](), look, steps=2)
    expected = []
    alone(lambda net, *_: expected.append(torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]).item()))
    if name == "bsp":
        assert norms[0] == pytest.approx([expected[0]] * 2)
    else:
        assert norms[0][0] != pytest.approx(norms[0][1])


@pytest.mark.parametrize("name", EXACT)
def test_every_group_can_be_clipped_by_itself(name):
    def clip(net, *_):
        torch.nn.utils.clip_grad_value_([net[0].weight], 1e-4)

    nets = trained(METHODS[name](), clip, optimizer=lambda net: sgd(net, momentum=0.0))
    assert (nets[0][0].weight - fresh()[0].weight).abs().max() <= STEPS * 0.05 * 1e-4 * 1.01


def scaled(name, infinite_at=None, clips=True, **options):
    """Train with a gradient scaler; in one step the loss of one worker is infinite."""
    taken = {}

    def loop(hands, net, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        hands.prepare(net, optimizer, scaler)
        for step in range(STEPS):
            x, y = batch(hands.rank, step)
            loss = mse_loss(net(x), y)
            scaler.scale(loss * float("inf") if (hands.rank, step) == (1, infinite_at) else loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        taken[hands.rank] = hands._joined.worker.step

    nets = joined(METHODS[name](), loop, optimizer=lambda net: sgd(net, **options))
    return nets, taken


def test_a_gradient_scaler_changes_nothing_but_the_range_of_numbers():
    def clip(net, *_):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)

    close(scaled("bsp")[0], alone(clip))


def test_a_scaler_skips_a_step_on_all_workers_where_gradients_are_averaged_and_on_one_where_not():
    nets, taken = scaled("bsp", infinite_at=3, clips=False)
    assert taken == {0: STEPS, 1: STEPS}
    close(nets[:1], nets[1], 0)
    _, taken = scaled("ssp", infinite_at=3, clips=False)
    assert taken == {0: STEPS, 1: STEPS - 1}


@pytest.mark.parametrize("name", ["bmuf", "d_psgd", "easgd", "hybrid"])
def test_a_scaler_is_refused_where_all_workers_take_equally_many_steps_by_their_own_gradients(name):
    with pytest.raises(Refused, match=r"given a GradScaler.*use autocast with bfloat16"):
        scaled(name)


def test_a_fused_optimizer_that_unscales_itself_is_refused_where_the_method_steps():
    with pytest.raises(Refused, match=r"fused optimizer.*scaler\.unscale_\(\) before"):
        scaled("ssp", clips=False, fused=True)


def test_the_answer_may_be_looked_at_between_accumulated_passes_where_replicas_are_equal():
    """As after an epoch whose last mini-batches do not make a step."""

    def loop(hands, net, optimizer):
        hands.prepare(net, optimizer)
        for step in range(STEPS):
            x, y = batch(hands.rank, step)
            (mse_loss(net(x), y) / 2).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
            seen.append(hands.evaluate(lambda one: mse_loss(one(X), Y).item()))

    seen = []
    left_alone = joined(mh.bsp(), lambda *args: loop(*args))
    assert len(set(seen)) == STEPS // 2 + 1
    reference = fresh()
    optimizer = sgd(reference)
    for step in range(STEPS):
        for rank in range(2):
            x, y = batch(rank, step)
            (mse_loss(reference(x), y) / 4).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    close(left_alone, reference)


def test_layers_are_unfrozen_in_a_later_phase_by_joining_again():
    """A second phase is another run of the same model, as real scripts join again."""
    nets = [fresh() for _ in range(2)]

    def phase(transport):
        net = nets[transport.rank]
        with Hands(transport, strategy=mh.bsp()) as hands:
            optimizer = sgd(net)
            hands.prepare(net, optimizer)
            for step in range(3):
                x, y = batch(hands.rank, step)
                mse_loss(net(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    for net in nets:
        net[0].requires_grad_(False)
    simulate(mh.Cluster(workers=2), phase)
    assert torch.equal(nets[0][0].weight, fresh()[0].weight)
    for net in nets:
        net[0].requires_grad_(True)
    simulate(mh.Cluster(workers=2), phase)
    assert not torch.equal(nets[0][0].weight, fresh()[0].weight)
    close(nets[:1], nets[1], 0)


def test_unfreezing_within_a_run_is_refused_with_the_way_out():
    def loop(hands, net, optimizer):
        net[0].requires_grad_(False)
        hands.prepare(net, optimizer)
        net[0].requires_grad_(True)
        x, y = batch(hands.rank, 0)
        mse_loss(net(x), y).backward()
        optimizer.step()

    with pytest.raises(Refused, match=r"was frozen when training began.*join again"):
        joined(mh.bsp(), loop)


def test_the_round_of_diloco_does_not_depend_on_how_the_loop_is_written(caplog):
    def per_epoch(hands, net, _):
        for _ in range(4):
            for x, y in hands.share(DATA, 4, epochs=1):
                hands.step(x, y)

    def at_once(hands, net, _):
        for x, y in hands.share(DATA, 4, epochs=4):
            hands.step(x, y)

    close(stepped(mh.diloco(), per_epoch), stepped(mh.diloco(), at_once)[0], 0)
    assert "a round has 500 steps, because the length of the run is unknown: set period" in caplog.messages


# -- loaders -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_workers": 1}, "num_workers"),
        ({"pin_memory": True}, "pin_memory"),
        ({"generator": torch.Generator()}, "generator"),
        ({"timeout": 5, "num_workers": 1}, "num_workers"),
        ({"drop_last": True}, "drop_last"),
    ],
)
def test_share_refuses_options_of_a_loader_that_it_would_drop(options, name):
    loader = DataLoader(DATA, batch_size=4, shuffle=True, **options)
    with pytest.raises(Refused, match=rf"the loader has {name}=.*prepare\(loader\)"):
        stepped(mh.bsp(), lambda hands, *_: list(hands.share(loader)))


def test_a_loop_of_steps_can_take_its_part_of_a_loader():
    def body(hands, net, _):
        loader = hands.prepare(DataLoader(DATA, batch_size=4, shuffle=True, drop_last=True))
        assert len(loader) == 5
        for x, y in loader:
            hands.step(x, y)

    nets = stepped(mh.bsp(), body)
    assert distance(nets[0], fresh()) > 0

"""Our tasks are what they say, learn what they promise, and refuse broken files by name."""

import gzip
import pickle
import struct
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.core.errors import Refused
from manyhands.core.work import work_of
from manyhands.splits.data import Share
from manyhands.tasks import NAMES, load
from manyhands.tasks.googlenet import Inception
from manyhands.tasks.mnist import FILES
from manyhands.tasks.parts import accuracy
from manyhands.tasks.rbm import Boltzmann, contrastive_divergence


def train(task, *, steps, batch_size, lr, seed=0):
    """Plain SGD; the losses and the model."""
    model = task.build(seed)
    share = Share(task.data, 0, 1, batch_size, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    losses = []
    for _ in range(steps):
        loss = task.loss_of(model, share.next_batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def score(task, model):
    x, y = task.test.tensors
    with torch.no_grad():
        return task.metric(model(x), y)


NO_CHAINS = ("rbm", "resnet-small", "rnn", "sparse")
"""They cannot be cut into layers that follow each other."""


def parameters(task):
    return sum(parameter.numel() for parameter in task.build(0).parameters())


def stages(model):
    """Children that have parameters: as many pipeline stages are possible."""
    assert isinstance(model, nn.Sequential)
    return sum(any(True for _ in child.parameters()) for child in model)


def refused(make, *args):
    with pytest.raises(Refused) as caught:
        make(*args)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_task_has_a_name_four_stages_and_can_be_sent_to_a_process(name, tmp_path):
    (tmp_path / "some.txt").write_text("to be, or not to be: " * 20)
    task = load(name, write_mnist(tmp_path) if name in ("mnist", "text", "rnn") else None)
    assert task.name == name
    assert task.batch_size == 32
    assert name in NO_CHAINS or stages(task.build(0)) >= 4
    copy = pickle.loads(pickle.dumps(task))
    assert len(copy.data) == len(task.data)


def test_importing_tasks_imports_none_of_them():
    code = (
        "import sys, manyhands.tasks\n"
        "print([m for m in sys.modules if m.startswith(('manyhands.tasks.', 'torch._dynamo'))])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_accuracy_is_the_share_of_right_answers():
    outputs = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [2.0, 3.0]])
    assert accuracy(outputs, torch.tensor([1, 1, 1, 1])) == 0.75


# --- digits


def test_digits_are_split_once_and_for_all():
    task = load("digits")
    (x, y), (x_test, y_test) = task.data.tensors, task.test.tensors
    assert (x.shape, x.dtype, y.dtype) == ((1437, 64), torch.float32, torch.int64)
    assert (x_test.shape, len(y_test)) == ((360, 64), 360)
    assert (x.min(), x.max()) == (0, 1)
    labels = torch.cat([y, y_test]).bincount().tolist()
    assert labels == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.equal(load("digits").data.tensors[0], x)


@pytest.mark.parametrize(("steps", "batch_size", "lr"), [(449, 128, 0.3), (1796, 32, 0.1)])
def test_digits_are_learned(steps, batch_size, lr):
    task = load("digits")
    _, model = train(task, steps=steps, batch_size=batch_size, lr=lr)
    assert score(task, model) >= 0.96


# --- mnist


def idx(magic, *dims, body):
    return struct.pack(f">{1 + len(dims)}I", magic, *dims) + body


def write_mnist(folder, **changed):
    """Three training images and two for the test; `changed` has other contents for some of the files."""
    good = {
        "train_images": idx(0x803, 3, 28, 28, body=bytes(2 * 784) + b"\xff" * 784),
        "train_labels": idx(0x801, 3, body=b"\x07\x02\x01"),
        "t10k_images": idx(0x803, 2, 28, 28, body=bytes(2 * 784)),
        "t10k_labels": idx(0x801, 2, body=b"\x00\x09"),
    }
    for (key, content), file in zip(good.items(), FILES, strict=True):
        (folder / file).write_bytes(gzip.compress(changed.get(key, content)))
    return folder


def test_mnist_files_are_read(tmp_path):
    task = load("mnist", write_mnist(tmp_path))
    x, y = task.data.tensors
    assert x.shape == (3, 784)
    assert x.sum(1).tolist() == [0, 0, 784]
    assert y.tolist() == [7, 2, 1]
    assert task.test.tensors[1].tolist() == [0, 9]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train_images", idx(0x801, 3, 28, 28, body=bytes(3 * 784)), "magic number of {} is 2049, but must be 2051"),
        ("train_labels", idx(0x803, 3, body=bytes(3)), "magic number of {} is 2051, but must be 2049"),
        ("train_images", idx(0x803, 3, 28, 27, body=b""), "size of an image in {} is (28, 27), but must be (28, 28)"),
        ("train_images", idx(0x803, 3, 28, 28, body=b"1"), "bytes after the header of {} is 1, but must be 2352"),
        ("train_labels", idx(0x801, 3, body=bytes(4)), "bytes after the header of {} is 4, but must be 3"),
        ("train_labels", idx(0x801, 2**32 - 1, body=b""), "header of {} is 0, but must be 4294967295"),
        ("train_labels", idx(0x801, 0, body=b""), "number of items in {} is 0, but must be >= 1"),
        ("train_labels", idx(0x801, 2, body=bytes(2)), "number of labels in {} is 2, but must be 3"),
        ("train_labels", idx(0x801, 3, body=b"\x01\x02\x0a"), "largest label in {} is 10, but must be < 10"),
        ("t10k_images", b"\x00\x00\x08", "length of {} is 3, but must be >= 16 bytes"),
        ("t10k_labels", b"", "length of {} is 0, but must be >= 8 bytes"),
    ],
)
def test_wrong_mnist_files_are_refused(tmp_path, file, content, message):
    write_mnist(tmp_path, **{file: content})
    path = next(tmp_path / name for name in FILES if name.startswith(file.replace("_", "-")))
    assert refused(load, "mnist", tmp_path).endswith(message.format(path))


@pytest.mark.parametrize(
    "spoil", [lambda b: b[:-9], lambda b: b[:5], lambda b: b"no gzip", lambda b: b[:-8] + bytes(8)]
)
def test_corrupt_gzip_is_refused(tmp_path, spoil):
    path = write_mnist(tmp_path) / FILES[0]
    path.write_bytes(spoil(path.read_bytes()))
    assert refused(load, "mnist", tmp_path).startswith(f"{path} is not a whole gzip file: ")


def test_mnist_says_what_it_needs(tmp_path):
    assert refused(load, "mnist") == f"the task mnist needs --data DIR, a folder with {', '.join(FILES)}"
    write_mnist(tmp_path)
    (tmp_path / FILES[3]).unlink()
    assert refused(load, "mnist", tmp_path).startswith(f"there is no file {tmp_path / FILES[3]}: ")
    assert refused(load, "mnist", tmp_path / FILES[0]).startswith("there is no file ")


def test_mnist_is_learned(data_dir):
    task = load("mnist", data_dir / "mnist")
    assert (len(task.data), len(task.test)) == (60_000, 10_000)
    _, model = train(task, steps=400, batch_size=128, lr=0.3)
    assert score(task, model) >= 0.93


# --- text


def test_text_is_cut_into_windows_without_copies(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("abcdefghij" * 100)
    task = load("text", tmp_path)
    x, y = task.data.tensors
    assert x.shape == (900 - 16, 16)
    assert x[3].tolist() == [(3 + i) % 10 for i in range(16)]
    assert y[3] == (3 + 16) % 10
    assert [*x[-1].tolist(), y[-1].item()] == [i % 10 for i in range(900 - 17, 900)]
    assert x.untyped_storage().nbytes() == 8 * 1000
    assert task.test.tensors[0].shape == (100 - 16, 16)
    assert task.epochs * len(task.data) == pytest.approx(128_000)


def test_the_vocabulary_is_the_sorted_set_of_characters(tmp_path):
    path = tmp_path / "greek.txt"
    path.write_text("ωa😀\n" * 50, encoding="utf-8")
    task = load("text", path)
    assert task.data.tensors[1][:4].tolist() == [2, 1, 3, 0]
    assert task.build(0)(task.data.tensors[0][:5]).shape == (5, 4)


def test_text_says_what_it_needs(tmp_path):
    assert refused(load, "text") == "the task text needs --data FILE, or a folder with exactly one .txt file"
    assert refused(load, "text", tmp_path / "none.txt") == f"there is no file {tmp_path / 'none.txt'}"
    bound = "1 (or name the file itself)"
    assert refused(load, "text", tmp_path) == f"the number of .txt files in {tmp_path} is 0, but must be {bound}"
    one, two = tmp_path / "1.txt", tmp_path / "2.txt"
    one.write_text("x" * 169)
    assert refused(load, "text", tmp_path) == f"the number of characters in {one} is 169, but must be >= 170"
    two.write_bytes(b"\xff" * 200)
    assert refused(load, "text", tmp_path) == f"the number of .txt files in {tmp_path} is 2, but must be {bound}"
    assert refused(load, "text", two).startswith(f"{two} is not a text in UTF-8: ")
    one.write_text("x" * 170)
    assert len(load("text", one).test) == 1


@pytest.mark.parametrize(("steps", "batch_size", "lr"), [(300, 128, 0.3), (700, 32, 0.1)])
def test_text_is_learned(data_dir, steps, batch_size, lr):
    task = load("text", data_dir / "text")
    losses, _ = train(task, steps=steps, batch_size=batch_size, lr=lr)
    assert sum(losses[-50:]) / 50 < 2.8


# --- regression


@pytest.mark.parametrize(("batch_size", "lr"), [(32, 0.1), (128, 0.3), (128, 0.02)])
def test_regression_loss_is_more_than_halved(batch_size, lr):
    task = load("regression")
    assert (len(task.data), len(task.test), task.metric) == (2048, 512, None)
    steps = int(task.epochs * len(task.data) / batch_size)
    losses, model = train(task, steps=steps, batch_size=batch_size, lr=lr)
    assert sum(losses[-20:]) / 20 < losses[0] / 4
    x, y = task.test.tensors
    assert task.loss(model(x), y) < y.var() / 4


def test_regression_is_made_the_same_each_time():
    torch.manual_seed(1)
    first = load("regression").data.tensors
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, load("regression").data.tensors, strict=True))


# --- rbm, rnn


def test_contrastive_divergence_by_hand():
    """One visible and one hidden unit that are certain: W = 1000, so all samples are given."""
    model = Boltzmann(1, 1)
    with torch.no_grad():
        model.weight.fill_(1000.0)
        model.hidden.fill_(-500.0)
        model.visible.fill_(-500.0)
    v0 = torch.tensor([[1.0], [0.0]])
    loss, gradient = contrastive_divergence(model, v0, v0)
    assert loss == 0 and all(not g.any() for g in gradient.values()), "it imagines what it sees"
    with torch.no_grad():
        model.visible.fill_(500.0)  # now it always imagines 1
    loss, gradient = contrastive_divergence(model, v0, v0)
    assert loss == 0.5
    assert {name: g.item() for name, g in gradient.items()} == {"weight": 0.5, "visible": 0.5, "hidden": 0.5}


def test_a_task_has_a_loss_or_a_gradient():
    with pytest.raises(Refused, match="loss and gradient are both given"):
        replace(load("digits"), gradient=contrastive_divergence)


def test_recurrent_and_plain_text_have_the_same_data(tmp_path):
    (tmp_path / "some.txt").write_text("to be, or not to be: " * 20)
    plain, recurrent = load("text", tmp_path), load("rnn", tmp_path)
    assert torch.equal(plain.data.tensors[0], recurrent.data.tensors[0])
    assert recurrent.build(0)(recurrent.data.tensors[0][:3]).shape == (3, 9)
    assert refused(load, "rnn", None).startswith("the task rnn needs --data FILE")


# --- networks for ImageNet


@pytest.mark.parametrize(
    ("name", "side", "count", "multiply_adds", "first"),
    [
        ("alexnet", 227, 60_965_224, 724_406_816, 105_415_200),
        ("googlenet", 224, 6_998_552, 1_582_671_872, 118_013_952),
        ("vgg16", 224, 138_357_544, 15_470_264_320, 86_704_128),
    ],
)
def test_networks_for_imagenet_have_the_sizes_of_the_paper_and_no_numbers(name, side, count, multiply_adds, first):
    """Three passes for each layer but the first, which needs no gradient of the image."""
    task = load(name)
    model = task.build(0)
    assert task.sizes_only and len(task.data) == 1_281_167
    assert parameters(task) == count
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    image, label = task.data[0]
    assert (image.shape, label.dtype, image.device.type) == ((3, side, side), torch.int64, "meta")
    assert model(torch.empty(2, 3, side, side, device="meta")).shape == (2, 1000)
    assert work_of(model).total == 6 * multiply_adds - 2 * first


def test_googlenet_is_22_layers_deep():
    layers = [module for module in load("googlenet").build(0).modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    branches = [module for module in load("googlenet").build(0) if isinstance(module, Inception)]
    assert len(branches) == 9 and len(layers) == 3 + 6 * 9 + 1
    assert 3 + 2 * len(branches) + 1 == 22


def test_half_of_the_channels_of_alexnet_see_half_of_the_layer_before():
    convolutions = [module for module in load("alexnet").build(0) if isinstance(module, nn.Conv2d)]
    assert [module.groups for module in convolutions] == [1, 2, 1, 2, 2]


# --- networks with convolutions


@pytest.mark.parametrize("name", ["cnn", "resnet-small"])
def test_images_of_digits_are_those_of_the_digits(name, tmp_path):
    task, mnist = load(name), load(name, write_mnist(tmp_path))
    assert task.data.tensors[0].shape == (1437, 1, 8, 8) and mnist.data.tensors[0].shape == (3, 1, 28, 28)
    assert torch.equal(task.test.tensors[0].flatten(1), load("digits").test.tensors[0])
    assert (task.name, mnist.name) == (name, name) and mnist.epochs < task.epochs
    for one in (task, mnist):
        assert one.build(0)(one.data.tensors[0][:2]).shape == (2, 10)
    assert "there is no file" in refused(load, name, tmp_path / "none")


@pytest.mark.parametrize("name", ["digits", "cnn", "resnet-small"])
def test_digits_are_learned_by_two_workers_in_the_epochs_of_the_task(name):
    assert mh.train(name, mh.bsp(), cluster=mh.Cluster(workers=2)).test_accuracy > 0.95


def test_a_small_cnn_computes_in_convolutions_and_has_its_weights_elsewhere():
    work = work_of(load("cnn").build(0))
    assert work.share(["0", "3"]).total > 0.85
    sizes = {name: p.numel() for name, p in load("cnn").build(0).named_parameters()}
    assert sizes["0.weight"] + sizes["3.weight"] < 0.4 * sum(sizes.values())


def test_a_residual_network_has_statistics_and_is_no_chain():
    model = load("resnet-small").build(0)
    assert sum(name.endswith("running_mean") for name, _ in model.named_buffers()) == 7
    assert not isinstance(model, nn.Sequential)
    block = model.blocks[0].eval()
    with torch.no_grad():
        for norm in (block.first_norm, block.second_norm):
            norm.weight.zero_()
    x = torch.rand(2, 16, 8, 8)
    assert torch.equal(block(x), x), "without its convolutions a block is the identity on what is not negative"


# --- by name


@pytest.mark.parametrize("name", ["digits", "regression", "rbm", "sparse", "alexnet", "googlenet", "vgg16"])
def test_data_that_would_not_be_read_is_refused(name, tmp_path):
    assert refused(load, name, tmp_path) == f'the task "{name}" reads no files: leave out --data {tmp_path}'


def test_an_unknown_name_is_refused_with_the_nearest():
    assert refused(load, "digit") == "there is no task 'digit': did you mean digits?"
    names = "digits, mnist, cnn, resnet-small, text, regression, rbm, rnn, sparse, alexnet, googlenet, vgg16"
    assert refused(load, "zzz") == f"there is no task 'zzz': known are {names}, module:function"


@pytest.fixture
def yours(tmp_path, monkeypatch):
    """A module of the user in the current directory."""
    (tmp_path / "my_own_task.py").write_text(
        "from manyhands.tasks.regression import regression\n"
        "def small():\n    return regression()\n"
        "def wrong():\n    return 3\n"
        "number = 4\n"
    )
    (tmp_path / "my_broken_task.py").write_text("import there_is_no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("my_own_task", None)


def test_your_own_task_is_found_in_the_current_directory(yours):
    assert load("my_own_task:small").name == "regression"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_own_task:wrong", '"my_own_task:wrong" returned an object of type int, but must return a Task'),
        ("my_own_task:none", 'the module "my_own_task" has no function "none"'),
        ("my_own_task:number", 'the module "my_own_task" has no function "number"'),
        ("my_other_task:small", 'there is no module "my_other_task" in {} or among the installed packages'),
        ("my_own_task.py:small", 'there is no module "my_own_task.py" in {} or among the installed packages'),
        (".relative:small", 'there is no module ".relative" in {} or among the installed packages'),
        ("my_own_task:", 'the task is "my_own_task:", but must be "module:function"'),
        (":small", 'the task is ":small", but must be "module:function"'),
        ("my_own_task:small:x", 'the task is "my_own_task:small:x", but must be "module:function"'),
    ],
)
def test_your_own_task_is_refused_with_the_reason(yours, name, message):
    assert refused(load, name) == message.format(yours)


def test_what_your_module_lacks_is_its_own_error(yours):
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module"):
        load("my_broken_task:small")


def test_your_own_task_takes_no_data(yours):
    message = f'the task "my_own_task:small" finds its data itself: leave out --data {yours}'
    assert refused(load, "my_own_task:small", yours) == message

"""What `manyhands run` refuses before it starts a rank."""

import pytest


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("raise SystemExit('it has been started')")
    return path


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--method", "sspp"), "there is no method 'sspp': did you mean ssp"),
        (("--method", "ssp:staleness=x"), "staleness is 'x', but must be a whole number"),
        (("--adapters", "tensorboard"), "adapters is tensorboard, but must be left out without --out DIR"),
        (("--out", "mine", "--adapters", "wandb"), "there is no adapter 'wandb'"),
    ],
)
def test_nonsense_is_refused_in_one_line(manyhands, script, tmp_path, words, says):
    done = manyhands("run", *words, script)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"manyhands: {says}") and done.stderr.count("\n") == 1
    assert not (tmp_path / "mine").exists()

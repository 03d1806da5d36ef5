"""`manyhands cost` prints each layer, the totals, and what was not counted."""

import json

from manyhands.cli import main


def test_the_table_of_vgg16(capsys):
    assert main(["cost", "vgg16"]) == 0
    out = capsys.readouterr().out
    row = next(" ".join(line.split()) for line in out.splitlines() if line.startswith(" 32 "))
    assert row == "32 fully connected 4096 102,764,544 74.3 % 102,760,448 0.665 % 826 MB 15 219,222,289"
    assert "15.5 G multiply-adds in the forward pass, 92.6 G operations in training" in out
    assert "Convolutions hold 10.6 % of the parameters and do 99.2 % of the work" in out


def test_one_object(capsys):
    assert main(["cost", "alexnet", "--json", "--batch-size", "128"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["task"], found["batch_size"], found["parameters"]) == ("alexnet", 128, 60_965_224)
    assert found["multiply_adds"] == 724_406_816 and found["why_estimated"] is None and found["work_given"] is False
    assert found["work"] == sum(sum(layer["work"].values()) for layer in found["layers"])
    assert found["layers"][0]["work"] == {"forward": 210_830_400, "to_input": 0, "to_weights": 210_830_400}
    assert found["layers"][2] == {
        "name": "2",
        "kind": "LocalResponseNorm",
        "output": [96, 55, 55],
        "parameters": 0,
        "multiply_adds": 0,
        "work": {"forward": 0, "to_input": 0, "to_weights": 0},
        "storage": 128 * 4 * 2 * 96 * 55 * 55,
        "depth": None,
        "parallelism": None,
        "weight_bytes": 0,
        "input_bytes": 4 * 96 * 55 * 55,
        "output_bytes": 4 * 96 * 55 * 55,
    }
    assert set(found["kinds"]) == {"convolution", "fully connected"}


def test_what_is_estimated_or_given_is_said(capsys):
    assert main(["cost", "rbm"]) == 0
    out = capsys.readouterr().out
    assert "The work is not counted but estimated from the parameters: the task computes its gradient without" in out
    assert "of the work" not in out.partition("parameters: ")[2]
    assert main(["cost", "sparse"]) == 0
    assert "A sample takes 384 operations in training, as the task says" in capsys.readouterr().out


def test_what_each_layer_sends(capsys):
    assert main(["cost", "alexnet", "--split", "--workers", "8", "--batch-size", "128"]) == 0
    out = capsys.readouterr().out
    assert "8 workers sends in a step, in which each has b = 128 samples, 1024 together" in out
    assert "Divided by samples alone, it sends 427 MB; the cheapest plan sends 119 MB, 27.9 % of that" in out
    assert "As 8 stages of a pipeline, which begin at the first layer and 4 and 8" in out


def test_what_each_layer_sends_as_one_object(capsys):
    assert main(["cost", "vgg16", "--split", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["task"], found["ranks"], found["batch_size"]) == ("vgg16", 2, 32)
    assert found["layers"][13] == {
        "name": "32",
        "kind": "fully connected",
        "data": 4 * 102_764_544,
        "gathered": 4 * 64 * 4096,
        "summed": 4 * 2 * 64 * 4096,
        "examples": 4 * 64 * 25088,
        "data_wins_from": 12_545,
        "way": "out",
        "join": "gathered",
    }
    assert found["cheapest"] < 0.2 * found["data"] and len(found["stages"]["first"]) == 1


def test_refusals(capsys):
    for words, message in (
        (["cost", "mnist"], "the task mnist needs --data DIR"),
        (["cost", "vgg"], "there is no task 'vgg': did you mean vgg16?"),
        (["cost", "digits", "--batch-size", "0"], "batch_size is 0, but must be >= 1"),
        (["cost", "digits", "--workers", "3"], "workers is 3, but must be left out without --method or --split"),
        (["cost", "digits", "--split", "--workers", "1"], "workers is 1, but must be >= 2"),
        (["cost"], "TASK"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_help_has_examples(capsys):
    assert main(["cost", "--help"]) == 0
    assert "manyhands cost alexnet --json" in capsys.readouterr().out


def test_the_ranks_of_a_pipeline(capsys):
    assert main(["cost", "digits", "--method", "pipedream", "--workers", "3"]) == 0
    out = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "0 0 8,320 17.8 % 66.7 % 33.3 kB 33.3 kB 0 B 3: 99.8 kB 3: 73.7 kB 240 kB" in rows
    assert "pipedream on digits: mini-batches of 32 samples in one piece." in out
    assert "Its ranks are idle 37.6 % of the time, so that it is 1.87 times as fast as one worker" in out


def test_the_ranks_of_a_pipeline_as_one_object(capsys):
    words = ["cost", "digits", "--method", "gpipe:micro_batches=2", "--workers", "2", "--batch-size", "8", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["task"], found["method"], found["workers"]) == ("digits", "gpipe:micro_batches=2", 2)
    assert (found["batch_size"], found["micro_batches"]) == (8, 2)
    first = found["ranks"][0]
    kinds = ("weights", "gradient", "optimizer", "version_bytes", "activations")
    assert first["total"] == sum(first[kind] for kind in kinds) and first["in_flight"] == 2 and first["versions"] == 1


def test_planned_stages_are_shown_with_their_replicas(capsys):
    words = ["cost", "vgg16", "--method", "pipedream:replicas=planned,bandwidth=100Mbit", "--workers", "4"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Planned: stage 0 on 3 ranks; stage 1, from layer 21, on 1 rank." in out
    assert [line.split()[:2] for line in out.splitlines() if line.split()[2:3] in (["5,275,456"], ["133,082,088"])] == [
        ["0", "0"],
        ["1", "0"],
        ["2", "0"],
        ["3", "1"],
    ]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"] == {"cut": "21", "stage_replicas": [3, 1]}


def test_what_has_no_ranks_to_predict_is_refused(capsys):
    for words, message in (
        (["--method", "bsp"], "bsp divides no model among its workers"),
        (["--method", "gpipe", "--workers", "5"], "the number of stages is 5, but must be <= 4"),
        (["--method", "pipedream-2bw:micro_batches=2"], "micro_batches is 2, but must be >= 3"),
        (["--method", "pipedream:replicas=planned,cut=2"], "cut is 2, but must be left out: replicas is 'planned'"),
        (["--workers", "2"], "workers is 2, but must be left out without --method"),
        (["--method", "gpipe", "--workers", "0"], "workers is 0, but must be >= 1"),
    ):
        assert main(["cost", "digits", *words]) == 2
        assert message in capsys.readouterr().err

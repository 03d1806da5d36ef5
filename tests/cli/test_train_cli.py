"""What a user sees of `manyhands`: exit codes, one line for an error, one JSON object for a result."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "manyhands.cli"]
FIELDS = {
    *("method", "world", "workers", "servers", "steps", "seconds", "wall_seconds", "samples_per_second", "final_loss"),
    *("test_accuracy", "bytes_sent", "lag", "mean_lag", "max_lag", "dropped", "dropped_mean_lag", "mean_apart"),
    *("max_apart", "max_ahead", "waited_seconds", "memory", "weights_sha256", "record", "task"),
    *("seed", "lost", "link", "stopped_at"),
}


def refused(done, *says):
    """It ended with 2, said why in one line on stderr and nothing on stdout."""
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("manyhands: ") and done.stderr.count("\n") == 1
    for words in says:
        assert words in done.stderr
    return True


# What is said without training


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_help_has_examples_and_exit_codes(manyhands, words):
    done = manyhands(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "examples:" in done.stdout
    for meaning in ("0 done", "1 error", "2 bad", "3 a peer was lost", "4 training", "130 interrupted", "143 stopped"):
        assert meaning in done.stdout


def test_version(manyhands):
    assert re.fullmatch(r"manyhands \d+\.\d+\.\d+\S*\n", manyhands("--version").stdout)


@pytest.mark.parametrize("verb", ["train", "run", "list", "explain", "env", "bench"])
def test_every_verb_has_help_with_examples(manyhands, verb):
    done = manyhands(verb, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: manyhands {verb}" in done.stdout and "examples:" in done.stdout


def test_help_of_a_method_shows_its_knobs_and_all_options(manyhands):
    text = manyhands("train", "ssp", "--help").stdout
    flags = "staleness lr codec task workers servers steps epochs batch-size seed virtual cluster data out json"
    flags += " link bind checkpoint-every resume"
    for flag in re.findall(r"\S+", flags):
        assert f"--{flag}" in text
    assert "(default: 3)" in text and "examples:" in text


def test_wrong_names_are_refused_with_the_nearest(manyhands):
    assert refused(manyhands("trian"), "verb 'trian'", "did you mean train?")
    assert refused(manyhands("train", "spp"), "method 'spp'", "ssp")
    assert refused(manyhands("train", "nonsense"), "known are", "pipedream")
    assert refused(manyhands("explain", "pipe-dream"), "pipedream")
    assert refused(manyhands("train", "ssp", "--stalenes", 3), "--stalenes", "did you mean --staleness")
    assert refused(manyhands("train", "ssp:stalenes=3", "--virtual"), "did you mean staleness?")
    assert refused(manyhands("list", "--jsn"), "--json")


def test_wrong_values_are_refused(manyhands):
    assert refused(manyhands("train"), "name the method first")
    assert refused(manyhands("train", "--virtual", "ssp"), "name the method first")
    assert refused(manyhands("train", "ssp", "--link", "udp"), "--link", "udp")
    assert refused(manyhands("train", "ssp", "--checkpoint-every", 0), "checkpoint_every is 0, but must be > 0")
    assert refused(manyhands("train", "ssp", "--virtual", "--steps", 3, "--epochs", 2), "only one")
    assert refused(manyhands("train", "ssp", "--staleness", "far"), "--staleness", "far")
    assert refused(manyhands("train", "ssp", "--virtual", "--codec", "topk(1+1)"), "1 + 1")
    assert refused(manyhands("train", "ssp", "--virtual", "--workers", 0), "workers is 0, but must be >= 1")
    assert refused(manyhands("train", "ssp", "--virtual", "--batch-size", 0), "batch_size is 0")
    assert refused(manyhands("train", "ssp", "--cluster", "none.toml"), "none.toml")
    assert refused(manyhands("train", "ssp", "--task", "mnist", "--data", "nowhere"), "nowhere")
    assert refused(manyhands("train", "ssp", "--resume", "nowhere"), "nowhere holds no checkpoint")
    assert refused(manyhands("explain"), "METHOD")


@pytest.mark.parametrize("virtual", [("--virtual",), ("--cluster", "cluster.toml")])
@pytest.mark.parametrize(("flag", "value"), [("link", "tcp"), ("bind", "127.0.0.1")])
def test_a_virtual_cluster_has_links_of_its_own(manyhands, tmp_path, virtual, flag, value):
    (tmp_path / "cluster.toml").write_text("workers = 2\n")
    done = manyhands("train", "ssp", *virtual, f"--{flag}", value)
    assert refused(done, f"{flag} is {value}, but must be left out", "links of its own")


def test_an_address_that_is_not_local_is_refused(manyhands):
    assert refused(manyhands("train", "ssp", "--bind", "127.0.0.1"), "bind is 127.0.0.1", "--link tcp")


def test_list_as_json(manyhands):
    listed = json.loads(manyhands("list", "--json").stdout)
    assert {"name", "family", "paper", "file", "recipe", "summary", "knobs"} <= set(listed[0])
    assert {"name": "ssp", "family": "stale"}.items() <= next(m for m in listed if m["name"] == "ssp").items()


def test_list_as_a_table(manyhands):
    done = manyhands("list")
    assert "pipedream" in done.stdout and "asynchronous" in done.stdout


def test_explain_leads_to_the_loops(manyhands):
    text = manyhands("explain", "ssp").stdout
    assert "--staleness" in text and "Q. Ho et al." in text
    assert re.search(r"strategies/server\.py:\d+", text) and re.search(r"servers/\w+\.py:\d+", text)
    assert "def step(" in text


def test_explain_as_json_points_at_lines_of_source(manyhands):
    card = json.loads(manyhands("explain", "ssp", "--json").stdout)
    for loop in card["loops"]:
        assert loop["line"] > 0 and loop["source"].startswith(("def ", "class "))


def test_env(manyhands):
    facts = json.loads(manyhands("env", "--json").stdout)
    assert facts["torch"].startswith("2.") and facts["c_kernels"] in ("compiled", "fallback") and facts["cores"] >= 1
    assert (facts["shared_memory"], facts["loopback"]) == ("works", "works") and "gloo" in facts["torch_distributed"]
    assert 0 < facts["free_memory_bytes"] <= facts["memory_bytes"] and facts["msgpack"] and facts["safetensors"]
    table = manyhands("env").stdout
    assert re.search(r"shared memory +works", table) and re.search(r"free memory +\d+\.\d GiB", table)


def test_a_reader_who_goes_away_is_no_error(tmp_path):
    done = subprocess.run(
        ["bash", "-c", '"$@" | true; exit ${PIPESTATUS[0]}', "bash", *COMMAND, "explain", "ssp"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_no_color_is_respected(tmp_path):
    force = {**os.environ, "FORCE_COLOR": "1"}
    plain = subprocess.run([*COMMAND, "list"], capture_output=True, text=True, env={**force, "NO_COLOR": "1"})
    colour = subprocess.run([*COMMAND, "list"], capture_output=True, text=True, env=force)
    assert "\x1b[" in colour.stdout and not re.search(r"\x1b\[[0-9;]*3[0-9]", plain.stdout)


# What trains


SHORT = ("--virtual", "--workers", 2, "--steps", 8)


def test_train_prints_one_json_object(manyhands, tmp_path):
    done = manyhands("train", "ssp", *SHORT, "--json", "--seed", 3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert set(result) == FIELDS
    assert result["method"] == "ssp" and result["world"] == "virtual" and result["workers"] == 2
    assert result["link"] is None and result["stopped_at"] is None
    assert result["lost"] == [] and result["seed"] == 3 and result["task"] == "digits"
    assert re.fullmatch(r"runs/ssp-digits-\d{8}-\d{6}/\S+", result["record"])
    assert (tmp_path / result["record"]).stat().st_size > 0


def test_progress_is_plain_lines_on_stderr(manyhands):
    lines = manyhands("train", "bsp", *SHORT, "--json").stderr.splitlines()
    assert "bsp on digits" in lines[0]
    assert 2 <= len(lines) <= 12 and all("loss" in line and "samples/s" in line for line in lines[1:])


def test_the_summary_is_for_people(manyhands):
    done = manyhands("train", "bsp", *SHORT)
    assert "test accuracy" in done.stdout and "virtual seconds" in done.stdout and "runs/bsp-digits-" in done.stdout


def test_the_same_seed_gives_the_same_weights(manyhands):
    digests = [
        json.loads(manyhands("train", method, *SHORT, "--json", *rest).stdout)["weights_sha256"]
        for method, rest in [
            ("ssp:staleness=1,codec=feedback(topk(0.01))", ()),
            ("ssp", ("--staleness", 1, "--codec", "feedback(topk(0.01))")),
            ("ssp", ("--seed", 1)),
        ]
    ]
    assert digests[0] == digests[1] != digests[2]


def test_a_spring_in_half_precision_sends_half_as_much(manyhands):
    words = ("train", "easgd", *SHORT, "--asynchronous", "--servers", 1, "--json")
    raw, half = (json.loads(manyhands(*words, *more).stdout)["bytes_sent"] for more in ((), ("--codec", "half")))
    assert 0.5 * raw <= half < 0.6 * raw
    assert refused(manyhands("train", "easgd", *SHORT, "--codec", "feedback(half)"), "must be one without a memory")


def test_the_command_line_wins_over_the_cluster_file(manyhands, tmp_path):
    (tmp_path / "cluster.toml").write_text('workers = 3\nservers = 2\nbandwidth = "1Gbit"\n')
    words = ("train", "ssp", "--cluster", "cluster.toml", "--steps", 4, "--json")
    sizes = [json.loads(manyhands(*words, *more).stdout) for more in ((), ("--workers", 2, "--servers", 1))]
    assert [(size["workers"], size["servers"]) for size in sizes] == [(3, 2), (2, 1)]


def test_out_is_where_the_record_goes(manyhands, tmp_path):
    result = json.loads(manyhands("train", "bsp", *SHORT, "--out", "here", "--json").stdout)
    assert result["record"].startswith("here/") and not (tmp_path / "runs").exists()


def test_a_refused_setting_leaves_no_folder(manyhands, tmp_path):
    assert refused(manyhands("train", "ssp", *SHORT, "--staleness", -1), "staleness is -1, but must be >= 0")
    assert refused(manyhands("train", "ssp", *SHORT, "--task", "digit"), "digit")
    assert not list(tmp_path.glob("runs/*"))


def test_a_lost_peer_ends_a_synchronous_run_with_3(manyhands, tmp_path):
    (tmp_path / "cluster.toml").write_text('workers = 2\n[[faults]]\nkind = "die"\nrank = 1\nat = 0.0001\n')
    done = manyhands("train", "bsp", "--cluster", "cluster.toml", "--steps", 50)
    assert done.returncode == 3, done.stderr
    assert "rank 1 is lost" in done.stderr.splitlines()[-1] and done.stdout == ""


def test_divergence_ends_with_4(manyhands):
    done = manyhands("train", "bsp", "--virtual", "--lr", 1e30, "--steps", 50)
    assert done.returncode == 4, done.stderr
    assert "diverged" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_debug_shows_where_an_error_came_from(manyhands):
    assert "Traceback" in manyhands("--debug", "train", "ssp", *SHORT, "--staleness", -1).stderr


def test_ctrl_c_ends_with_130(tmp_path):
    words = [*COMMAND, "train", "ssp", "--virtual", "--epochs", "100000"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as running:
        first = running.stderr.readline()  # it has begun
        running.send_signal(signal.SIGINT)
        out, rest = running.communicate()
    assert "ssp on digits" in first
    assert running.returncode == 130 and out == "" and "Traceback" not in rest
    assert rest.splitlines()[-1] == "manyhands: interrupted"


def test_a_rule_brings_its_own_learning_rate(manyhands):
    done = manyhands("train", "ssp", "--virtual", "--lr", "0.2", "--rule", "adam(lr=0.001)")
    assert refused(done, "lr is 0.2, but the rule has a learning rate of its own")

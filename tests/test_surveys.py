"""The experiments of examples/surveys: what they print, what they count, and the numbers they stand on."""

import json
import os
import re
import subprocess
import sys
from fractions import Fraction
from importlib import import_module
from pathlib import Path

import pytest

SURVEYS = Path(__file__).parents[1] / "examples" / "surveys"


@pytest.fixture(scope="module")
def script():
    """A script as a module, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SURVEYS)
        yield import_module


def say(name, cwd):
    """What a script prints when it runs as it is, line by line; its figure must be there."""
    done = subprocess.run(
        [sys.executable, SURVEYS / f"{name}.py", "--small"],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    (page,) = (cwd / "runs" / "surveys" / name).iterdir()
    assert f"figure {page.relative_to(cwd)}" in done.stdout
    return done.stdout.splitlines()


def numbers(line):
    return [float(word.replace(",", "")) for word in re.findall(r"(?<!\S)[+-]?\d[\d,]*\.?\d*(?=%|\s|$)", line)]


# -- a figure ---------------------------------------------------------------------------------------

FIGURE = {"data": [{"type": "bar", "x": ["a < b"], "y": [1.5]}], "layout": {"title": {"text": "</script>"}}}


def test_a_page_has_everything_it_needs(script, tmp_path):
    said = script("_drawing").draw(FIGURE, tmp_path / "new" / "page.html")
    page = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    assert said == f"figure {tmp_path / 'new' / 'page.html'}"
    assert "Plotly.newPlot" in page and not re.search(r"<(script|link)[^>]*(src|href)=", page)
    assert json.loads(re.search(r'application/json">(.*?)</script>', page, re.S)[1]) == FIGURE


# -- parameter sharding -----------------------------------------------------------------------------

TOTAL = 138_357_544


@pytest.fixture(scope="module")
def sharding(script):
    return script("parameter_sharding")


def test_parameter_sharding_prints_its_table(tmp_path):
    lines = say("parameter_sharding", tmp_path)
    assert f"{TOTAL:,} parameters" in lines[0] and "CHOICE" in lines[1] and "FITTED" in lines[2]
    rows = {line[:24].strip(): numbers(line[24:]) for line in lines}
    assert rows["by layer formula"] == [1.00, 1.69, 2.81, 4.11]
    assert rows["by size  formula"] == [1.00, 1.69, 3.38, 6.75]
    assert rows["4 workers, fitted"][:2] == [20, 20.0]
    assert rows["8 workers"][:2] == [66, 64.2]
    text = " ".join(lines)
    assert "an input, not a prediction" in text and "consistent with the paper, and no more" in text


def test_the_layers_of_vgg16(sharding):
    """13 convolutions and 3 linear layers; as many servers as layers keep one each."""
    convolutions = [1_792, 36_928, 73_856, 147_584, 295_168, 590_080, 590_080, 1_180_160, *[2_359_808] * 5]
    assert sharding.shard_sizes("round-robin", 16) == [*convolutions, 102_764_544, 16_781_312, 4_097_000]
    assert sharding.shard_sizes("size", 1) == [TOTAL]


@pytest.mark.parametrize(
    ("rule", "fullest", "wire", "fitted", "predicted"),
    [
        ("round-robin", (113_535_912, 105_751_360), (1.4533, 2.7072), 1.953, 0.64),
        ("layer", (102_764_544, 102_764_544), (1.3154, 2.6308), 1.264, 0.81),
        ("blocks", (135_441_896, 126_002_664), (1.7337, 3.2257), 3.355, 0.55),
        ("variables", (138_344_128, 113_528_832), (1.7708, 2.9063), 3.541, 0.46),
    ],
)
def test_what_the_closed_form_says_of_every_rule(sharding, rule, fullest, wire, fitted, predicted):
    assert tuple(max(sharding.shard_sizes(rule, servers)) for servers in (2, 4)) == fullest
    assert all(sum(sharding.shard_sizes(rule, servers)) == TOTAL for servers in (1, 2, 4))
    assert [sharding.wire_seconds(rule, workers) for workers in (4, 8)] == pytest.approx(wire, abs=5e-5)
    t_c = sharding.fitted_seconds(rule)
    assert t_c / 2 == pytest.approx(fitted, abs=1e-3)
    steps = sharding.steps_by_formula(rule, t_c)
    assert sharding.gap(steps, 4) == pytest.approx(0.20)
    assert sharding.gap(steps, 8) == pytest.approx(predicted, abs=5e-3)


def test_by_size_the_wire_is_as_busy_with_any_number_of_workers(sharding):
    seconds = [sharding.wire_seconds("size", workers) for workers in (2, 4, 8)]
    assert seconds == pytest.approx([0.8855] * 3, abs=5e-5)


def test_a_step_of_one_worker_is_its_terms_to_the_last_one(sharding):
    """Compute for t_c, both ways over the wire, add up one gradient; four messages' latency at most."""
    adding = TOTAL * 4 / 8e9
    assert sharding.run("size", 1, 3.0, 2) == pytest.approx(3.0 + 2 * TOTAL * 4 / 1.25e9 + adding, abs=4 * 50e-6)


@pytest.mark.parametrize("rule", ["round-robin", "layer"])
def test_runs_agree_with_the_closed_form(sharding, rule):
    """Steps within 4 % of the formula and the sums of the fullest server, speed-ups within 6 % of the formula alone.

    The gap at 8 workers, where both err, is within 8 points.
    """
    t_c = sharding.fitted_seconds(rule)
    formula, ours = sharding.steps_by_formula(rule, t_c), sharding.steps_by_run(rule, t_c, steps=8)
    for how, way in (("layer", rule), ("size", "size")):
        fullest = {workers: max(sharding.shard_sizes(way, sharding.servers_of(workers))) for workers in formula[how]}
        expected = [formula[how][workers] + workers * fullest[workers] * 4 / 8e9 for workers in formula[how]]
        assert list(ours[how].values()) == pytest.approx(expected, rel=0.04)
        assert sharding.speed_ups(ours[how]) == pytest.approx(sharding.speed_ups(formula[how]), rel=0.06)
    for workers in (1, 2):
        assert sharding.gap(ours, workers) == pytest.approx(0, abs=1e-12), "with one server nothing is to be assigned"
    assert 0.15 < sharding.gap(ours, 4) < 0.25
    assert sharding.gap(ours, 8) > 2 * sharding.gap(ours, 4)
    assert sharding.gap(ours, 8) == pytest.approx(sharding.gap(formula, 8), abs=0.08)


def test_the_time_that_a_step_computes_may_be_given(sharding, tmp_path, capsys):
    sharding.main(["--compute-seconds", "1", "--rule", "layer", "--small", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "largest first" in said and "1.000 s" in said and "FITTED" not in said and "an input" not in said
    with pytest.raises(SystemExit):
        sharding.main(["--compute-seconds", "0"])
    assert "compute_seconds is 0.0, but must be > 0" in capsys.readouterr().err


# -- traffic ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traffic(script):
    return script("traffic_table")


def test_traffic_table_prints_its_table(tmp_path):
    """N = 64, L = 8, T = 16, M = 16, K = 4, tau = 2: 33,280 parameters with biases."""
    lines = say("traffic_table", tmp_path)
    cells = {line[14:31].strip(): numbers(line[49:]) for line in lines[2:9]}
    both_ways = 2 * 16 * 33_280
    for method in ("bsp-server", "downpour", "ssp"):
        assert cells[method] == [524_288, both_ways, 2.0312, 2.0312, both_ways]
    rounds, machines = 16 // 4 // 2, 4
    averages = rounds * machines * 1.5 * 33_280
    assert cells["model-averaging"] == [262_144, averages, 1.5234, 1.5234, averages]
    for method in ("pipedream", "weight-copies"):
        assert cells[method] == [64 * 16 * 16, 2 * 64 * 16 * 16, 2, 2, 3 * 2 * 64 * 16 * 16]
    start = next(number for number, line in enumerate(lines) if line.startswith("method  "))
    work = {line[:17].strip(): numbers(line[17:]) for line in lines[start + 1 : start + 7]}
    assert {tuple(row[:4]) for row in work.values()} == {(64**2 * 8 * 16 * 16 / 4, 12_058_624, 5.75, 5.75)}
    served = {method: row[5] / 33_280 for method, row in work.items()}
    assert served == {
        "bsp-server": 16,
        "model-averaging": rounds * machines * 2,
        "downpour": 32,
        "ssp": 32,
        "pipedream": 0,
        "weight-copies": 2 * 15,  # two rounds of seven mini-batches
    }
    (quotient,) = (line for line in lines if "asynchronous / pipelined" in line)
    assert numbers(quotient) == [32.0, 32.5, 1.0156, 1.0156]


@pytest.mark.parametrize(
    "letters",
    [
        {"N": 64, "L": 8, "T": 16, "M": 16, "K": 4, "tau": 2},
        {"N": 91, "L": 5, "T": 7, "M": 18, "K": 3, "tau": 3},
        {"N": 64, "L": 7, "T": 5, "M": 12, "K": 2, "tau": 1},
    ],
    ids=str,
)
def test_what_is_sent_is_the_formula_times_what_is_explained(traffic, letters):
    """To the last number, also where nothing can be divided evenly."""
    setting = traffic.Setting(**letters)
    table = traffic.rows(setting)
    assert [row.method for row in table] == [
        "bsp-server",
        "model-averaging",
        "downpour",
        "ssp",
        "pipedream",
        "weight-copies",
    ]
    counts = [traffic.count(row, setting) for row in table]
    sent = [found.sent / row.links for row, found in zip(table, counts, strict=True)]
    assert sent == [row.formula * row.constant for row in table]
    assert [found.averaged for found in counts] == [row.averaging * row.averaging_constant for row in table]
    passes = setting.weights * setting.T * setting.M * traffic.passes_of(setting)
    assert [float(found.operations) for found in counts] == pytest.approx([float(passes)] * 6, rel=1e-9)
    quotient = sent[2] / sent[4]
    assert quotient == Fraction(letters["N"] * letters["L"], letters["T"]) * (1 + Fraction(1, letters["N"]))


def test_the_formulas_are_those_of_the_survey(traffic):
    """The example of N = 1000, L = 8, T = 256, M = 100, K = 4 and tau = 10."""
    table = traffic.rows(traffic.Setting(N=1000, L=8, T=256, M=100, K=4, tau=10))
    formulas = {row.family + (" in rounds" if "tau" in row.paper[-3:] else ""): row.formula for row in table}
    assert formulas["synchronous in rounds"] == 8 * 10**7
    assert formulas["asynchronous"] == 8 * 10**8
    assert formulas["pipelined"] == 256 * 10**5
    assert formulas["asynchronous"] / formulas["pipelined"] == Fraction(3125, 100)
    assert {row.method: row.averaging for row in table} == {
        "bsp-server": 8 * 10**8,
        "model-averaging": 8 * 10**7,
        "downpour": 8 * 10**8,
        "ssp": 8 * 10**8,
        "pipedream": 8 * 10**8,
        "weight-copies": 8 * 10**8,
    }


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--batches", "81"], "batches is 81, but must be a multiple of 4 workers x 10"),
        (["--neurons", "32"], "8 layers of 32 neurons are small, but must have more than 64 KiB"),
    ],
)
def test_what_cannot_be_counted_to_the_last_number_is_refused(traffic, capsys, words, why):
    with pytest.raises(SystemExit):
        traffic.main(words)
    assert why in capsys.readouterr().err


# -- time to target ---------------------------------------------------------------------------------


def test_time_to_target_prints_papers_beside_ours(tmp_path):
    said = say("time_to_target", tmp_path)
    methods = ("bsp", "ssp", "downpour", "dc-asgd", "easgd", "bmuf")
    rows = [line.split() for line in said if line.split()[:1] and line.split()[0] in methods]
    assert [row[0] for row in rows] == [*methods, *methods], "seconds, then samples per second"
    rates = {name: [float(cell.replace(",", "")) for cell in cells] for name, *cells in rows[len(methods) :]}
    assert all(few < many for few, many in rates.values()), "more workers get through more samples"
    assert rates["downpour"][1] > 1.2 * rates["bsp"][1], "where nobody waits for the slow"
    start = next(n for n, line in enumerate(said) if line.startswith("what the paper says"))
    claims = said[start + 1 : start + 5]
    assert [line.split(":")[0] for line in claims] == ["SSP", "EASGD", "DC-ASGD", "BMUF"]
    assert all(re.search(r"yes|near-linear", line) for line in claims)


def test_its_clusters_have_one_slow_worker_of_eight(script):
    slow = script("time_to_target").cluster(64).stragglers
    assert list(slow.ranks) == list(range(0, 64, 8)) and slow.factor == 2

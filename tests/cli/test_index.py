"""The index reads recipes from source alone, and the real catalog keeps to its form."""

import re
import subprocess
import sys
from dataclasses import fields
from textwrap import dedent
from typing import Literal, get_args

import pytest

from manyhands.cli.explain import LABELS, facts, find, trait_lines, traits_of
from manyhands.cli.options import RunOptions
from manyhands.core.method_index import PACKAGE, Loop, methods, read_card

RECIPES = '''
    """A family."""

    raise RuntimeError("this must not run")

    Mode = Literal["plain", "fancy"]
    RAW = Raw()
    LR = 0.1

    def _hidden(): ...

    def two_step(staleness: int, lr: float | None = LR, *, codec: Codec = RAW, rule: Rule | None = None,
                 mode: Mode = "plain", fast: bool = False) -> Server:
        """Workers walk in twos.

        split  the data
        when   sometimes

            w <- w - lr g

        Reference: A. Author, "On: walking", 2001,
        https://example.org/walk
        Loops: strategies/walk.py Walk.step; strategies/walk.py run

        Where we differ: we run.

        Args:
            staleness: s, how far
                ahead: at most.
            lr: η.
        """

    def plain(): ...
'''
LOOPS = '''
    """Loops."""

    def run():
        return 1

    class Walk:
        @property
        def step(self):
            return 2
'''


@pytest.fixture
def package(tmp_path):
    package = tmp_path / "src" / "fake"
    for name, text in {
        "catalog/walks.py": RECIPES,
        "catalog/_notes.py": "def no(): ...",
        "strategies/walk.py": LOOPS,
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(dedent(text))
    return package


def test_every_public_function_is_a_method(package):
    found = methods(package)
    assert list(found) == ["two-step", "plain"]
    assert {method.family for method in found.values()} == {"walks"}
    assert found["two-step"].function == "two_step"


def test_the_docstring_is_the_card(package):
    card = methods(package)["two-step"].card
    assert card.summary == "Workers walk in twos."
    assert card.text.startswith("split  the data\nwhen   sometimes\n\n    w <- w - lr g")
    assert card.text.endswith("Where we differ: we run.")
    assert card.paper == 'A. Author, "On: walking", 2001, https://example.org/walk'
    assert card.loops == (Loop("strategies/walk.py", "Walk.step"), Loop("strategies/walk.py", "run"))
    assert card.args == {"staleness": "s, how far ahead: at most.", "lr": "η."}


def test_an_empty_docstring_is_an_empty_card():
    card = read_card("")
    assert (card.summary, card.text, card.paper, card.loops, card.args) == ("", "", "", (), {})


def test_parameters_are_knobs(package):
    knobs = {knob.name: knob for knob in methods(package)["two-step"].knobs}
    assert knobs["staleness"].required and knobs["staleness"].type is int
    assert knobs["lr"].type == float | None and knobs["lr"].default == 0.1 and not knobs["lr"].required
    assert knobs["codec"].part == "Codec" and knobs["codec"].type is str and knobs["codec"].default == "Raw()"
    assert knobs["rule"].part == "Rule" and knobs["rule"].default is None
    assert knobs["mode"].type == Literal["plain", "fancy"] and knobs["mode"].part is None
    assert knobs["fast"].type is bool and knobs["fast"].default is False
    assert knobs["fast"].flag == "--fast" and knobs["staleness"].help == "s, how far ahead: at most."


def test_facts_name_the_files(package):
    method = methods(package)["two-step"]
    assert method.facts()["file"] == "src/fake/strategies/walk.py"
    assert method.facts()["recipe"] == "src/fake/catalog/walks.py"
    assert methods(package)["plain"].facts()["file"] == "src/fake/catalog/walks.py"


def test_loops_are_found_with_their_lines(package):
    step = find(package, Loop("strategies/walk.py", "Walk.step"))
    assert step.source == "def step(self):\n    return 2"
    assert step.path.read_text().splitlines()[step.line - 1].strip() == "def step(self):"
    assert find(package, Loop("strategies/walk.py", "Walk.stop")) is None
    assert find(package, Loop("strategies/gone.py", "run")) is None
    assert [loop["line"] for loop in facts(methods(package)["two-step"])["loops"]] == [step.line, 4]


@pytest.mark.parametrize("method", methods().values(), ids=methods())
def test_every_card_is_complete(method):
    card = method.card
    assert card.summary.endswith(".") and card.text and re.search(r"\b(19|20)\d\d\b", card.paper)
    assert card.loops and all(find(PACKAGE, loop) for loop in card.loops), card.loops
    assert set(card.args) == {knob.name for knob in method.knobs}
    assert not {knob.name for knob in method.knobs} & set(RunOptions.__annotations__), (
        "a knob hides an option of every run"
    )


@pytest.mark.parametrize("method", methods().values(), ids=methods())
def test_every_knob_can_be_given_on_the_command_line(method):
    for knob in method.knobs:
        kinds = get_args(knob.type) or (knob.type,)
        assert knob.part in (None, "Codec", "Rule"), f"{knob.name}: {knob.annotation}"
        plain = knob.default is None or isinstance(knob.default, str)
        assert plain or type(knob.default) in kinds or knob.default in kinds or float in kinds


def test_the_methods():
    names = {"bsp", "bsp-server", "ssp", "downpour", "easgd", "ad-psgd", "hogwild", "gpipe", "pipedream"}
    names |= {"dc-asgd", "staleness-aware", "dyn-sgd", "agn", "adag", "asgd-momentum"}
    assert set(methods()) >= names


def test_the_command_line_does_not_import_torch():
    code = "import sys; from manyhands.cli import main; main(['list']); main(['train', 'ssp', '--help']);"
    code += "main(['cost', '--help']); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "False"


PIPELINES = [method.name for method in methods().values() if method.family == "pipelines"]


@pytest.mark.parametrize("name", PIPELINES)
def test_explain_draws_the_schedule_that_the_method_plays(name, capsys):
    from manyhands import catalog
    from manyhands.cli.explain import show
    from manyhands.splits import schedules
    from manyhands.strategies.pipeline_plan import pipeline_plan

    method = methods()[name]
    strategy = getattr(catalog, method.function)()
    plan = pipeline_plan(strategy, 4)
    if plan.flushes:
        rows = [getattr(schedules, strategy.team.schedule.replace("-", "_"))(4, m) for m in (4, 8)]
    else:
        rows = [plan.rows(7)]
    assert [one["picture"] for one in facts(method)["pictures"]] == [schedules.picture(one, 80) for one in rows]
    show(method, traits_of(method))
    printed = capsys.readouterr().out
    for one in facts(method)["pictures"]:
        assert one["picture"] in printed
        assert max(map(len, [one["title"], *one["picture"].splitlines()])) <= 80


def test_explain_says_how_long_ranks_are_idle():
    """tF = 1, tB = 2: a mini-batch of 1F1B takes 3 on each rank, one of DDG K tF + tB = 6."""
    titles = {name: facts(methods()[name])["pictures"][-1]["title"] for name in ("gpipe", "pipedream", "ddg")}
    assert titles["gpipe"] == "4 workers, 8 micro-batches: 27 % idle if B takes two F"
    assert titles["pipedream"] == "4 workers, 7 mini-batches, then a pause: 0 % idle when full, if B takes two F"
    assert "50 % idle when full" in titles["ddg"]


def test_explain_draws_nothing_for_a_method_without_a_schedule():
    assert facts(methods()["bsp"])["pictures"] == []


def test_explain_has_words_for_every_trait():
    from manyhands.core.strategy import Traits

    assert list(LABELS) == [field.name for field in fields(Traits)]
    assert "in lock step: yes" in trait_lines(traits_of(methods()["bsp"]))
    assert "when a worker is lost: the run continues" in trait_lines(traits_of(methods()["ssp"]))

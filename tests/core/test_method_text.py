"""Methods as texts: what the command line writes, and `mh.join` takes."""

import pytest

import manyhands as mh
from manyhands import Refused, codecs, rules
from manyhands.core.method_index import methods
from manyhands.core.method_text import read_knobs, read_method
from manyhands.core.recipe import recipe_of
from manyhands.run.methods import chosen_strategy, strategy_of


def test_every_method_is_read_by_its_name():
    for name, method in methods().items():
        if not any(knob.required for knob in method.knobs):
            assert repr(strategy_of(name)) == repr(getattr(mh, method.function)())


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("ssp:staleness=5", lambda: mh.ssp(staleness=5)),
        ("ssp:staleness=5,cache=true", lambda: mh.ssp(staleness=5, cache=True)),
        ("ssp:codec=feedback(topk(0.01))", lambda: mh.ssp(codec=codecs.Feedback(codecs.TopK(0.01)))),
        ("bsp:rule=momentum(lr=0.1, momentum=0.5)", lambda: mh.bsp(rule=rules.Momentum(lr=0.1, momentum=0.5))),
        ("diloco:period=20,lr=0.1", lambda: mh.diloco(period=20, lr=0.1)),
        ("d-psgd:graph=random", lambda: mh.d_psgd(graph="random")),
        (" ssp: staleness = 5 ", lambda: mh.ssp(staleness=5)),
        ("ssp:codec=none", lambda: mh.ssp(codec=None)),
    ],
)
def test_a_text_makes_the_same_strategy_as_python(text, made):
    assert repr(strategy_of(text)) == repr(made())
    assert str(recipe_of(strategy_of(text))) == text


def test_the_texts_of_knobs_are_those_after_the_colon():
    method, settings = read_method("ssp:staleness=3,codec=feedback(topk(0.01))")
    assert (method.name, settings) == ("ssp", {"staleness": "3", "codec": "feedback(topk(0.01))"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sspp", "there is no method 'sspp': did you mean ssp"),
        ("ssp:stalenes=3", "there is no knob of ssp 'stalenes': did you mean staleness"),
        ("ssp:staleness", "'staleness' has no value"),
        ("ssp:staleness=many", "staleness is 'many', but must be a whole number"),
        ("ssp:staleness=-1", "staleness is -1, but must be"),
        ("ssp:lr=fast", "lr is 'fast', but must be a number"),
        ("ssp:cache=perhaps", "cache is 'perhaps', but must be true or false"),
        ("d-psgd:graph=tangle", "graph is 'tangle', but must be "),
        ("ssp:codec=tpk(0.01)", "there is no codec, rule or team 'tpk'"),
        ("bsp:lr=0.1,rule=sgd(0.1)", "the rule has a learning rate of its own"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(text, says):
    with pytest.raises(Refused, match=says):
        strategy_of(text)


def test_reading_builds_no_part():
    _, knobs = read_knobs("ssp:codec=feedback(topk(0.01))")
    assert str(knobs["codec"]) == "feedback(topk(0.01))"


def test_the_launcher_s_method_replaces_the_script_s_and_one_line_says_so(capsys):
    assert str(recipe_of(chosen_strategy(mh.bsp(), None, says=True))) == "bsp"
    assert str(recipe_of(chosen_strategy("easgd", None, says=True))) == "easgd"
    assert str(recipe_of(chosen_strategy(None, "ssp", says=True))) == "ssp"
    assert str(recipe_of(chosen_strategy("ssp", "ssp", says=True))) == "ssp"
    assert str(recipe_of(chosen_strategy(mh.bsp(), "ssp", says=False))) == "ssp"
    assert capsys.readouterr().err == ""
    assert str(recipe_of(chosen_strategy(mh.bsp(lr=0.5), "ssp:staleness=2", says=True))) == "ssp:staleness=2"
    assert capsys.readouterr().err == "manyhands: --method ssp:staleness=2 replaces the script's own, bsp:lr=0.5\n"


def test_a_script_without_a_method_is_refused_with_the_ways_out():
    with pytest.raises(Refused, match=r"mh.join\('ssp:staleness=3'\).* or manyhands run --method ssp script.py"):
        chosen_strategy(None, None, says=True)

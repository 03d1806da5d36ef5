"""Parts on the command line are parsed, never evaluated."""

import pytest

from manyhands.codecs import Feedback, TopK, WarmUp
from manyhands.core.errors import Refused
from manyhands.core.part_text import PartSpec, exported, read, split
from manyhands.rules import Adagrad, Sgd


def test_names_come_from_the_folders():
    known = exported()
    assert known["topk"] == ("codecs", "TopK")
    assert known["rmsprop"] == ("rules", "RmsProp")


def test_nested_parts_are_read_without_building():
    part = read("feedback(topk(0.01))", "Codec")
    assert part == PartSpec("codecs", "Feedback", (PartSpec("codecs", "TopK", (0.01,)),))


def test_a_name_that_two_kinds_have_is_that_of_the_kind_asked_for():
    assert read("warmup(feedback(topk(0.01)), 50)", "Codec").build() == WarmUp(Feedback(TopK(0.01)), 50)
    assert type(read("sgd(warmup(0.1, 100))", "Rule").build().lr).__module__ == "manyhands.rules.schedules"


def test_case_and_parentheses_do_not_matter():
    assert read("RAW", "Codec") == read("raw()", "Codec") == PartSpec("codecs", "Raw")


def test_values():
    part = read("adam(lr=-1e-3, decoupled=true, eps=none)", "Rule")
    assert part.knobs == (("lr", -1e-3), ("decoupled", True), ("eps", None))
    assert read('torch("AdamW", lr=1)', "Rule").values == ("AdamW",)


def test_built_parts_are_the_real_ones():
    assert read("feedback(topk(0.01))", "Codec").build() == Feedback(TopK(0.01))
    assert read("adagrad(lr=0.03)", "Rule").build() == Adagrad(lr=0.03)
    assert read("chain(sgd(lr=0.1))", "Rule").build().links == (Sgd(lr=0.1),)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').getcwd()",
        "topk((lambda: 1)())",
        "topk(1 + 1)",
        "topk(*[1])",
        "topk(**{})",
        "topk[0]",
        "raw().encode",
        "[raw()]",
        "topk(f'{1}')",
        "topk(1j)",
        "eval('1')",
    ],
)
def test_nothing_but_parts_is_read(text):
    with pytest.raises(Refused):
        read(text, "Codec")


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("fedback(topk(1))", "Codec", "did you mean feedback"),
        ("sgd(0.1)", "Codec", "'sgd(0.1)' is no codec: there are "),
        ("half", "Rule", "'half' is no rule"),
        ("0.1", "Rule", "'0.1' is no rule"),
        ("topk(0.1", "Codec", "cannot read 'topk(0.1'"),
        ("", "Codec", "cannot read ''"),
    ],
)
def test_errors_say_what_would_be_right(text, kind, says):
    with pytest.raises(Refused) as error:
        read(text, kind)
    assert says.lower() in str(error.value).lower()


def test_wrong_knobs_of_a_part_are_refused_when_it_is_built():
    with pytest.raises(Refused, match=r"cannot make sgd: .*speed"):
        read("sgd(speed=1)", "Rule").build()
    with pytest.raises(Refused, match="lr is -1"):
        read("sgd(lr=-1)", "Rule").build()


def test_split_keeps_parentheses_together():
    assert split("staleness=3,codec=feedback(topk(0.01, 2)), x=1") == [
        "staleness=3",
        "codec=feedback(topk(0.01, 2))",
        "x=1",
    ]
    assert split("") == []

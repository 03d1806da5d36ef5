"""A method as a text, in the form of the command line: `ssp:staleness=3,codec=feedback(topk(0.01))`.

    text = method | method:knob=value,...        value = number | word | true | false | none | part

Every method has the knob `team` besides its own: `ssp:staleness=3,team=piped(stages=2)`.

The text is parsed here, without torch; `run/methods.py` makes the strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from manyhands.core import part_text
from manyhands.core.errors import Refused, refuse_unless, unknown
from manyhands.core.method_index import Knob, Method, methods

BOOLEANS = {"true": True, "false": False}
TEAM = Knob(
    "team",
    "Team | None",
    str | None,
    "Team",
    help="several ranks as one worker, each with a part of the model: piped(stages=2)",
)
"""A knob of the run: which ranks form a worker."""


def knobs_of(method: Method) -> dict[str, Knob]:
    """All that can be set in the text of a method, by name."""
    return {knob.name: knob for knob in (*method.knobs, TEAM)}


def with_team(text: str, team: str | None) -> str:
    """The text of a method, over teams if one is given."""
    return text if team is None else f"{text}{',' if ':' in text else ':'}team={team}"


def read_method(text: str) -> tuple[Method, dict[str, str]]:
    """The method of `ssp` or `ssp:staleness=3,codec=half`, and the texts of the knobs after the colon."""
    name, _, settings = text.strip().partition(":")
    known = methods()
    if name not in known:
        raise unknown("method", name, known)
    return known[name], dict(_setting(known[name], one) for one in part_text.split(settings))


def _setting(method: Method, text: str) -> tuple[str, str]:
    name, equals, value = (word.strip() for word in text.partition("="))
    knobs = knobs_of(method)
    knob = knobs.get(name.replace("-", "_"))
    if knob is None:
        raise unknown(f"knob of {method.name}", name, knobs)
    if not equals:
        raise Refused(f"{text!r} has no value: write {name}=...")
    if knob.type is bool and value.lower() not in BOOLEANS:
        raise Refused(f"{name} is {value!r}, but must be true or false")
    return knob.name, value


def read_knobs(text: str) -> tuple[Method, dict[str, Any]]:
    """The method that a text names, and the values of its knobs; parts are parsed, and not built yet."""
    method, settings = read_method(text)
    for knob in method.knobs:
        if knob.required and knob.name not in settings:
            raise Refused(f"{knob.name} is missing, but {method.name} needs it: write {method.name}:{knob.name}=...")
    by_name = knobs_of(method)
    knobs = {name: value_of(by_name[name], value) for name, value in settings.items()}
    refuse_two_rates(knobs)
    return method, knobs


def refuse_two_rates(knobs: Mapping[str, Any]) -> None:
    """Refuse a learning rate beside a rule."""
    if "lr" in knobs and knobs.get("rule") is not None:
        raise Refused(f"lr is {knobs['lr']}, but the rule has a learning rate of its own: give it there")


def value_of(knob: Knob, text: str) -> Any:
    """The value of a knob that is given as a text."""
    kinds = get_args(knob.type) if get_origin(knob.type) in (Union, UnionType) else (knob.type,)
    if text.lower() == "none" and (type(None) in kinds or "None" in knob.annotation):
        return None
    if knob.part is not None:
        return part_text.read(text, knob.part)
    return _plain(knob.name, kinds[0], text)


def _plain(name: str, kind: Any, text: str) -> Any:
    if kind is bool:
        return BOOLEANS[text.lower()]
    if get_origin(kind) is Literal:
        choices = {str(one): one for one in get_args(kind)}
        refuse_unless(text in choices, name, repr(text), " or ".join(choices))
        return choices[text]
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise Refused(f"{name} is {text!r}, but must be {what}") from None

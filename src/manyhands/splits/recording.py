"""Recording: one forward pass of a whole model on an example, to find out where it can be cut.

    time        1    2     3     4    5       6     7    8
    events      fc1{ addmm }     relu blocks{ fc2{  addmm } }        calls of modules, and operations between them
    a cut       in front of a module that is called once, with one floating-point tensor that needs a gradient

For each such candidate: the modules whose calls it is in, and how many other values would have to travel. For each
parameter and buffer: when it is used, and when changed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from manyhands.core.errors import Refused, unknown
from manyhands.splits.placeholder import tensors_in


class Candidate(NamedTuple):
    """A call of a module in front of which the model can be cut."""

    time: int
    name: str
    inside: tuple[str, ...]
    """The modules that are being called, from the whole model ("") to the one that calls this one."""
    others: int
    """How many values are needed behind the cut besides the argument of the module."""


@dataclass
class Use:
    """When a parameter or a buffer was used, and changed."""

    read: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)

    def segments(self, cuts: Sequence[int]) -> set[int]:
        """The stages that use it, if the model is cut at these times."""
        return {bisect_right(cuts, time) for time in self.read}


class _Call(NamedTuple):
    time: int
    inside: tuple[str, ...]
    tensors: list[Tensor]


class Recording(TorchFunctionMode):
    """What happens in one forward pass.

    Args:
        model: a copy, because a pass changes buffers.
        fields: the inputs of the model.
    """

    def __init__(self, model: nn.Module, fields: Sequence[Any]) -> None:
        super().__init__()
        self.time = 0
        self.uses = {name: Use() for name, _ in (*model.named_parameters(), *model.named_buffers())}
        self.left: dict[str, int] = {}
        """When the last call of a module was complete."""
        self.callees: dict[str, set[str]] = {}
        """Which modules a module calls."""
        self._buffers = frozenset(name for name, _ in model.named_buffers())
        self._with_parameters = {name for name, one in model.named_modules() if one._parameters}
        self._names_of_modules = {name for name, _ in model.named_modules()}
        self._names = {id(x): name for name, x in (*model.named_parameters(), *model.named_buffers())}
        self._calls: dict[str, list[_Call]] = {}
        self._inside: list[str] = []
        self._made: dict[int, tuple[int, Tensor]] = {}
        self._last_use: Counter[int] = Counter()
        with ExitStack() as hooks:
            for name, module in model.named_modules():
                hooks.callback(module.register_forward_pre_hook(self._entering(name), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(self._leaving(name)).remove)
            with self:
                model(*fields)

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.time += 1
            call = _Call(self.time, tuple(self._inside), tensors_in((args, kwargs)))
            self._calls.setdefault(name, []).append(call)
            if self._inside:
                self.callees.setdefault(self._inside[-1], set()).add(name)
            self._inside.append(name)

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, out: Any) -> None:
            self.time += 1
            self.left[name] = self.time
            self._inside.pop()

        return leave

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note which values an operation uses, and makes."""
        given = tensors_in((args, kwargs))
        versions = [x._version for x in given]
        out = func(*args, **(kwargs or {}))
        self.time += 1
        made = tensors_in(out)
        for x, version in zip(given, versions, strict=True):
            use = self.uses.get(self._names.get(id(x), ""))
            if use is not None:
                use.read.add(self.time)
                if x._version != version:
                    use.written.add(self.time)
            if made:
                self._last_use[id(x)] = self.time
        for x in made:
            self._made.setdefault(id(x), (self.time, x))
        return out

    def candidates(self) -> list[Candidate]:
        """Where the model can be cut, in the order of the calls."""
        found = [
            Candidate(calls[0].time, name, calls[0].inside, self._others(calls[0].time, calls[0].tensors[0]))
            for name, calls in self._calls.items()
            if not self._why_not(name)
        ]
        return sorted(found)

    def at(self, name: str) -> Candidate:
        """The candidate of this name; refused if the model cannot be cut there."""
        candidates = {one.name: one for one in self.candidates()}
        if name not in self._names_of_modules:
            raise unknown("module to cut at", name, candidates)
        if name not in candidates:
            raise Refused(f"the model cannot be cut at {name}: {self._why_not(name)}")
        return candidates[name]

    def _why_not(self, name: str) -> str:
        """The reason why the model cannot be cut in front of a module; empty if it can."""
        calls = self._calls.get(name, [])
        if not name or len(calls) != 1:
            return f"it is called {len(calls)} times in a forward pass, but must be called once"
        tensors = calls[0].tensors
        if len(tensors) != 1:
            return f"it is called with {len(tensors)} tensors, but must be called with one"
        if not tensors[0].requires_grad:
            return "nothing that is trained comes before it"
        return self._astride(calls[0].time)

    def _astride(self, time: int) -> str:
        """What must not be on both sides of a cut at this time, but is."""
        for name, calls in self._calls.items():
            if calls[0].time < time < calls[-1].time and name in self._with_parameters:
                return f"{name} is called before and behind it, but a module with parameters must be in one stage"
        for name, use in self.uses.items():
            if use.written and min(use.read) < time < max(use.read) and name in self._buffers:
                return f"{name} is changed before or behind it, and used on both sides"
        return ""

    def _others(self, time: int, argument: Tensor) -> int:
        return sum(
            made < time < self._last_use[number] and x.requires_grad and x is not argument
            for number, (made, x) in self._made.items()
        )

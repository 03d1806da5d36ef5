"""Cut pass: one stage's share of a forward pass, by running the model from its beginning.

                stage 0 of 3          stage 1 of 3                   stage 2 of 3
    stem        runs                  placeholder                    placeholder
    blocks.0    runs                  placeholder                    placeholder
    blocks.1    ends the segment      runs on what was received      placeholder
    blocks.2                          ends the segment               runs on what was received

The Python code of the modules that contain a cut (`open` modules; the whole model is one) runs on every stage. In front
of its own segment, a stage does not run the modules that this code calls: their results are placeholders, tensors of
the right size and type without numbers (splits/placeholder.py). What the code computes of placeholders, parameters or
random numbers is a placeholder again. What it computes of the mini-batch alone is computed by every stage, because
every rank has the mini-batch.

A placeholder that is used behind the cut is replaced by the received value of the same key: a skip connection. So is
one whose numbers decide what is computed (`if x.mean() > 0`), already in front of the cut. A value that has not been
received is `Missing`: splits/cutting.py finds out by an example what has to travel.

The size of a result is found by computing on zeros, once for each size of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from manyhands.core.errors import ManyhandsError, Refused
from manyhands.splits.placeholder import (
    PARAMETER,
    Key,
    Missing,
    Placeholder,
    Size,
    by_size_alone,
    leaves_of,
    replaced,
    signature,
    tensors_in,
    writes,
)

PLAIN = (type(None), bool, int, float, str)
"""What a module may return besides tensors."""
SIZED_BY_NUMBERS = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave"}
)
"""Functions whose result has a size that depends on numbers; so has an index by a mask."""


class SegmentEnd(BaseException):
    """The first module of the next stage is called. Not an `Exception`, so that a model does not catch it."""

    def __init__(self, outputs: tuple[Tensor | None, ...]) -> None:
        self.outputs = outputs


@dataclass(frozen=True)
class CutPlan:
    """Where a model is cut, and what travels.

    Args:
        cuts: the names of the first modules of stages 1, 2, ...
        open: the modules whose own code runs on every stage, because it contains a cut.
        called: the modules that they call.
        carried: for each cut, the values that travel behind the activation.
        written: the received values that a stage changes in place: (stage, position).
    """

    cuts: tuple[str, ...]
    open: frozenset[str]
    called: tuple[str, ...]
    carried: tuple[tuple[Key, ...], ...]
    written: frozenset[tuple[int, int]] = frozenset()

    def incoming(self, stage: int) -> tuple[Key, ...]:
        return self.carried[stage - 1] if stage else ()

    def outgoing(self, stage: int) -> tuple[Key, ...]:
        return self.carried[stage] if stage < len(self.cuts) else ()


class CutPass(TorchFunctionMode):
    """One forward pass of one stage.

    Args:
        model: the whole model.
        plan: where it is cut.
        stage: the number of this stage.
        sizes: the sizes of results, by what computes them and the sizes of its arguments; kept from pass to pass.
        received: the activation and the carried values; None: one that the previous stage has not computed.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: CutPlan,
        stage: int,
        sizes: dict[Hashable, Any],
        received: Sequence[Tensor | None],
    ) -> None:
        super().__init__()
        self._model, self._plan, self._stage, self._sizes = model, plan, stage, sizes
        self.received = [
            x.clone() if x is not None and (stage, n) in plan.written else x for n, x in enumerate(received)
        ]
        """What this stage uses and may change."""
        carried = zip(plan.incoming(stage), self.received[1:], strict=True)
        self._values = {key: x for key, x in carried if x is not None}
        self._sent = frozenset(plan.outgoing(stage))
        self._calls: dict[str, int] = {}
        self._open = ""
        self._is_closed = self._is_done = False
        self._grad = torch.is_grad_enabled()
        self._segment = 0
        self.entered: Key | None = None
        """The key of the received activation, unless it depends on the mini-batch alone."""

    def run(self, fields: Sequence[Any]) -> Any:
        """The values that travel to the next stage; on the last stage, what the model returns."""
        try:
            with self._intercepted(), self:
                torch.set_grad_enabled(self._grad and not self._stage)
                out = self._model(*fields)
        except SegmentEnd as end:
            return end.outputs
        finally:
            torch.set_grad_enabled(self._grad)
            self._is_done, self._values = True, {}
        if self._segment < len(self._plan.cuts):
            raise ManyhandsError(
                f"the forward pass has not called {self._plan.cuts[self._segment]}, where the model is cut"
            )
        return out

    @contextmanager
    def _intercepted(self) -> Iterator[None]:
        """Within it the calls of modules by open modules go through `_call`."""
        modules = {name: self._model.get_submodule(name) for name in self._plan.called}
        own = {name: vars(module).get("forward") for name, module in modules.items()}
        try:
            for name, module in modules.items():
                vars(module)["forward"] = partial(self._call, name, module, module.forward)
            yield
        finally:
            for name, module in modules.items():
                vars(module).pop("forward", None)
                if own[name] is not None:
                    vars(module)["forward"] = own[name]

    def with_numbers(self, values: Any) -> Any:
        """Nested values, with received ones in the place of placeholders."""
        return replaced(Placeholder, self._number, values)

    def _number(self, x: Placeholder) -> Tensor:
        if self._is_done or x.run is not self:
            raise Refused(f"{x.key} of a forward pass is used after the pass, but is not known there on this stage")
        value = self._values.get(x.key)
        if value is None:
            raise Missing(x.key, x.segment, self._stage)
        return value

    def _key(self, source: str) -> Key:
        """The key of the next results of a module or an operation."""
        self._calls[source] = self._calls.get(source, 0) + 1
        return Key(source, self._calls[source])

    def _noted(self, key: Key, out: Any) -> Any:
        """Results, of which those that travel are kept."""
        for number, x in enumerate(tensors_in(out)) if self._sent else ():
            if key._replace(output=number) in self._sent:
                self._values[key._replace(output=number)] = x
        return out

    # -- modules ----------------------------------------------------------------------------------

    def _call(self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """An open module calls this one."""
        if self._is_closed:
            return forward(*args, **kwargs)
        if name in self._plan.cuts:
            args, kwargs = self._cross(name, args, kwargs)
        if name in self._plan.open:
            outside, self._open = self._open, name
            out = forward(*args, **kwargs)
            self._open = outside
            return out
        key = self._key(name)
        if self._segment < self._stage:
            compute = partial(self._stand_in, name, module, forward)
            return self._placed((name, module.training), compute, args, kwargs, key)
        args, kwargs = self.with_numbers((args, kwargs))
        with self._closed():
            out = forward(*args, **kwargs)
        return self._noted(key, out)

    def _cross(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The first module of a stage is called: the arguments that it runs on."""
        begins = self._plan.cuts.index(name) + 1
        if begins != self._segment + 1:
            raise ManyhandsError(f"stage {begins} begins at {name}, which was called in stage {self._segment}")
        (activation,) = tensors_in((args, kwargs))
        if self._segment == self._stage:
            raise SegmentEnd((self.with_numbers(activation), *map(self._values.get, self._plan.outgoing(self._stage))))
        self._segment = begins
        if begins < self._stage:
            return args, kwargs
        x = self.received[0]
        assert x is not None
        if isinstance(activation, Placeholder):
            self.entered = activation.key
            self._values[activation.key] = x
        torch.set_grad_enabled(self._grad)
        args, kwargs = replaced(Tensor, lambda _: x, (args, kwargs))
        return args, kwargs

    def _stand_in(self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a module of an earlier stage returns for zeros."""
        with self._closed(), _other_buffers(module):
            out = forward(*args, **kwargs)
        for one in leaves_of(out):
            if not isinstance(one, (Tensor, *PLAIN)):
                raise Refused(f"{name} returns a {type(one).__name__}, but must return tensors to run before a cut")
        return out

    @contextmanager
    def _closed(self) -> Iterator[None]:
        """Run a module without looking at its operations."""
        self._is_closed = True
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]
            self._is_closed = False

    # -- operations -------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An open module computes."""
        kwargs = kwargs or {}
        key = self._key(f"{func.__name__} in {self._open or 'the model'}")
        if self._segment < self._stage:
            return self._before(func, args, kwargs, key)
        if Placeholder in types:
            args, kwargs = self.with_numbers((args, kwargs))
        return self._noted(key, func(*args, **kwargs))

    def _before(self, func: Any, args: Any, kwargs: Any, key: Key) -> Any:
        """An operation in front of the cut."""
        found = [x for x in leaves_of((args, kwargs)) if isinstance(x, (Placeholder, nn.Parameter))]
        if not found:
            return self._again(func, args, kwargs, key)
        args, kwargs = replaced(nn.Parameter, self._without_numbers, (args, kwargs))
        known, out = by_size_alone(func, args, kwargs)
        if known:
            return out
        if writes(func):
            if not isinstance(args[0], Placeholder):
                raise Refused(
                    f"{key} writes a value of an earlier stage into a tensor of stage {self._stage}: cut elsewhere"
                )
            return args[0]
        by_mask = func.__name__ == "__getitem__" and any(Size.of(x).dtype == torch.bool for x in found)
        if by_mask or func.__name__ in SIZED_BY_NUMBERS:
            args, kwargs = self.with_numbers((args, kwargs))
            return self._places(_sizes(func(*args, **kwargs)), key)
        out = self._placed(func, func, args, kwargs, key)
        if tensors_in(out):
            return out
        args, kwargs = self.with_numbers((args, kwargs))
        return func(*args, **kwargs)

    def _again(self, func: Any, args: Any, kwargs: Any, key: Key) -> Any:
        """An operation on the mini-batch alone: every stage does it, unless it draws random numbers."""
        state = torch.default_generator.get_state()
        out = func(*args, **kwargs)
        if torch.equal(state, torch.default_generator.get_state()):
            return out
        torch.default_generator.set_state(state)
        return self._places(_sizes(out), key)

    def _without_numbers(self, p: nn.Parameter) -> Placeholder:
        """Earlier stages may have the parameter; here it may be released."""
        name = next((name for name, own in self._model.named_parameters() if own is p), "of no module")
        return Placeholder(Size.of(p), Key(PARAMETER + name, 1), self._segment, self)

    # -- sizes ------------------------------------------------------------------------------------

    def _placed(self, what: Hashable, compute: Callable[..., Any], args: Any, kwargs: Any, key: Key) -> Any:
        """Placeholders for the results of a computation."""
        known = what, signature((args, kwargs))
        if known not in self._sizes:
            args, kwargs = replaced(Placeholder, lambda x: Size.of(x).zeros(), (args, kwargs))
            state = torch.default_generator.get_state()
            self._sizes[known] = _sizes(compute(*args, **kwargs))
            torch.default_generator.set_state(state)
        return self._places(self._sizes[known], key)

    def _places(self, sizes: Any, key: Key) -> Any:
        numbers = count()
        return replaced(
            Size, lambda size: Placeholder(size, key._replace(output=next(numbers)), self._segment, self), sizes
        )


@contextmanager
def _other_buffers(module: nn.Module) -> Iterator[None]:
    """Within it a module has copies of its buffers."""
    own = [(one, dict(one._buffers)) for one in module.modules()]
    try:
        for one, buffers in own:
            one._buffers.update({name: x if x is None else x.clone() for name, x in buffers.items()})
        yield
    finally:
        for one, buffers in own:
            one._buffers.update(buffers)


def _sizes(out: Any) -> Any:
    """The sizes of the tensors in nested results, in the place of the tensors."""
    return replaced(Tensor, Size.of, out)

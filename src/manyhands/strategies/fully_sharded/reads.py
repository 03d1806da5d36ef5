"""Parameter reads: which modules read which parameters in one forward pass.

    module      block{  norm{ reads norm.weight }   attention{ reads in_proj, out.weight }   reads scale  }
    readers     norm.weight: norm     in_proj: attention     out.weight: attention     scale: block

A parameter is mostly read by the module that has it, but not always: attention reads the weights of its output layer,
which it never calls; a tied layer reads those of the embedding; a loss may read any. Views of parameters count too.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from manyhands.core.flat import Flat
from manyhands.splits.placeholder import tensors_in

OUTSIDE = None
"""The reader of what is read outside of any module."""


class ParameterReads(TorchFunctionMode):
    """Within it, a forward pass of a model is observed whose weights lie in the memory of its flat model."""

    def __init__(self, model: nn.Module, flat: Flat) -> None:
        super().__init__()
        self.readers: dict[str, set[str | None]] = {slot.name: set() for slot in flat.slots}
        """By parameter, the names of the modules whose own code has read it."""
        self._model, self._groups = model, flat.groups
        self._starts = [[slot.span.start for slot in group.slots] for group in flat.groups]
        self._running: list[str] = []
        self._hooks = ExitStack()

    def __enter__(self) -> ParameterReads:
        for name, module in self._model.named_modules():
            self._hooks.callback(module.register_forward_pre_hook(self._entering(name)).remove)
            self._hooks.callback(module.register_forward_hook(self._leave).remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self._running.append(name)

        return enter

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self._running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the parameters that an operation uses; to ask for a size or a type is none."""
        if getattr(func, "__name__", "") != "__get__":
            reader = self._running[-1] if self._running else OUTSIDE
            for x in tensors_in((args, kwargs)):
                name = self._name_of(x)
                if name is not None:
                    self.readers[name].add(reader)
        return func(*args, **(kwargs or {}))

    def _name_of(self, x: Tensor) -> str | None:
        """The parameter in whose memory a tensor begins."""
        if x.is_sparse or not x.numel():
            return None
        for group, starts in zip(self._groups, self._starts, strict=True):
            offset = (x.data_ptr() - group.weights.data_ptr()) // group.weights.element_size()
            if 0 <= offset < group.weights.numel():
                return group.slots[bisect_right(starts, offset) - 1].name
        return None

"""Work counter: the operations of each module, from one forward pass over two samples on a copy of the model.

Every matrix product and convolution c = a b of the forward pass is intercepted below autograd; the formulas of
`torch.utils.flop_counter` give its operations. The backward pass is not run. It has one product of the same size for
each of a and b that needs a gradient:

    dc b^T    to the input, if a is computed from data      none for the data itself, as in the first layer
    a^T dc    to the weights, if b is a parameter           none if it is frozen

Two samples, because BatchNorm refuses one. The copy shares the memory of the parameters, which a forward pass only
reads; buffers and all else that it may change are the copy's own. A model of sizes only is counted on the meta device;
others are not, because the first operation there imports much of torch (more than a second).

Torch's own `FlopCounterMode` is not used: it does not separate the two parts of the backward pass, multiplies the
weight gradient of a grouped convolution by the number of groups, and imports torch's compiler.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate
from torch.utils.flop_counter import flop_registry

from manyhands.core.work import Work, owner

SAMPLES = 2
OFFSET = frozenset({torch.ops.aten.addmm, torch.ops.aten.baddbmm})
"""Products whose first argument is added to the result."""

OnCall = Callable[[str, nn.Module, Any, Any], None]
"""Takes the name of a module, the module, its inputs and its outputs."""


def example(data: Any, device: str | None = None, samples: int = SAMPLES) -> tuple[Any, ...]:
    """The fields of a mini-batch that has the first sample of a data set several times, on a device if one is given."""
    sample = data[0]
    fields = sample if isinstance(sample, tuple | list) else (sample,)
    return tuple(field.to(device) for field in default_collate([tuple(fields)] * samples))


def count_work(model: nn.Module, inputs: Sequence[Any], on_call: OnCall | None = None) -> dict[str, Work]:
    """The work for one sample of each module that computes products; `inputs` are those of `SAMPLES` samples."""
    model = copy_with_same_parameters(model)
    products = _Products(model)
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(0)
    try:
        with torch.enable_grad(), _unfused(), products.naming_modules(on_call), products:
            model(*inputs)
    finally:
        torch.default_generator.set_state(state)
    return {name: work / SAMPLES for name, work in products.found.items()}


def copy_with_same_parameters(model: nn.Module) -> nn.Module:
    """A copy of a model with the same memory for its parameters."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo)


@contextmanager
def _unfused() -> Iterator[None]:
    """Compute attention and LSTM by the products that they consist of: fused kernels have no formula."""
    mkldnn: Any = torch.backends.mkldnn
    before = mkldnn.enabled
    mkldnn.enabled = False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        mkldnn.enabled = before


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the products of a model by module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, Work] = {}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._owners: dict[int, list[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            self._owners.setdefault(id(p), []).append(owner(name))
        self._modules = dict(model.named_modules())
        self._running = [""]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler before the first operation."""
        return False

    @contextmanager
    def naming_modules(self, on_call: OnCall | None) -> Iterator[None]:
        """Within it the names of the modules whose forward passes run are known."""
        with ExitStack() as hooks:
            for module in self._modules.values():
                hooks.callback(module.register_forward_pre_hook(self._enter).remove)
                hooks.callback(module.register_forward_hook(self._leave(on_call)).remove)
            yield

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._running.append(self._names[id(module)])

    def _leave(self, on_call: OnCall | None) -> Callable[[nn.Module, Any, Any], None]:
        def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
            name = self._running.pop()
            if on_call is not None:
                on_call(name, module, inputs, outputs)

        return leave

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        out = func(*args, **named)
        operator = getattr(func, "overloadpacket", None)
        formula = flop_registry.get(operator)
        if formula is not None:
            factors = args[1:3] if operator in OFFSET else args[:2]
            self._add(float(formula(*args, **named, out_val=out)), factors)
        return out

    def _add(self, operations: float, factors: Sequence[Tensor]) -> None:
        """Add one product. A view of a parameter, such as its transpose, counts as the parameter."""
        owners = [self._owner(x) for x in factors]
        parts = [
            operations
            * sum(x.requires_grad for x, its in zip(factors, owners, strict=True) if (its is None) == is_input)
            for is_input in (True, False)
        ]
        name = next((its for its in owners if its is not None), self._running[-1])
        self.found[name] = self.found.get(name, Work()) + Work(operations, *parts)

    def _owner(self, x: Tensor) -> str | None:
        """The module that has a parameter; of several that share it the one that is running. None: no parameter."""
        owners = self._owners.get(id(x if x._base is None else x._base))
        return None if not owners else self._running[-1] if self._running[-1] in owners else owners[0]

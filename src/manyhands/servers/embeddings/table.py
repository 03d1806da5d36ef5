"""EmbeddingTable: an embedding whose gradient is sparse, cut over its servers between rows, never inside one.

    rows      0 ........ | ........ | ........ R         server k: rows R k / K to R (k + 1) / K
    touched     x  x         x           x  x            (row numbers in order, one gradient each)
    read_at   3 5 5 1 ...                                the clock at which each row was last read here

A row is fresh if it was read at the current clock. At the beginning all rows are, because all ranks have equal weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from manyhands.core.errors import Refused
from manyhands.core.flat import Flat, Span
from manyhands.core.rule import Rule
from manyhands.core.vector_ops import VectorOps
from manyhands.core.weight_slice import WeightSlice, replica_slices


class EmbeddingTable:
    """One table on one rank.

    Args:
        name: of its parameter.
        module: the embedding.
        servers: how many ranks hold its rows.
    """

    def __init__(self, name: str, module: nn.Embedding | nn.EmbeddingBag, servers: int) -> None:
        self.name = name
        self.module = module
        assert isinstance(module.weight, nn.Parameter)
        self.flat = Flat({name: module.weight})
        self.flat.keep_rows()
        (self.slot,) = self.flat.slots
        self.rows, self.width = self.slot.shape
        self.bounds = torch.tensor([self.rows * k // servers for k in range(servers + 1)])
        self.read_at = torch.zeros(self.rows, dtype=torch.int64)
        self.weight_slice: WeightSlice | None = None
        """Set if the table is dense: then all workers hold all of it, and servers nothing."""

    @property
    def weights(self) -> Tensor:
        """The rows on this rank; only those that were pulled are current."""
        return self.flat.groups[0].weights.view(self.rows, self.width)

    def belongs_to(self, module: nn.Module) -> bool:
        """Whether these are a module's weights: not of a copy, nor when the weights were moved to other memory."""
        weight = module.weight
        return isinstance(weight, Tensor) and weight.data_ptr() == self.flat.groups[0].weights.data_ptr()

    def span(self, k: int) -> Span:
        """The rows that the k-th server holds."""
        start, stop = self.bounds[k : k + 2].tolist()
        return Span(0, start * self.width, stop * self.width)

    def gradient(self) -> tuple[Tensor, Tensor]:
        """The rows that this step has touched, in ascending order, and their gradients; both may be lent."""
        found = self.flat.rows.get(self.slot.param_id)
        if found is not None:
            return found.indices()[0], found.values()
        rows = self.rows if not self.flat.untouched() else 0
        return torch.arange(rows), self.flat.gradient_of(self.slot)[:rows].clone()

    def cuts(self, rows: Tensor) -> Iterator[tuple[int, slice]]:
        """For each server concerned, which of these rows, given in ascending order, it holds."""
        edges = torch.searchsorted(rows, self.bounds).tolist()
        for k, (start, stop) in enumerate(pairwise(edges)):
            if start < stop:
                yield k, slice(start, stop)

    def make_dense(self, ops: VectorOps, rule: Rule) -> None:
        """Treat the table like any dense parameter from now on, also the gradient of this step."""
        (self.weight_slice,) = replica_slices(ops, self.flat, rule)
        self.flat.keep_rows(False)
        found = self.flat.rows.pop(self.slot.param_id, None)
        if found is not None:
            self.flat.gradient_of(self.slot).zero_().index_add_(0, found.indices()[0], found.values())


def find_tables(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """All embeddings of a model with sparse gradients, by the name of their parameter."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    found: dict[str, nn.Embedding | nn.EmbeddingBag] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and id(module.weight) in names:
            name = names[id(module.weight)]
            _refuse_unfit(name, module, owners[id(module.weight)])
            found[name] = module
    return found


def _refuse_unfit(name: str, module: nn.Embedding | nn.EmbeddingBag, owners: int) -> None:
    """Refuse a table whose rows may be read or changed by other code than its module and its servers."""
    if owners > 1:
        raise Refused(
            f"{name} belongs to {owners} modules, but a sparse embedding must not share its weights: only the rows "
            "that it pulls are loaded"
        )
    if module.max_norm is not None:
        raise Refused(
            f"max_norm of {name} is {module.max_norm}, but must be None: it would change rows that servers hold"
        )

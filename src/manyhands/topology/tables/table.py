"""A table: an embedding whose gradient is sparse, cut by rows over its keepers and never inside a row.

    rows      0 ........ | ........ | ........ R         keeper k: rows R k / K to R (k + 1) / K
    touched     x  x         x           x  x            (row numbers in order, one gradient each)
    read_at   3 5 5 1 ...                                the clock at which each row was last read here

A row is fresh if it was read at the present clock. All rows are at the beginning, when every rank has the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from manyhands.core.errors import Refused
from manyhands.core.flat import Flat, Span
from manyhands.core.holding import Holding, replica
from manyhands.core.protocols import Rule


class Table:
    """One table on one rank.

    Args:
        name: of its parameter.
        module: the embedding.
        keepers: how many ranks its rows are spread over.
    """

    def __init__(self, name: str, module: nn.Embedding | nn.EmbeddingBag, keepers: int) -> None:
        self.name = name
        self.module = module
        assert isinstance(module.weight, nn.Parameter)
        self.flat = Flat({name: module.weight})
        self.flat.keep_rows()
        (self.place,) = self.flat.places
        self.rows, self.width = self.place.shape
        self.bounds = torch.tensor([self.rows * k // keepers for k in range(keepers + 1)])
        self.read_at = torch.zeros(self.rows, dtype=torch.int64)
        self.held: Holding | None = None
        """If it is treated like any other parameter: then nothing of it is spread."""

    @property
    def weights(self) -> Tensor:
        """The rows, as this rank has them."""
        return self.flat.parts[0].weights.view(self.rows, self.width)

    def belongs_to(self, module: nn.Module) -> bool:
        """Whether these are a module's weights: not if it is a copy, or if the job has let go of the model."""
        weight = module.weight
        return isinstance(weight, Tensor) and weight.data_ptr() == self.flat.parts[0].weights.data_ptr()

    def span(self, k: int) -> Span:
        """What the k-th keeper has."""
        start, stop = self.bounds[k : k + 2].tolist()
        return Span(0, start * self.width, stop * self.width)

    def gradient(self) -> tuple[Tensor, Tensor]:
        """The rows that this step has touched, in order, and their gradients; both may be lent."""
        found = self.flat.rows.get(self.place.mark)
        if found is not None:
            return found.indices()[0], found.values()
        rows = self.rows if not self.flat.untouched() else 0
        return torch.arange(rows), self.flat.gradient_of(self.place)[:rows].clone()

    def cuts(self, rows: Tensor) -> Iterator[tuple[int, slice]]:
        """Which of some rows, given in order, are with which keeper."""
        edges = torch.searchsorted(rows, self.bounds).tolist()
        for k, (start, stop) in enumerate(pairwise(edges)):
            if start < stop:
                yield k, slice(start, stop)

    def make_dense(self, rule: Rule) -> None:
        """Treat it like any other parameter from now on; the gradient of this step too."""
        (self.held,) = replica(self.flat, rule)
        self.flat.keep_rows(False)
        found = self.flat.rows.pop(self.place.mark, None)
        if found is not None:
            self.flat.gradient_of(self.place).zero_().index_add_(0, found.indices()[0], found.values())


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
    """Refuse a table whose rows may be read or moved by others than itself and its keepers."""
    if owners > 1:
        raise Refused(
            f"{name} belongs to {owners} modules, but a sparse embedding must have its weights for itself: only the "
            "rows that it asks for are there"
        )
    if module.max_norm is not None:
        raise Refused(
            f"max_norm of {name} is {module.max_norm}, but must be None: it would move rows behind the keepers' backs"
        )

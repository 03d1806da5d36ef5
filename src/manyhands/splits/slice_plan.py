"""Slice plan: which layers of a model are divided among the ranks of a team, and how their slices are joined.

    way          weight            the slices of the output are
    out          rows of W         joined (gather), or kept apart
    in           columns of W      summed; the input is the own slice already, or is cut
    heads        Q, K, V by head   summed, after the projection's columns
    vocabulary   rows of a table   summed: each rank has the rows of its words

Pairs: in a chain (of nn.Sequential) a layer by `out` whose slices are kept apart, what is elementwise, and a layer by
`in`.

    x -> [W1 rows] -> ReLU -> [W2 columns] -> sum          one sum in each direction for two layers

A layer whose dimension is smaller than the team, which shares weights with another, or is not of a plain kind (grouped
convolutions, embeddings with max_norm) is not divided, but computed by every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

from torch import nn
from torch.nn import functional

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.param_cut import ParamCut, Ranges
from manyhands.core.port import even_spans

Way = Literal["out", "in", "heads", "vocabulary"]
Takes = Literal["whole", "slice", "own errors", "partial"]
"""What a layer gets: everything; its own slice; everything, but of the error only the own slice is used; everything,
and its errors are summed elsewhere."""
Joins = Literal["gather", "keep", "sum"]
SliceKind = Literal["pairs", "neurons", "filters", "channels"]
WORDS: Mapping[str, tuple[Way, Takes, Joins]] = {
    "column": ("out", "whole", "keep"),
    "row": ("in", "slice", "sum"),
    "gather": ("out", "whole", "gather"),
    "sum": ("in", "whole", "sum"),
    "heads": ("heads", "whole", "sum"),
    "vocabulary": ("vocabulary", "whole", "sum"),
}
"""The words of a plan by names; the first two as in torch."""
Named = tuple[str, nn.Module]
ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.ELU, nn.SELU, nn.LeakyReLU, nn.Softplus, nn.Mish),
    *(nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softsign, nn.LogSigmoid, nn.Dropout, nn.Identity),
)
PER_CHANNEL = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Dropout2d)


@dataclass(frozen=True)
class SlicedLayer:
    """A layer of which every member has a slice."""

    name: str
    layer: nn.Module
    way: Way
    takes: Takes
    joins: Joins
    size: int

    @property
    def total(self) -> int:
        """The size of the dimension that is cut; of attention the number of heads."""
        return _sizes(self.layer)[self.way]

    @cached_property
    def widths(self) -> Sequence[int]:
        """How much of it each member has."""
        return [span.stop - span.start for span in even_spans(self.total, self.size)]

    def cuts(self) -> Iterator[tuple[str, ParamCut]]:
        """How its parameters are cut, by their names in the model."""
        ranges = {index: [(span.start, span.stop)] for index, span in enumerate(even_spans(self.total, self.size))}
        for local, dim in self._dimensions().items():
            p = self.layer.get_parameter(local) if "." in local else getattr(self.layer, local)
            if p is not None:
                yield f"{self.name}.{local}".lstrip("."), ParamCut(dim, self._of_heads(local, ranges))

    def _dimensions(self) -> Mapping[str, int]:
        if self.way == "heads":
            return {"in_proj_weight": 0, "in_proj_bias": 0, "out_proj.weight": 1}
        if isinstance(self.layer, nn.Embedding):
            return {"weight": 1 if self.way == "out" else 0}
        return {"weight": 0, "bias": 0} if self.way == "out" else {"weight": 1}

    def _of_heads(self, local: str, ranges: Mapping[int, Ranges]) -> Mapping[int, Ranges]:
        if not isinstance(self.layer, nn.MultiheadAttention):
            return ranges
        width, depth = self.layer.head_dim, self.layer.embed_dim
        starts = (0, depth, 2 * depth) if local.startswith("in_proj") else (0,)
        return {
            index: [(at + start * width, at + stop * width) for at in starts for start, stop in some]
            for index, some in ranges.items()
        }


def slice_plan(model: nn.Module, size: int, kind: SliceKind, names: Mapping[str, str]) -> list[SlicedLayer]:
    """The layers that are divided among `size` ranks: by a kind, or by patterns of names."""
    if names:
        return _by_names(model, size, names)
    return [layer for chain in _chains(model) for layer in _of_chain(_free(model, chain), size, kind)]


def _by_names(model: nn.Module, size: int, names: Mapping[str, str]) -> list[SlicedLayer]:
    found: list[SlicedLayer] = []
    for pattern, word in names.items():
        refuse_unless(word in WORDS, f"the word for {pattern}", word, f"one of {', '.join(WORDS)}")
        matching = [(name, module) for name, module in model.named_modules() if fnmatchcase(name, pattern)]
        refuse_unless(bool(matching), "the plan's pattern", pattern, "one that the name of a module matches")
        for name, module in matching:
            layer = SlicedLayer(name, module, *WORDS[word], size)
            bound = _why_whole(model, module) or ("" if layer.way in _sizes(module) else f"no layer for {word!r}")
            refuse_unless(not bound, name, type(module).__name__, f"left out of the plan: {bound}")
            refuse_unless(layer.total >= size, f"what is cut of {name}", layer.total, f">= {size}, the ranks of a team")
            found.append(layer)
    return found


# -- kinds ---------------------------------------------------------------------------------------------


def _of_chain(chain: Sequence[Named], size: int, kind: SliceKind) -> Iterator[SlicedLayer]:
    """The layers of a chain that are divided."""
    kinds = {"neurons": nn.Linear, "filters": nn.Conv2d, "channels": nn.Conv2d}
    word = "sum" if kind == "channels" else "gather"
    before: SlicedLayer | None = None
    for position, (name, module) in enumerate(chain):
        if before is not None and _is_elementwise(module, before.layer):
            continue
        if before is not None and before.joins == "keep":
            before = None
            yield SlicedLayer(name, module, *WORDS["row"], size)
            continue
        if kind == "pairs" or isinstance(module, kinds[kind]):
            layer = SlicedLayer(name, module, *WORDS["heads" if "heads" in _sizes(module) else word], size)
            if layer.way in _sizes(module) and layer.total >= size:
                if kind == "pairs" and _is_pair(module, chain[position + 1 :], size):
                    layer = replace(layer, joins="keep")
                elif before is not None and before.joins == "gather" == layer.joins and _fits(before, module):
                    layer = replace(layer, takes="own errors")
                before = layer
                yield layer
                continue
        before = None


def _is_pair(module: nn.Module, rest: Sequence[Named], size: int) -> bool:
    """Whether the next layer of the chain takes slices of this one's output."""
    if not isinstance(module, nn.Linear | nn.Conv2d):
        return False
    for _, other in rest:
        if type(other) in (nn.Linear, nn.Conv2d) and type(other) is type(module):
            sizes = _sizes(other)
            return sizes.get("in") == _sizes(module)["out"] and sizes["in"] >= size
        if not _is_elementwise(other, module):
            return False
    return False


def _fits(before: SlicedLayer, module: nn.Module) -> bool:
    """Whether a layer takes exactly what an earlier one of its kind has gathered."""
    return type(before.layer) is type(module) and _sizes(module).get("in") == before.total


def _is_elementwise(module: nn.Module, after: nn.Module) -> bool:
    """Whether it treats the entries, or after a convolution the channels, of its input each by itself."""
    return type(module) in ELEMENTWISE or (isinstance(after, nn.Conv2d) and type(module) in PER_CHANNEL)


# -- layers --------------------------------------------------------------------------------------------


def _sizes(module: nn.Module) -> Mapping[Way, int]:
    """The size of each dimension that can be cut."""
    if isinstance(module, nn.MultiheadAttention):
        return {"heads": module.num_heads}
    if isinstance(module, nn.Linear):
        return {"out": module.out_features, "in": module.in_features}
    if isinstance(module, nn.Conv2d):
        return {"out": module.out_channels, "in": module.in_channels}
    if isinstance(module, nn.Embedding):
        return {"out": module.embedding_dim, "vocabulary": module.num_embeddings}
    return {}


def _why_whole(model: nn.Module, module: nn.Module) -> str:
    """Why a layer cannot be divided; empty if it can."""
    kind = next((one for one in (nn.Linear, nn.Conv2d, nn.Embedding, nn.MultiheadAttention) if _is(module, one)), None)
    if kind is None:
        return "it must be a plain nn.Linear, nn.Conv2d, nn.Embedding or nn.MultiheadAttention"
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    if any(uses[id(p)] > 1 for p in module.parameters()):
        return "it shares a parameter with another layer"
    if isinstance(module, nn.Conv2d) and module.groups != 1:
        return f"it has {module.groups} groups, but must have 1"
    if isinstance(module, nn.Embedding) and (module.max_norm or module.sparse or module.scale_grad_by_freq):
        return "it must be without max_norm, sparse and scale_grad_by_freq"
    if isinstance(module, nn.MultiheadAttention):
        is_plain = module.in_proj_weight is not None and module.bias_k is None and not module.add_zero_attn
        return "" if is_plain else "its queries, keys and values must have one size, without bias_k and add_zero_attn"
    return ""


def _is(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether it is of this kind, with its forward pass and its own parameters (no parametrization)."""
    is_plain = isinstance(module, kind) and type(module).forward is kind.forward and "forward" not in vars(module)
    return is_plain and not hasattr(module, "parametrizations") and "weight_g" not in module._parameters


def _free(model: nn.Module, chain: Sequence[Named]) -> list[Named]:
    """The chain, with layers that are not divided hidden, so that nothing passes them as slices."""
    return [(name, nn.Module() if _sizes(module) and _why_whole(model, module) else module) for name, module in chain]


# -- chains --------------------------------------------------------------------------------------------


def _chains(model: nn.Module, prefix: str = "") -> Iterator[list[Named]]:
    """Every layer once: those of an nn.Sequential in one chain, others by themselves."""
    if isinstance(model, nn.MultiheadAttention):
        yield [(prefix.rstrip("."), model)]
        return
    if _is_sequential(model):
        chain = list(_flattened(model, prefix))
        yield chain
        inside = [(name, module) for name, module in chain if not _sizes(module)]
    else:
        children = [(f"{prefix}{name}", child) for name, child in model.named_children()]
        pair = list(_feed_forward(model, prefix))
        if pair:
            yield pair
        rest = [(name, child) for name, child in children if name not in dict(pair)]
        yield from ([one] for one in rest if _sizes(one[1]))
        if not children and not prefix and _sizes(model):
            yield [("", model)]
        inside = [(name, child) for name, child in rest if not _sizes(child)]
    for name, module in inside:
        yield from _chains(module, f"{name}.")


def flattened(model: nn.Module) -> list[Named]:
    """The layers of an nn.Sequential, also of those in it, in the order in which they run."""
    if not _is_sequential(model):
        raise Refused(f"the model is a {type(model).__name__}, but must be an nn.Sequential")
    return list(_flattened(model, ""))


def _is_sequential(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _flattened(chain: nn.Module, prefix: str) -> Iterator[Named]:
    for name, module in chain.named_children():
        if _is_sequential(module):
            yield from _flattened(module, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", module


def _feed_forward(module: nn.Module, prefix: str) -> Iterator[Named]:
    """The linear layers of torch's transformer blocks, with the dropout between them."""
    if type(module) not in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        return
    activation = module.activation
    if activation in (functional.relu, functional.gelu) or type(activation) in ELEMENTWISE:
        for name in ("linear1", "dropout", "linear2"):
            yield f"{prefix}{name}", module.get_submodule(name)


def refuse_nothing_cut(layers: Sequence[SlicedLayer], kind: SliceKind, size: int) -> None:
    """A team without any slice would compute the same on all ranks."""
    if not layers:
        raise Refused(
            f"the model has no layer that {kind} can be cut of for {size} ranks: use another kind, a plan by names, "
            "or fewer ranks"
        )

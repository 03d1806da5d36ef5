"""Tied weights: parameters that several stages of a pipeline use, such as an embedding that is also the last layer.

TIED  each rank that has such a parameter sends its gradient to the first of them, which adds them in the order of
      the ranks and sends the sum back: all of them apply the same bits
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from manyhands.core.port import Tag, Transport, recv
from manyhands.core.worker import Worker

TIED = Tag("tied-gradient", carries="tensors")


def shared_names(model: nn.Module, parts: Sequence[nn.Module]) -> list[str]:
    """The names of the trained parameters that several of these parts of a model have."""
    holders = Counter(id(p) for part in parts for p in set(part.parameters()) if p.requires_grad)
    shared = {number for number, count in holders.items() if count > 1}
    return [name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in shared]


class TiedWeights:
    """The parameters that this rank has in common with other ranks of its pipeline.

    Args:
        w: this rank.
        members: the ranks of the pipeline; stage s is on rank s mod P.
        users: the stages that use a parameter, by its name.
    """

    def __init__(self, w: Worker, members: Transport, users: Mapping[str, Collection[int]]) -> None:
        self._w, self._members = w, members
        slots = {slot.name: slot for slot in w.flat.slots}
        holders = {name: sorted({s % members.size for s in users.get(name, ())}) for name in sorted(slots)}
        self._tied = [(slots[name], ranks) for name, ranks in holders.items() if len(ranks) > 1]
        """In the same order on all ranks."""

    def sum(self) -> None:
        """Sum the gradients over the ranks; at the end of a step."""
        flat, members = self._w.flat, self._members
        for slot, (first, *others) in self._tied:
            gradient, touched = flat.gradient_of(slot), slot.param_id not in flat.untouched()
            if members.rank == first:
                for other in others:
                    message = recv(members, TIED, frm=other)
                    gradient.add_(message.tensors[0])
                    touched = touched or message.meta[0]
                    message.release()
                for other in others:
                    members.send(other, TIED, (touched,), [gradient.clone()])
            else:
                members.send(first, TIED, (touched,), [gradient.clone()])
                message = recv(members, TIED, frm=first)
                gradient.copy_(message.tensors[0])
                touched = message.meta[0]
                message.release()
            if touched:
                flat.touch(slot)

"""Expert parallelism: ranks hold different experts of a layer, and rows travel to the experts chosen for them and back.

Who gets how many rows is known only when the router has chosen, so every layer waits once for the device, to learn the
sizes of the tensors that arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trials.models.experts import RoutedExperts, mixtures_in
from trials.models.model import TrainModel
from trials.parallel.mesh import (
    Group,
    LocalShard,
    Pending,
    ShardMap,
    Splits,
    expert_mesh,
    finish,
    group_of,
    launch,
    plain_name,
    start,
    wait,
)


def apply_expert_parallel(model: TrainModel, mesh: DeviceMesh, tp: int) -> ShardMap:
    """Keep this rank's experts of every layer, in place."""
    group = group_of(expert_mesh(mesh)["ep"])
    exchange = RowExchange(group)
    for mixture in mixtures_in([model]):
        mixture.exchange = exchange
        for name, whole in list(mixture.experts.named_parameters()):
            assert whole.is_meta, "weights are drawn after they are split"
            assert whole.shape[0] % group.size == 0, "legality checks that ep divides the experts"
            part = torch.empty_like(whole[: whole.shape[0] // group.size])
            setattr(mixture.experts, name, nn.Parameter(part))
    names = [
        f"{plain_name(path)}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, RoutedExperts)
        for name, _ in module.named_parameters()
    ]
    shard = LocalShard(dim=0, index=group.rank, num_shards=group.size)
    # Tensor-parallel ranks send parts of the same tokens.
    num_summed = group.size // tp
    return ShardMap(shards=dict.fromkeys(names, shard), summed=dict.fromkeys(names, num_summed))


@dataclass(frozen=True, slots=True)
class Sent:
    """Rows on their way."""

    pending: Pending
    splits: Splits
    counts: Tensor
    """Rows that arrive from each rank for each expert here, ``[ep, E / ep]``."""


@dataclass(frozen=True, slots=True)
class Returning:
    """Results on their way back."""

    pending: Pending
    splits: Splits


class RowExchange:
    """The exchange of a group of ranks with equal numbers of experts; never compiled, because sizes are values."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def send(self, rows: Tensor, counts: Tensor) -> Sent:
        """See :class:`trials.models.experts.Exchange`."""
        group, kind = self.group, rows.device.type
        arriving = wait(launch("all_to_all", counts, group.size, group.name)).view(group.size, -1)
        splits = row_splits(rows, counts.view(group.size, -1), arriving)
        if torch.is_autocast_enabled(kind):
            rows = rows.to(torch.get_autocast_dtype(kind))  # as the experts would, but before half as much is sent
        return Sent(start("all_to_all", rows, group, splits), splits, arriving)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def through(self, experts: RoutedExperts, sent: Sent) -> Returning:
        """See :class:`trials.models.experts.Exchange`."""
        halves = sent.pending.take()
        assert halves is not None
        rows = finish("all_to_all", halves, self.group, sent.splits)
        numbers = torch.arange(sent.counts.shape[1], device=rows.device).repeat(self.group.size)
        expert = numbers.repeat_interleave(sent.counts.flatten(), output_size=rows.shape[0])
        order = expert.argsort(stable=True)
        out: Tensor = experts(rows[order], sent.counts.sum(0))
        back = sent.splits[::-1]
        return Returning(start("all_to_all", out[order.argsort()], self.group, back), back)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def results(self, returning: Returning) -> Tensor:
        """See :class:`trials.models.experts.Exchange`."""
        halves = returning.pending.take()
        assert halves is not None
        return finish("all_to_all", halves, self.group, returning.splits)


def row_splits(_rows: Tensor, leaving: Tensor, arriving: Tensor) -> Splits:
    """Return how many of the rows go to and how many come from each rank, given those per rank and expert.

    Waits for the device.
    """
    sent, received = torch.stack([leaving.sum(1), arriving.sum(1)]).tolist()
    return sent, received

"""Measures links between devices: times of all-reduces and transfers among a gang's ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trials.accelerator.device import widest_float
from trials.probe.device import MAX_CALLS, seconds_per_call
from trials.reports.rates import Link, MessageTime, ProbeSpec

ProcessGroup = Any
"""A process group, to which torch gives no one type; None stands for the whole gang."""


class CollectiveTimer:
    """Times operations that several ranks take part in: all of them call the same methods in the same order.

    The ranks of ``group`` take part and agree on the number of calls.
    """

    def __init__(self, spec: ProbeSpec, device: torch.device, group: ProcessGroup) -> None:
        self._spec = spec
        self._device = device
        self._group = group
        self._left_s = spec.part_limit_s
        self._agree(0.0)  # all ranks connect before some exchange in pairs

    def all_reduce(self) -> Link:
        """Times of an all-reduce over the group, by message size."""

        def time_s(num_bytes: int) -> float:
            message = torch.zeros(num_bytes // 4, device=self._device)
            return self._agree(self._own_median_s(partial(dist.all_reduce, message, group=self._group)))

        return Link(world_size=dist.get_world_size(self._group), times=self._by_size(time_s))

    def transfers(self, neighbours: Sequence[int | None]) -> Link:
        """Exchange with one neighbour after the other; per size the faster of them."""
        return Link(world_size=2, times=self._by_size(lambda n: min(self._exchange_s(n, peer) for peer in neighbours)))

    def _by_size(self, time_s: Callable[[int], float]) -> tuple[MessageTime, ...]:
        """Times from the smallest message to the largest that there is time for, at least two."""
        times: list[MessageTime] = []
        for num_bytes in self._spec.message_bytes:
            if len(times) > 1 and self._agree(times[-1].time_s) * num_bytes / times[-1].num_bytes * 5 > self._left_s:
                break
            times.append(MessageTime(num_bytes=num_bytes, time_s=time_s(num_bytes)))
        return tuple(times)

    def _exchange_s(self, num_bytes: int, peer: int | None) -> float:
        """Median seconds of exchanging messages with ``peer``; infinite for a rank that has no such neighbour."""
        if peer is None:
            self._own_median_s(lambda: None)
            return math.inf
        sent = torch.zeros(num_bytes // 4, device=self._device)
        received = torch.empty_like(sent)

        def exchange() -> None:
            operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return self._own_median_s(exchange)

    def _own_median_s(self, call: Callable[[], object]) -> float:
        """This rank's median seconds of a call; all ranks make the same number of calls."""
        call()
        once_s = self._agree(seconds_per_call(call, 1, self._device))
        num_calls = min(MAX_CALLS, max(1, int(self._spec.sample_s / max(once_s, 1e-9))))
        num_samples = max(3, min(self._spec.num_samples, int(self._left_s / 4 / max(once_s * num_calls, 1e-9))))
        self._left_s -= once_s * (2 + num_calls * num_samples)
        return statistics.median(seconds_per_call(call, num_calls, self._device) for _ in range(num_samples))

    def _agree(self, value_s: float) -> float:
        """The largest of the ranks' finite values."""
        finite_s = value_s if math.isfinite(value_s) else 0.0
        value = torch.tensor([finite_s], dtype=widest_float(self._device), device=self._device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return float(value.item())


def own_group(groups: Sequence[Sequence[int]], rank: int) -> ProcessGroup:
    """The process group of those ``groups`` that has this rank; every rank connects all of them."""
    if len(groups) == 1:
        return None
    made = [dist.new_group(list(ranks)) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)


def neighbours_of(rank: int, per_node: int, num_nodes: int) -> list[int | None]:
    """This rank's peers in two rounds of pairs of nodes: (0, 1), (2, 3), ... and (1, 2), (3, 4), ...

    Of an odd number of nodes one has no peer in each round; of an even number the two ends meet in the second.
    """
    node, place = divmod(rank, per_node)
    peers = [node ^ 1, node - 1 if node % 2 == 0 else node + 1]
    if num_nodes % 2 == 0:
        peers[1] %= num_nodes
    return [peer * per_node + place if 0 <= peer < num_nodes else None for peer in peers]

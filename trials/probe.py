"""Measurement of a gang's hardware instead of a candidate. Depends on ``parallel.mesh`` and number formats."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trials.accelerator.device import capability, installed_kind, is_host, open_device, synchronize, widest_float
from trials.accelerator.kinds import FAMILIES, DeviceKind
from trials.files import from_json, to_json, write_json
from trials.outcome import ProgressSink, ignore_progress, probe_report
from trials.parallel.mesh import RankIdentity, process_group
from trials.precision import MIN_CAPABILITY, matmul_precision
from trials.reports import Link, MatmulRate, MessageTime, ProbeSpec, RankRates, Rate, probe_spec

# Rates of one device, for matmuls and copies, and timing of calls.


FORMATS = {
    "float32": (torch.float32, "highest"),
    "tf32": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "highest"),
    "float16": (torch.float16, "highest"),
}
"""Type of the matrices and torch's precision of float32 matmuls, by number format."""
MIN_MATMUL_SIZE = 256
MAX_CALLS = 1000


def matmul_rates(spec: ProbeSpec, device: torch.device) -> dict[str, MatmulRate]:
    """Measure FLOP/s of square matmuls, for each number format that the device supports."""
    rates = {}
    for name, (dtype, precision) in FORMATS.items():
        if not _supports(name, device):
            continue
        with matmul_precision(precision):
            size, call = _large_matmul(dtype, spec, device)
            rate = _rate(2.0 * size**3, _samples(call, spec, device))
            rates[name] = MatmulRate(per_s=rate.per_s, log_spread=rate.log_spread, size=size)
    return rates


def _large_matmul(dtype: torch.dtype, spec: ProbeSpec, device: torch.device) -> tuple[int, Callable[[], object]]:
    """Return the side of the matrices and the call: the smallest power of two that takes ``sample_s``, or the limit."""
    size = MIN_MATMUL_SIZE
    while True:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))  # constants would draw less power
        out = torch.empty_like(a)
        call = partial(torch.mm, a, b, out=out)
        call()
        if 2 * size > spec.max_matmul_size or seconds_per_call(call, 1, device) >= spec.sample_s:
            return size, call
        size *= 2


def _supports(name: str, device: torch.device) -> bool:
    if (have := capability(device)) is not None:
        return have >= MIN_CAPABILITY.get(name, (0, 0))
    return name != "tf32"


def copy_rates(spec: ProbeSpec, device: torch.device) -> dict[str, Rate]:
    """Measure bytes per second of copies: within the device (read plus write), and to and from a GPU over its bus."""
    here = torch.zeros(spec.copy_bytes, dtype=torch.uint8, device=device)
    there = torch.zeros_like(here)
    rates = {"device": _rate(2.0 * spec.copy_bytes, _samples(partial(there.copy_, here), spec, device))}
    if not is_host(device):
        host = torch.zeros(spec.copy_bytes, dtype=torch.uint8, pin_memory=True)
        to_device, from_device = partial(here.copy_, host, non_blocking=True), partial(host.copy_, here)
        rates["to_device"] = _rate(float(spec.copy_bytes), _samples(to_device, spec, device))
        rates["from_device"] = _rate(float(spec.copy_bytes), _samples(from_device, spec, device))
    return rates


def _samples(call: Callable[[], object], spec: ProbeSpec, device: torch.device) -> list[float]:
    """Return seconds per call of each sample, after one warm-up call."""
    call()
    once_s = seconds_per_call(call, 1, device)
    num_calls = min(MAX_CALLS, max(1, math.ceil(spec.sample_s / max(once_s, 1e-9))))
    return [seconds_per_call(call, num_calls, device) for _ in range(spec.num_samples)]


def seconds_per_call(call: Callable[[], object], num_calls: int, device: torch.device) -> float:
    """Return mean seconds per call over this many consecutive calls."""
    synchronize(device)
    start_s = time.perf_counter()
    for _ in range(num_calls):
        call()
    synchronize(device)
    return (time.perf_counter() - start_s) / num_calls


def _rate(work: float, samples_s: Sequence[float]) -> Rate:
    low, middle, high = statistics.quantiles(samples_s, n=4)
    return Rate(per_s=work / middle, log_spread=math.log(high / low) / 2)


# Links between devices: times of all-reduces and transfers among a gang's ranks.


ProcessGroup = Any
"""A process group, for which torch has no single type; None means the whole gang."""


class CollectiveTimer:
    """Times operations of several ranks: all ranks call the same methods in the same order.

    The ranks of ``group`` take part and agree on the number of calls.
    """

    def __init__(self, spec: ProbeSpec, device: torch.device, group: ProcessGroup) -> None:
        self._spec = spec
        self._device = device
        self._group = group
        self._left_s = spec.part_limit_s
        self._agree(0.0)  # connects all ranks before pairs exchange

    def all_reduce(self) -> Link:
        """Time an all-reduce over the group, by message size."""

        def time_s(num_bytes: int) -> float:
            message = torch.zeros(num_bytes // 4, device=self._device)
            return self._agree(self._own_median_s(partial(dist.all_reduce, message, group=self._group)))

        return Link(world_size=dist.get_world_size(self._group), times=self._by_size(time_s))

    def transfers(self, neighbours: Sequence[int | None]) -> Link:
        """Exchange with one neighbour after the other; take the faster one for each size."""
        return Link(world_size=2, times=self._by_size(lambda n: min(self._exchange_s(n, peer) for peer in neighbours)))

    def _by_size(self, time_s: Callable[[int], float]) -> tuple[MessageTime, ...]:
        """Measure from the smallest message to the largest within the time limit, at least two."""
        times: list[MessageTime] = []
        for num_bytes in self._spec.message_bytes:
            if len(times) > 1 and self._agree(times[-1].time_s) * num_bytes / times[-1].num_bytes * 5 > self._left_s:
                break
            times.append(MessageTime(num_bytes=num_bytes, time_s=time_s(num_bytes)))
        return tuple(times)

    def _exchange_s(self, num_bytes: int, peer: int | None) -> float:
        """Return median seconds to exchange messages with ``peer``; infinite without a peer."""
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
        """Return this rank's median seconds per call; all ranks make the same number of calls."""
        call()
        once_s = self._agree(seconds_per_call(call, 1, self._device))
        num_calls = min(MAX_CALLS, max(1, int(self._spec.sample_s / max(once_s, 1e-9))))
        num_samples = max(3, min(self._spec.num_samples, int(self._left_s / 4 / max(once_s * num_calls, 1e-9))))
        self._left_s -= once_s * (2 + num_calls * num_samples)
        return statistics.median(seconds_per_call(call, num_calls, self._device) for _ in range(num_samples))

    def _agree(self, value_s: float) -> float:
        """Return the largest finite value of the ranks."""
        finite_s = value_s if math.isfinite(value_s) else 0.0
        value = torch.tensor([finite_s], dtype=widest_float(self._device), device=self._device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return float(value.item())


def own_group(groups: Sequence[Sequence[int]], rank: int) -> ProcessGroup:
    """Return this rank's process group among ``groups``; every rank creates all of them."""
    if len(groups) == 1:
        return None
    made = [dist.new_group(list(ranks)) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)


def neighbours_of(rank: int, per_node: int, num_nodes: int) -> list[int | None]:
    """Return this rank's peers in two rounds of pairs of nodes: (0, 1), (2, 3), ... and (1, 2), (3, 4), ...

    With an odd number of nodes, one has no peer in each round; with an even number, the two ends pair up in the second.
    """
    node, place = divmod(rank, per_node)
    peers = [node ^ 1, node - 1 if node % 2 == 0 else node + 1]
    if num_nodes % 2 == 0:
        peers[1] %= num_nodes
    return [peer * per_node + place if 0 <= peer < num_nodes else None for peer in peers]


# Probe of the hardware: matmul, copy, all-reduce and transfer rates of every rank.
#
# A gang runs it like a trial. It also runs under plain torchrun, on gloo or NCCL::
#
#     torchrun --nproc-per-node 2 -m trials.probe


def run_rank(spec: Mapping[str, Any], progress: ProgressSink) -> dict[str, Any]:
    """Measure as this process's rank; return a :class:`RankReport` as JSON, with the rates among its findings.

    ``spec`` is a :class:`ProbeSpec` as JSON. Identity and rendezvous are as in :func:`trials.worker.run_rank`.

    Raises:
        CodecError: the JSON is not a ProbeSpec. Errors of torch pass through.
    """
    wanted: ProbeSpec = from_json(ProbeSpec, spec)
    progress("starting")
    identity = RankIdentity.from_env()
    device = open_device(wanted.device, identity.local_rank)
    start_s = time.perf_counter()
    with process_group(identity, device):
        rates = measure(wanted, identity, device, progress)
    report = probe_report(rates, world_size=identity.world_size, duration_s=time.perf_counter() - start_s)
    return to_json(report)  # type: ignore[no-any-return]


def measure(spec: ProbeSpec, identity: RankIdentity, device: torch.device, progress: ProgressSink) -> RankRates:
    """Measure all parts of ``spec`` that this gang is large enough for."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", identity.world_size))
    num_nodes = identity.world_size // per_node
    values: dict[str, Any] = {}
    progress("warmup")
    if "compute" in spec.parts:
        dist.all_reduce(torch.zeros(1, device=device))  # synchronises the start
        values["matmul_flops_per_s"] = matmul_rates(spec, device)
        progress("measuring", step=1)
        values["copy_bytes_per_s"] = copy_rates(spec, device)
        progress("measuring", step=2)
    if "node" in spec.parts and per_node > 1:
        ranks = [list(range(node * per_node, (node + 1) * per_node)) for node in range(num_nodes)]
        values["node_all_reduce"] = CollectiveTimer(spec, device, own_group(ranks, identity.rank)).all_reduce()
        progress("measuring", step=3)
    if "network" in spec.parts and num_nodes > 1:
        ranks = [list(range(place, num_nodes * per_node, per_node)) for place in range(per_node)]
        values["network_all_reduce"] = CollectiveTimer(spec, device, own_group(ranks, identity.rank)).all_reduce()
        progress("measuring", step=4)
        neighbours = neighbours_of(identity.rank, per_node, num_nodes)
        values["network_transfer"] = CollectiveTimer(spec, device, None).transfers(neighbours)
        progress("measuring", step=5)
    return RankRates(rank=identity.rank, **values)


def main() -> None:
    """Measure under torchrun; rank 0 reports the rates of all ranks."""
    parser = argparse.ArgumentParser(prog="python -m trials.probe", description="Measure this hardware.")
    parser.add_argument("--device", choices=list(FAMILIES), help="what to measure (default: what torch finds)")
    parser.add_argument("--out", type=Path, help="where rank 0 writes the rates as JSON (default: stdout)")
    args = parser.parse_args()
    kind: DeviceKind = args.device or installed_kind()  # detects devices only without --device
    identity = RankIdentity.from_env()
    device = open_device(kind, identity.local_rank)
    everyone: list[Any] = [None] * identity.world_size
    with process_group(identity, device):
        rates = measure(probe_spec(kind), identity, device, ignore_progress)
        dist.all_gather_object(everyone, to_json(rates))
    if identity.rank == 0:
        write_json(everyone, args.out)


if __name__ == "__main__":
    main()

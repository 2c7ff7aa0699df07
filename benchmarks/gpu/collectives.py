"""Collectives over all devices: ``python -m benchmarks.gpu.collectives`` is a rank, :func:`measure` the part.

Bus bandwidth as nccl-tests define it (PERFORMANCE.md of NVIDIA/nccl-tests): what each rank's links must carry at
least, whatever the algorithm. For n ranks 2 (n - 1) / n times the bytes of an all-reduce, (n - 1) / n times those of
the larger side of an all-gather, a reduce-scatter or an all-to-all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.parts import Setting
from benchmarks.gpu.ranks import GIB, run_ranks
from trials.accelerator.device import open_device, synchronize
from trials.files import write_json
from trials.parallel.mesh import RankIdentity, process_group

MIB = 1 << 20
SIZES = (MIB, 16 * MIB, 256 * MIB)
SMALL_SIZES = (MIB // 4, 4 * MIB)
FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


def measure(setting: Setting) -> None:
    n = setting.num_devices
    sizes = [divisible(size, n) for size in (SMALL_SIZES if setting.is_small else SIZES)]
    arguments = ["--device", setting.device, "--sizes", ",".join(map(str, sizes))]
    run = run_ranks(setting, "benchmarks.gpu.collectives", arguments, world_size=n)
    if run.report is None:
        setting.tell(run.failure())
        return
    for name, num_bytes, seconds in run.report:
        bus = FACTORS[name] * (n - 1) / n * num_bytes / seconds / GIB
        row = {"collective": name, "MiB": round(num_bytes / MIB, 3), "us": round(seconds * 1e6, 1)}
        setting.tell(row | {"bus GiB/s": round(bus, 2)})


def divisible(num_bytes: int, num_ranks: int) -> int:
    """The next number of bytes that ranks share out evenly in 16-bit numbers."""
    return -(-num_bytes // (2 * num_ranks)) * 2 * num_ranks


def main() -> None:
    """Be one rank; rank 0 writes the median seconds of each collective and size, of the slowest rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    identity = RankIdentity.from_env()
    device = open_device(args.device, identity.local_rank)
    found = []
    with process_group(identity, device):
        for num_bytes in map(int, args.sizes.split(",")):
            whole = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device)
            part = whole.chunk(identity.world_size)[identity.rank].clone()
            calls: dict[str, Callable[[], object]] = {
                "all_reduce": lambda whole=whole: dist.all_reduce(whole, dist.ReduceOp.MAX),
                "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
                "reduce_scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),
                "all_to_all": lambda whole=whole: dist.all_to_all_single(torch.empty_like(whole), whole),
            }
            for name, call in calls.items():
                found.append((name, num_bytes, _slowest_s(call, device)))
    if identity.rank == 0:
        write_json(found, args.out)


def _slowest_s(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds over some calls, of the rank that took longest."""
    seconds = []
    for number in range(8):
        synchronize(device)
        start_s = time.perf_counter()
        call()
        synchronize(device)
        if number >= 3:
            seconds.append(time.perf_counter() - start_s)
    slowest: Tensor = torch.tensor(statistics.median(seconds), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


if __name__ == "__main__":
    main()

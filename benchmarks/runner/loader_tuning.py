"""The loader's hill climb against exhaustive search: how much of the best throughput, for how many of the points.

Both run over the same data in the same process: JPEG images decoded on the CPU, where worker processes matter, and
text, where they do not. What each chose is then timed again in turns with the other, so that a noisy moment hits both;
the ratio is the median over the turns.

    python -m benchmarks.runner.loader_tuning --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trials.datasets import Point, Share, StepBatches, build_dataset, climb, grid, time_batches
from trials.spec import ImageFolderData, LlamaModel, Loader, ResNetModel, TextData, Workload

GOAL = {"throughput_ratio": 0.95, "share_of_points": 0.4}
MODEL = LlamaModel(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=4, ffn_hidden_size=128)
WORKLOADS = {
    "images": Workload(model=ResNetModel(), data=ImageFolderData(), seq_length=1, global_batch_size=8),
    "text": Workload(model=MODEL, data=TextData(), seq_length=1024, global_batch_size=64),
}


@dataclass(frozen=True)
class Plan:
    max_workers: int
    num_batches: int
    turns: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--max-workers", type=int, default=8)
    parser.add_argument("--batches", type=int, default=500, help="per point, less where they take too long")
    parser.add_argument("--turns", type=int, default=15, help="of timing both choices again")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # as a rank has
    plan = Plan(args.max_workers, args.batches, args.turns)
    rows = {}
    for name, workload in WORKLOADS.items():
        rows[name] = compare(build_dataset(workload, Share(global_batch_size=workload.global_batch_size)), plan)
        print(f"{name}: {json.dumps(rows[name])}", file=sys.stderr, flush=True)
    print(json.dumps({"hill_climb": rows, "goal": GOAL}, indent=None if args.json else 2))


def compare(dataset: StepBatches, plan: Plan) -> dict[str, Any]:
    """Both searches over one data set, and their choices again in turns."""

    def time_of(point: Point) -> float:
        loader = Loader(num_workers=point[0], prefetch_factor=point[1])
        return time_batches(dataset, loader, plan.num_batches, pin_memory=False)

    points = grid(plan.max_workers)
    climbed, climb_s = _timed(lambda: climb(time_of, plan.max_workers))
    exhaustive, exhaustive_s = _timed(lambda: {point: time_of(point) for point in points})
    chosen, best = (min(times, key=times.__getitem__) for times in (climbed, exhaustive))
    again = [_pair(time_of, chosen, best, swap=turn % 2 == 1) for turn in range(plan.turns)]
    return {
        "throughput_ratio": 1.0 if chosen == best else statistics.median(theirs / ours for ours, theirs in again),
        "share_of_points": len(climbed) / len(points),
        "climb_s": climb_s,
        "exhaustive_s": exhaustive_s,
        "chosen": chosen,
        "best": best,
        "chosen_batch_s": statistics.median(ours for ours, _ in again),
        "best_batch_s": statistics.median(theirs for _, theirs in again),
        "in_line_batch_s": exhaustive[0, 0],
    }


def _timed(search: Callable[[], dict[Point, float]]) -> tuple[dict[Point, float], float]:
    start = time.perf_counter()
    return search(), time.perf_counter() - start


def _pair(time_of: Callable[[Point], float], chosen: Point, best: Point, *, swap: bool) -> tuple[float, float]:
    if swap:
        best_s = time_of(best)
        return time_of(chosen), best_s
    return time_of(chosen), time_of(best)


if __name__ == "__main__":
    main()

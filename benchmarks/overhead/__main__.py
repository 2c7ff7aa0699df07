"""Milliseconds of orchestration per no-op trial, and seconds from dispatch to a gang's first all-reduce.

Ours is complete: ask (TPE), ledger, fork of a 2-rank gang with its first all-reduce, tell, MLflow. The peers, in the
same run on the same machine:

* Ray Tune + OptunaSearch with a function trainable: a fresh process per trial, like ours; no gang, no MLflow.
* the same with ``reuse_actors=True``: one warm process per slot; no gang, no MLflow, nothing isolated.
* Ray Train's TorchTrainer (gloo, 2 workers), for the gang.

    python -m benchmarks.overhead --json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks import ROOT

SLOTS = (1, 2)
NO_OP = ("ours", "ray_tune", "ray_tune_reuse")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--trials", type=int, default=40, help="no-op trials per measurement")
    parser.add_argument("--repeats", type=int, default=3, help="repeats; medians are reported")
    parser.add_argument("--slots", type=int, nargs="+", default=SLOTS, help="numbers of trials at a time")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ |= {"RAY_TRAIN_V2_ENABLED": "1", "RAY_AIR_NEW_OUTPUT": "0", "RAY_DEDUP_LOGS": "0"}
    warnings.simplefilter("ignore")
    with _stdout_for_result() as out:
        result = measure(args.trials, args.repeats, args.slots)
        print(json.dumps(result, indent=None if args.json else 2), file=out)


def measure(num_trials: int, repeats: int, slots: Sequence[int] = SLOTS) -> dict[str, Any]:
    """All figures; repeats of ours and of the peers alternate, so that a noisy minute hits both."""
    rows: dict[str, list[float]] = {}
    for repeat in range(repeats):
        for name, figure in (*_sample_ours(num_trials, slots), *_sample_peers(num_trials, slots)):
            rows.setdefault(name, []).append(figure)
            print(f"repeat {repeat + 1} of {repeats}: {name} {figure:.4g}", file=sys.stderr, flush=True)
    medians = {name: statistics.median(row) for name, row in rows.items()}
    by_slots = {num: _with_ratios({name: medians[f"{name}@{num}"] for name in NO_OP}) for num in slots}
    gang = {name: medians[name] for name in ("ours", "torch_trainer")}
    gang["ratio"] = gang["torch_trainer"] / gang["ours"]
    return {
        "no_op_trial_ms": by_slots.get(2, next(iter(by_slots.values()))),
        "gang_start_s": gang,
        "no_op_trial_ms_by_concurrency": by_slots,
        "samples": rows,
    }


def _sample_ours(num_trials: int, slots: Sequence[int]) -> Iterator[tuple[str, float]]:
    from benchmarks.overhead import ours

    with ours.cluster(max(slots)) as lease:
        for num in slots:
            yield f"ours@{num}", ours.no_op_trial_ms(lease, num_trials, num)
        yield "ours", statistics.median(ours.gang_start_s(lease) for _ in range(5))


def _sample_peers(num_trials: int, slots: Sequence[int]) -> Iterator[tuple[str, float]]:
    """Measure the peers in a Ray of their own, since a lease holds all of a node."""
    from benchmarks.overhead import ray_peer

    with ray_peer.cluster(max(slots)):
        for num in slots:
            yield f"ray_tune@{num}", ray_peer.no_op_trial_ms(num_trials, num, reuse=False)
            yield f"ray_tune_reuse@{num}", ray_peer.no_op_trial_ms(num_trials, num, reuse=True)
        yield "torch_trainer", ray_peer.gang_start_s()


def _with_ratios(row: dict[str, float]) -> dict[str, float]:
    return {
        **row,
        "ratio": row["ray_tune"] / row["ours"],
        "ratio_reuse": row["ray_tune_reuse"] / row["ours"],
    }


@contextmanager
def _stdout_for_result() -> Iterator[Any]:
    """Send to stderr what is printed while inside: Ray prints on stdout, which is for the result."""
    logging.disable(logging.WARNING)
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        yield out


if __name__ == "__main__":
    main()

"""Guided search, TPE and random search on ten synthetic programs without a cost model.

    OMP_NUM_THREADS=1 python -m benchmarks.search.generic --seeds 10

Prints, per program and sampler, the trials until within 2% of the best (the mean over seeds, one more than allowed
where never) and how far the best of the first 5, 10 and 20 trials is from it. Every sampler is the product's own
(``orchestrator.search.search.Search``); TPE starts as the product starts it. Trial 1 is the baseline.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from benchmarks.search.generic.programs import MADE
from benchmarks.search.generic.sweeps import Searched, search

SAMPLERS = ("guided", "tpe", "random")
GOALS = (5, 10, 20)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _row(program: str, sampler: str, found: Sequence[Searched]) -> dict[str, object]:
    return {
        "program": program,
        "sampler": sampler,
        "trials_to_2_percent": _mean([one.to_best for one in found]),
        **{f"regret_{number}": _mean([one.regret(number) for one in found]) for number in GOALS},
        "oom_of_10": _mean([one.num_oom for one in found]),
    }


def main() -> None:
    """Runs the comparison and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--programs", nargs="*", help="names, all by default")
    parser.add_argument("--samplers", nargs="*", default=SAMPLERS, choices=SAMPLERS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for make in MADE:
        made = [make(seed) for seed in range(args.seeds)]
        if args.programs and made[0].name not in args.programs:
            continue
        for sampler in args.samplers:
            found = [search(program, sampler, seed, args.trials) for seed, program in enumerate(made)]
            rows.append(_row(made[0].name, sampler, found))
            print(f"{made[0].name} {sampler}", file=sys.stderr)
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print("| program | sampler | trials to 2% | regret % after 5 / 10 / 20 | OOM of first 10 |")
    print("|---|---|---:|---:|---:|")
    for row in rows:
        regret = " / ".join(f"{100 * float(str(row[f'regret_{number}'])):.1f}" for number in GOALS)
        to_best, oom = float(str(row["trials_to_2_percent"])), float(str(row["oom_of_10"]))
        print(f"| {row['program']} | {row['sampler']} | {to_best:.1f} | {regret} | {oom:.1f} |")


if __name__ == "__main__":
    main()

"""Guided search, a Gaussian process, TPE and random search on synthetic programs without a cost model.

    OMP_NUM_THREADS=1 python -m benchmarks.search.generic --draws 10 [--seed 4711] [--peaks] [--json]

Prints, per program and sampler, the trials until within 2% of the best (the mean over draws, one more than allowed
where never) and how far the best of the first 5, 10 and 20 trials is from it. Every run draws other machines for the
programs, unless a seed is given. Steps and runs have noise. Scripts state no peak memory, only whether they ran; with
``--peaks`` they do. All samplers but ``gp`` are the product's own (``orchestrator.search.search.Search``); TPE starts
as the product starts it. ``gp`` is Optuna's Gaussian process as it comes. Trial 1 is the baseline.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from benchmarks.against import peers
from benchmarks.search.figures import REGRETS
from benchmarks.search.generic.programs import MADE, Program
from benchmarks.search.generic.sweeps import Searched, search
from benchmarks.search.seeds import add_seed, chosen, draws
from orchestrator.search.search import SamplerName
from trials.spec import ScriptModel

SAMPLERS = ("guided", "gp", "tpe", "random")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _row(program: str, sampler: str, found: Sequence[Searched]) -> dict[str, object]:
    return {
        "program": program,
        "sampler": sampler,
        "trials_to_2_percent": _mean([one.to_best for one in found]),
        **{f"regret_{number}": _mean([one.regret(number) for one in found]) for number in REGRETS},
        "oom_of_10": _mean([one.num_oom for one in found]),
    }


def _search(program: Program, sampler: str, seed: int, num_trials: int, *, all_peaks: bool) -> Searched:
    if sampler == "gp":
        return peers.search(program, peers.optimisers()["Optuna, Gaussian process"], seed, num_trials)
    reports_peaks = all_peaks or not isinstance(program.workload.model, ScriptModel)
    name: SamplerName = "guided" if sampler == "guided" else "tpe" if sampler == "tpe" else "random"
    return search(program, name, seed, num_trials, reports_peaks=reports_peaks)


def main() -> None:
    """Runs the comparison and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--draws", type=int, default=10, help="machines per program")
    add_seed(parser)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--programs", nargs="*", help="names, all by default")
    parser.add_argument("--samplers", nargs="*", default=SAMPLERS, choices=SAMPLERS)
    parser.add_argument("--peaks", action="store_true", help="scripts state their peak memory")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    seed, rows = chosen(args.seed), []
    for make in MADE:
        made = [make(number) for number in draws(seed, args.draws)]
        if args.programs and made[0].name not in args.programs:
            continue
        for sampler in args.samplers:
            found = [
                _search(program, sampler, number, args.trials, all_peaks=args.peaks)
                for number, program in enumerate(made)
            ]
            rows.append(_row(made[0].name, sampler, found))
            print(f"{made[0].name} {sampler}", file=sys.stderr)
    if args.json:
        print(json.dumps({"seed": seed, "rows": rows}, indent=2))
        return
    print(f"seed {seed}\n")
    print("| program | sampler | trials to 2% | regret % after 5 / 10 / 20 | OOM of first 10 |")
    print("|---|---|---:|---:|---:|")
    for row in rows:
        regret = " / ".join(f"{100 * float(str(row[f'regret_{number}'])):.1f}" for number in REGRETS)
        to_best, oom = float(str(row["trials_to_2_percent"])), float(str(row["oom_of_10"]))
        print(f"| {row['program']} | {row['sampler']} | {to_best:.1f} | {regret} | {oom:.1f} |")


if __name__ == "__main__":
    main()

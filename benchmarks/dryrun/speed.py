"""CPU-seconds of a dry run, those of starting torch among them, and what the dry run of everything takes instead.

python -m benchmarks.dryrun.speed --markdown
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os

from benchmarks.dryrun.accuracy import DOCS, MarkdownTable, estimated, rewrite
from benchmarks.dryrun.cases import deep_pipeline
from trials.dryrun.estimate import DryRunEstimate
from trials.spec import TrialSpec

CASES: tuple[tuple[int, int, bool], ...] = ((16, 16, False), (16, 128, False), (4, 16, True))
"""Pipeline ranks, micro-batches, and whether the dry run of everything is to be had in a minute."""
GOAL_S = 10.0
"""What the dry run of a candidate of 1,024 ranks is to take at most."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What one dry run took."""

    case: str
    cpu_s: float
    exact_cpu_s: float | None
    largest_difference: float | None
    """Of a stage's peak, against the dry run of everything."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--markdown", action="store_true", help=f"rewrite the table in {DOCS.name}")
    args = parser.parse_args()
    rows = [measure(pp, num_microbatches, exact=exact) for pp, num_microbatches, exact in CASES]
    if args.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))
        return
    print(table(rows))
    if args.markdown:
        rewrite({"speed": table(rows)})


def measure(pp: int, num_microbatches: int, *, exact: bool) -> Speed:
    """Time one case; ``exact`` also holds it against the dry run of everything."""
    spec = deep_pipeline(pp, num_microbatches)
    made, cpu_s = timed(spec, exact=False)
    whole, exact_cpu_s = timed(spec, exact=True) if exact else (None, None)
    pairs = zip(made.stages, whole.stages, strict=True) if whole is not None else ()
    differences = [abs(stage.peak_bytes / reference.peak_bytes - 1.0) for stage, reference in pairs]
    return Speed(
        case=f"{spec.candidate.layout.world_size:,} ranks: PP{pp}, TP8, ZeRO-1 x8, {num_microbatches} micro-batches",
        cpu_s=cpu_s,
        exact_cpu_s=exact_cpu_s,
        largest_difference=max(differences, default=None),
    )


def timed(spec: TrialSpec, *, exact: bool) -> tuple[DryRunEstimate, float]:
    """The estimate, and the CPU-seconds of this process and its children."""
    before = os.times()
    made = estimated(spec.workload, spec.candidate, mode="accelerator", exact=exact)
    spent = [after - earlier for after, earlier in zip(os.times()[:4], before[:4], strict=True)]
    return made, sum(spent)


def table(rows: list[Speed]) -> str:
    out = MarkdownTable("case", "CPU s", "goal", "everything, CPU s", "ratio", "largest difference")
    for row in rows:
        goal = f"{GOAL_S:.0f}" if row.case.startswith(f"{1024:,} ") else ""
        if row.exact_cpu_s is None or row.largest_difference is None:
            out.row(row.case, f"{row.cpu_s:.1f}", goal, "", "", "")
            continue
        exact = f"{row.exact_cpu_s:.1f}", f"{row.exact_cpu_s / row.cpu_s:.1f}", f"{row.largest_difference:.4%}"
        out.row(row.case, f"{row.cpu_s:.1f}", goal, *exact)
    return out.text()


if __name__ == "__main__":
    main()

"""How near dry runs come: to real gloo runs on this machine, and, extrapolated, to themselves in full.

* peak memory of every family, and of some compiled ones, against the allocator's events in a real run of the same trial
  (mode ``cpu``)
* Llama2-13B on up to 1024 ranks, computed from few layers and micro-batches, against the dry run of all, and
  CPU-seconds of both

    python -m benchmarks.dryrun.accuracy --markdown
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import sys
from typing import Any

from benchmarks import ROOT
from benchmarks.dryrun.cases import COMPILED, FAMILIES, LARGE
from benchmarks.dryrun.gang import measured_peaks
from orchestrator.planning.dry_runs import estimate_all
from trials.dryrun.estimate import DryRunEstimate, Mode, RunFailure
from trials.spec import Candidate, TrialSpec, Workload

DOCS = ROOT / "docs" / "dry-run.md"
GIB, MIB = 2**30, 2**20
EXACT = 0.0005


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """An estimated peak and what it is held against, for one pipeline stage."""

    case: str
    stage: int
    predicted_bytes: int
    reference_bytes: int
    predicted_cpu_s: float
    reference_cpu_s: float = 0.0
    counts_equal: bool = True
    """Whether FLOPs and collectives are the same, where both sides count them."""

    @property
    def difference(self) -> float:
        return self.predicted_bytes / self.reference_bytes - 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--markdown", action="store_true", help=f"rewrite the tables in {DOCS.name}")
    parser.add_argument("--only", nargs="*", help="names of cases; default: all. A table without any stays")
    args = parser.parse_args()
    os.environ["KINETO_LOG_LEVEL"] = "99"
    families, compiled = (
        [row for name, spec in cases.items() if _wanted(name, args.only) for row in against_real_run(name, spec)]
        for cases in (FAMILIES, COMPILED)
    )
    large = [row for name in LARGE if _wanted(name, args.only) for row in against_full_run(name)]
    if args.json:
        rows = [{**dataclasses.asdict(row), "difference": row.difference} for row in (*families, *compiled, *large)]
        print(json.dumps(rows))
        return
    tables = {"families": families_table(families)} if families else {}
    tables |= {"compiled": families_table(compiled)} if compiled else {}
    tables |= {"large": large_table(large)} if large else {}
    print("\n\n".join(tables.values()))
    if args.markdown:
        rewrite(tables)


def _wanted(name: str, only: list[str] | None) -> bool:
    return not only or name in only


def against_real_run(name: str, spec: TrialSpec) -> list[Accuracy]:
    """One row per pipeline stage. Of equal ranks the lowest real peak counts, as unseen releases only add to it."""
    layout = spec.candidate.layout
    estimate = estimated(spec.workload, spec.candidate, mode="cpu", exact=True)
    peaks = measured_peaks(spec)
    per_stage = layout.world_size // layout.pp
    rows = [
        Accuracy(
            case=name,
            stage=stage.stage,
            predicted_bytes=stage.peak_bytes,
            reference_bytes=min(peaks[stage.stage * per_stage : (stage.stage + 1) * per_stage]),
            predicted_cpu_s=estimate.cpu_s,
        )
        for stage in estimate.stages
    ]
    _tell(rows)
    return rows


def against_full_run(name: str) -> list[Accuracy]:
    """Rows that compare an extrapolated run with the one in full, one per pipeline stage."""
    spec = LARGE[name]
    small = estimated(spec.workload, spec.candidate, mode="accelerator", exact=False)
    full = estimated(spec.workload, spec.candidate, mode="accelerator", exact=True)
    rows = [
        Accuracy(
            case=name,
            stage=stage.stage,
            predicted_bytes=stage.peak_bytes,
            reference_bytes=reference.peak_bytes,
            predicted_cpu_s=small.cpu_s / len(small.stages),
            reference_cpu_s=full.cpu_s / len(full.stages),
            counts_equal=(stage.flops, stage.collectives) == (reference.flops, reference.collectives),
        )
        for stage, reference in zip(small.stages, full.stages, strict=True)
    ]
    _tell(rows)
    return rows


def estimated(workload: Workload, candidate: Candidate, *, mode: Mode, exact: bool) -> DryRunEstimate:
    (made,) = estimate_all(workload, [candidate], mode=mode, exact=exact)
    if isinstance(made, RunFailure):
        raise RuntimeError(f"{made.reason}: {made.message}")
    return made


def _tell(rows: list[Accuracy]) -> None:
    for row in rows:
        print(f"{row.case}, stage {row.stage}: {row.difference:+.2%}", file=sys.stderr, flush=True)


def worst_stages(rows: list[Accuracy]) -> list[Accuracy]:
    """The stage of every case that is furthest off."""
    cases: dict[str, Accuracy] = {}
    for row in rows:
        if row.case not in cases or abs(row.difference) > abs(cases[row.case].difference):
            cases[row.case] = row
    return list(cases.values())


def families_table(rows: list[Accuracy]) -> str:
    """A row for every case that is off by more than 0.05%, one for all others."""
    out = MarkdownTable("case", "stage", "dry run MiB", "real run MiB", "difference")
    exact = [row.case for row in worst_stages(rows) if abs(row.difference) < EXACT]
    for row in worst_stages(rows):
        if row.case not in exact:
            predicted, reference = f"{row.predicted_bytes / MIB:.2f}", f"{row.reference_bytes / MIB:.2f}"
            out.row(row.case, row.stage, predicted, reference, f"{row.difference:+.2%}")
    if exact:
        out.row("; ".join(exact), "all", "", "", f"below {EXACT:.2%}")
    return out.text()


def large_table(rows: list[Accuracy]) -> str:
    out = MarkdownTable("case", "stage", "peak GiB", "exact GiB", "difference", "counts", "CPU s", "exact CPU s")
    for row in worst_stages(rows):
        sizes = f"{row.predicted_bytes / GIB:.3f}", f"{row.reference_bytes / GIB:.3f}"
        times = f"{row.predicted_cpu_s:.1f}", f"{row.reference_cpu_s:.1f}"
        counts = "equal" if all(other.counts_equal for other in rows if other.case == row.case) else "differ"
        out.row(row.case, row.stage, *sizes, f"{row.difference:+.2%}", counts, *times)
    return out.text()


class MarkdownTable:
    def __init__(self, *titles: str) -> None:
        self._out = io.StringIO()
        self.row(*titles)
        self.row("---", *["---:"] * (len(titles) - 1))

    def row(self, *cells: Any) -> None:
        self._out.write(f"| {' | '.join(map(str, cells))} |\n")

    def text(self) -> str:
        return self._out.getvalue().rstrip()


def rewrite(tables: dict[str, str]) -> None:
    """Replace what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``."""
    text = DOCS.read_text()
    for name, table in tables.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = f"{head}{begin}\n{table}\n{end}{tail}"
    DOCS.write_text(text)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()

"""Faults injected into whole sweeps: how soon each is noticed, and that nothing is lost, doubled or left behind.

Every sweep runs on a real Ray of five hosts, which are network, process and name spaces of this machine: a head, the
controller's, and three nodes of four CPUs. The gangs are real (gloo); their step times depend on the candidate alone,
so that the winner is known. Each sweep is compared with an undisturbed one of the same seed, by the tests' checker.

    python -m benchmarks.faults --json
    python -m benchmarks.faults --repeats 5 --only "link cut" --only "head killed"

Network namespaces need Linux and root.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.faults.checks import Story
from benchmarks.faults.endure import Endured, Fault, endure
from benchmarks.faults.kinds import FAULTS
from benchmarks.faults.namespaces import why_not
from benchmarks.faults.ray_nodes import RayNodes
from benchmarks.faults.trial_sweep import Stage, Sweep

COLUMNS = (
    ("fault", "fault"),
    ("injected", "times"),
    ("detected_s", "noticed in s"),
    ("recovered_s", "next result in s"),
    ("lost", "lost"),
    ("duplicates", "doubled"),
    ("leaked", "left"),
    ("same_winner", "same winner"),
    ("other_problems", "other"),
    ("bound", "what bounds the time to notice it"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--repeats", type=int, default=3, help="how often each fault is injected")
    parser.add_argument("--only", action="append", choices=list(FAULTS), help="only this fault; repeatable")
    args = parser.parse_args()
    if reason := why_not():
        parser.exit(2, f"error: {reason}\n")
    chosen = [FAULTS[name] for name in args.only or FAULTS]
    rows = [_row(fault, runs) for fault, runs in _inject(chosen, args.repeats)]
    print(json.dumps(rows, indent=1) if args.json else _table(rows))
    if any(row["lost"] or row["duplicates"] or row["leaked"] or row["other_problems"] for row in rows):
        sys.exit(1)


def _inject(faults: Sequence[Fault], repeats: int) -> Iterator[tuple[Fault, list[Endured | str]]]:
    """Each fault with what became of its sweeps; a text is why one could not be seen to its end."""
    with _cluster() as (cluster, stage), tempfile.TemporaryDirectory(prefix="tc-faults-") as folder:
        undisturbed = _undisturbed(cluster, Path(folder))
        for number, fault in enumerate(faults):
            runs = []
            for repeat in range(repeats):
                own = Path(folder) / f"sweep-{number}-{repeat}"
                own.mkdir()
                runs.append(_endure(fault, cluster, stage, own, undisturbed))
                print(f"{fault.name}, {repeat + 1} of {repeats}: {_words(runs[-1])}", file=sys.stderr, flush=True)
                cluster.repair()
            yield fault, runs


def _endure(fault: Fault, cluster: RayNodes, stage: Stage, folder: Path, undisturbed: Story) -> Endured | str:
    try:
        return endure([fault], cluster, stage, folder, undisturbed)
    except AssertionError as error:
        return str(error)


@contextmanager
def _cluster() -> Iterator[tuple[RayNodes, Stage]]:
    with tempfile.TemporaryDirectory(prefix="tc-nodes-", ignore_cleanup_errors=True) as folder:
        stage = Stage(Path(folder) / "stage")
        nodes = RayNodes(Path(folder))
        nodes.env |= stage.env
        with nodes:
            yield nodes, stage


def _undisturbed(cluster: RayNodes, folder: Path) -> Story:
    own = folder / "undisturbed"
    own.mkdir()
    sweep = Sweep(cluster, own)
    sweep.run()
    return sweep.story()


def _row(fault: Fault, runs: Sequence[Endured | str]) -> dict[str, Any]:
    """Sums over the repeats; medians of times."""
    seen = [run for run in runs if isinstance(run, Endured)]
    problems = [problem for run in seen for problem in run.problems]
    lost = [problem for problem in problems if "was not measured" in problem or "in MLflow 0 times" in problem]
    doubled = [problem for problem in problems if "is measured" in problem or "in MLflow" in problem]
    other = [problem for problem in problems if problem not in lost + doubled]
    return {
        "fault": fault.name,
        "injected": len(runs),
        "detected_s": _median(run.detected_s[0] for run in seen),
        "recovered_s": _median(run.recovered_s for run in seen),
        "lost": len(lost),
        "duplicates": len([problem for problem in doubled if problem not in lost]),
        "leaked": sum(len(run.leaks) for run in seen),
        "same_winner": sum(run.same_winner for run in seen),
        "other_problems": [*other, *(run for run in runs if isinstance(run, str))],
        "bound": fault.bound,
    }


def _median(values: Iterator[float]) -> float | None:
    found = list(values)
    return round(statistics.median(found), 2) if found else None


def _words(run: Endured | str) -> str:
    if isinstance(run, str):
        return run
    problems = "; ".join([*run.problems, *run.leaks]) or "nothing wrong"
    return f"noticed in {run.detected_s[0]:.2f} s, next result {run.recovered_s:.2f} s later; {problems}"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(title for _, title in COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = [len(value) if isinstance(value := row[key], list) else value for key, _ in COLUMNS]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""What the loss gate lets pass and what it catches: small models trained for 20 steps by real gangs.

* the largest deviations of legitimate training, by class of number formats, over layouts, recompute and graph mode:
  what the tolerances of orchestrator/proof/loss_gate.py are taken from
* whether the gate catches deliberate bugs, by class

    python -m benchmarks.loss_gate [--seeds 2] [--only legitimate | bugs] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.loss_gate.bugs import BUGS, Bug, loss_scale_left_in, no_master_weights
from benchmarks.loss_gate.runs import CLASSES, HOOKS, NUM_STEPS, WORKLOADS, spec_of, train, variants
from orchestrator.proof.loss_gate import (
    ROUNDING,
    Curve,
    GateTrajectories,
    LossComparison,
    Trajectory,
    deviations,
    judge_gate,
)
from orchestrator.sweep.events import GateSettings
from tests.trials.test_sensitivity import BUGS as LAYOUT_BUGS
from trials.spec import TrialSpec, Workload

GATE = GateSettings(num_steps=NUM_STEPS)
SHOWN_STEPS = (1, 2, 5, 10, 20)
BUGGY_CLASSES = ("float32", "bfloat16 O1", "bfloat16 O2", "float16 O1")
EXACT = "float32"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """Largest deviation in each step over all runs of a class, and the largest share of its limit any of them took."""

    workload: str
    class_name: str
    compared_with: str
    num_runs: int
    num_spikes: int
    loss: list[float]
    grad_norm: list[float]
    share_of_limit: float
    times_twin: float
    """Largest loss in multiples of how far the twin has been off, where it is beyond a tenth of its limit."""
    answers: dict[str, int]
    """How often the gate gave each answer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Caught:
    """Whether the gate refuses a bug, and where it shows first."""

    bug: str
    class_name: str
    compared_with: str
    answer: str
    how: str
    """Which quantity shows it first, in which step, at how many times its limit; or why it did not train."""
    share_of_limit: float


# ---- legitimate training ----


def legitimate(workload: str, seeds: Iterable[int], only: Iterable[str] = CLASSES) -> Iterator[Largest]:
    """Deviations of every class, from fp32 and from the plain run of its own class."""
    exact: dict[int, Trajectory] = {}
    for class_name in dict.fromkeys((EXACT, *only)):
        todo = [(seed, *one) for seed in seeds for one in variants(_seeded(workload, seed), class_name)]
        runs = train([spec for *_, spec in todo], HOOKS.get(class_name))
        own, of_exact = _twins(workload, seeds, class_name, class_name), _twins(workload, seeds, EXACT, class_name)
        plain: dict[int, Trajectory] = {}
        pairs: dict[str, list[GateTrajectories]] = defaultdict(list)
        for (seed, name, _), run in zip(todo, runs, strict=True):
            if isinstance(run, str):
                print(f"{workload} {class_name} {name} seed {seed}: {run}", file=sys.stderr)
                continue
            first = plain.setdefault(seed, run)
            if first is not run:
                pairs[class_name].append(GateTrajectories(baseline=first, finalist=run, twin=own[seed]))
            if exact.setdefault(seed, run) is not first:
                pairs[EXACT].append(GateTrajectories(baseline=exact[seed], finalist=run, twin=of_exact[seed]))
        for compared_with in sorted(pairs):
            found = _largest(workload, class_name, compared_with, pairs[compared_with])
            _tell(found)
            yield found


def _twins(workload: str, seeds: Iterable[int], class_name: str, coarser: str) -> dict[int, Trajectory]:
    """Seed to the plain run of ``class_name`` with initial weights off by the rounding errors of ``coarser``."""
    of = {seed: spec_of(_seeded(workload, seed), class_name) for seed in seeds}
    specs = [dataclasses.replace(spec, perturbation=ROUNDING[coarser]) for spec in of.values()]
    runs = dict(zip(of, train(specs, HOOKS.get(class_name)), strict=True))
    return {seed: run for seed, run in runs.items() if isinstance(run, Trajectory)}


def _seeded(workload: str, seed: int) -> Workload:
    return dataclasses.replace(WORKLOADS[workload], seed=seed)


def _largest(workload: str, class_name: str, against: str, pairs: list[GateTrajectories]) -> Largest:
    loss, norm = [0.0] * NUM_STEPS, [0.0] * NUM_STEPS
    share, times, answers = 0.0, 0.0, dict.fromkeys(("passed", "failed", "inconclusive"), 0)
    for runs in pairs:
        expected = runs.expected
        found = deviations(runs, GATE, WORKLOADS[workload])
        for curve, largest in ((found.loss, loss), (found.grad_norm, norm)):
            until = (expected.spike or NUM_STEPS + 1) - 1
            for i, deviation in enumerate(curve.deviations):
                if deviation is not None and i < until:
                    largest[i] = max(largest[i], deviation)
        share = max(share, _share(found))
        times = max(times, _times_twin(found.loss))
        answers[judge_gate(1, runs, GATE, WORKLOADS[workload]).answer] += 1
    return Largest(
        workload=workload,
        class_name=class_name,
        compared_with=against,
        num_runs=len(pairs),
        num_spikes=sum(runs.expected.spike is not None for runs in pairs),
        loss=loss,
        grad_norm=norm,
        share_of_limit=share,
        times_twin=times,
        answers=answers,
    )


def _times_twin(curve: Curve) -> float:
    triples = zip(curve.deviations, curve.limits, curve.twin, strict=True)
    return max((off / twin for off, limit, twin in triples if off is not None and twin and off > limit / 10), default=0)


def _share(found: LossComparison) -> float:
    """The deciding deviation, of the two quantities the larger, in multiples of its limit."""
    pairs = [curve.at(curve.decisive) for curve in (found.loss, found.grad_norm)]
    return max(math.inf if deviation is None else deviation / limit for deviation, limit in pairs)


# ---- bugs ----


def caught(seed: int) -> Iterator[Caught]:
    """Every bug in every class: a wrong finalist against the right baseline of its class, and against fp32."""
    workload = _seeded("tiny", seed)
    right = dict(zip(BUGGY_CLASSES, train([spec_of(workload, name) for name in BUGGY_CLASSES]), strict=True))
    of = [(name, against) for name in BUGGY_CLASSES for against in dict.fromkeys((name, EXACT))]
    perturbed = (dataclasses.replace(spec_of(workload, b), perturbation=ROUNDING[a]) for a, b in of)
    twins = dict(zip(of, train(list(perturbed)), strict=True))
    for bug in (*LAYOUT_BUGS, *BUGS):
        specs = {name: _with(bug, workload, name) for name in BUGGY_CLASSES if _means_something(bug, name)}
        for class_name, run in zip(specs, train(list(specs.values()), bug), strict=True):
            for against in dict.fromkeys((class_name, EXACT)):
                found = _judged(bug, class_name, against, right[against], twins[class_name, against], run)
                _tell(found)
                yield found


def _means_something(bug: Bug, class_name: str) -> bool:
    if bug is loss_scale_left_in:
        return class_name.startswith("float16")
    return bug is not no_master_weights or class_name.endswith("O2")


def _with(bug: Bug, workload: Workload, class_name: str) -> TrialSpec:
    layout = LAYOUT_BUGS.get(bug) or BUGS[bug]
    return spec_of(workload, class_name, layout=layout, num_microbatches=2 if bug in BUGS else layout.pp)


def _judged(
    bug: Bug, class_name: str, against: str, expected: Trajectory | str, twin: Trajectory | str, run: Trajectory | str
) -> Caught:
    assert isinstance(expected, Trajectory) and isinstance(twin, Trajectory), (expected, twin)
    fields: dict[str, Any] = {"bug": bug.__name__.strip("_"), "class_name": class_name, "compared_with": against}
    if isinstance(run, str):
        return Caught(**fields, answer="failed", how=run, share_of_limit=math.inf)
    runs = GateTrajectories(baseline=expected, finalist=run, twin=twin)
    report = judge_gate(1, runs, GATE)
    found = deviations(runs, GATE)
    shown = [(curve.contradictions[0], name) for name, curve in _named(found) if curve.contradictions]
    how = "{1}, step {0}".format(*min(shown)) if shown else ""
    return Caught(**fields, answer=report.answer, how=how, share_of_limit=_share(found))


def _named(found: LossComparison) -> tuple[tuple[str, Curve], ...]:
    return ("loss", found.loss), ("norm", found.grad_norm)


# ---- words ----


def _tell(found: Largest | Caught) -> None:
    print(json.dumps(dataclasses.asdict(found)), file=sys.stderr, flush=True)


def largest_table(rows: list[Largest]) -> str:
    titles = ["workload", "class", "against", "runs", "quantity", *(f"step {step}" for step in SHOWN_STEPS)]
    lines = [titles, ["---"] * 5 + ["---:"] * len(SHOWN_STEPS)]
    for row in rows:
        for name, values in (("loss", row.loss), ("norm", row.grad_norm)):
            shown = [f"{values[step - 1]:.1e}" for step in SHOWN_STEPS]
            head = [row.workload, row.class_name, row.compared_with, str(row.num_runs), name]
            lines.append([*head, *shown])
    return _table(lines)


def bugs_table(rows: list[Caught]) -> str:
    columns = list(dict.fromkeys((row.class_name, row.compared_with) for row in rows))
    titles = [
        class_name if class_name == against else f"{class_name} against {against}" for class_name, against in columns
    ]
    lines = [["bug", *titles], ["---"] * (len(columns) + 1)]
    by_bug: dict[str, dict[tuple[str, str], Caught]] = defaultdict(dict)
    for row in rows:
        by_bug[row.bug][row.class_name, row.compared_with] = row
    for bug, cells in by_bug.items():
        lines.append([bug.replace("_", " "), *(_cell(cells.get(column)) for column in columns)])
    return _table(lines)


def _cell(row: Caught | None) -> str:
    if row is None:
        return ""
    share = f"{row.share_of_limit:.2g}" if row.share_of_limit < 100 else f"{row.share_of_limit:.0f}"
    if row.answer == "passed":
        return f"**passes**, {share}"
    return f"{'*inconclusive*, ' if row.answer == 'inconclusive' else ''}{row.how}, {share}"


def _table(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="of the legitimate runs")
    parser.add_argument("--only", choices=("legitimate", "bugs"), help="default: both")
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--json", action="store_true", help="print JSON only")
    args = parser.parse_args()
    largest: list[Largest] = []
    if args.only != "bugs":
        largest = [row for name in args.workloads for row in legitimate(name, range(args.seeds))]
    bugs = [] if args.only == "legitimate" else list(caught(seed=3))
    if args.json:
        print(json.dumps({"legitimate": [*map(dataclasses.asdict, largest)], "bugs": [*map(dataclasses.asdict, bugs)]}))
    else:
        print(largest_table(largest) if largest else "", bugs_table(bugs) if bugs else "", sep="\n\n")


if __name__ == "__main__":
    main()

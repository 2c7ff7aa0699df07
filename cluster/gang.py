"""From what the ranks of a gang report to one outcome: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.findings import merge_findings
from cluster.messages import RankFailure, RankResult, RankSuccess
from trials.outcome import (
    Crashed,
    Diverged,
    Evidence,
    Failure,
    GangLost,
    Infeasible,
    Measured,
    Measurement,
    Outcome,
    OutOfMemory,
    RankReport,
    TimedOut,
)

COLLATERAL = frozenset({"connection"})
"""Failures that only tell of another rank's."""
STOPPED = "stopped"
OOM_WINDOW_S = 1.0
"""An out-of-memory this soon after the first failure is taken for its cause: its traceback takes time to unwind."""


def fold(results: Iterable[RankResult]) -> Outcome:
    """One outcome for the gang: a measurement when every rank has a report, else its root cause.

    The order of ``results`` does not matter. The earliest failure counts, except that a lost connection never stands
    before a root cause, and an out-of-memory comes before what happened within :data:`OOM_WINDOW_S` of it.
    """
    known = list(results)
    reports = sorted((r.report for r in known if isinstance(r, RankSuccess)), key=lambda report: report.rank)
    failures = [result for result in known if isinstance(result, RankFailure)]
    if reports and [report.rank for report in reports] == list(range(reports[0].world_size)):
        return _merge(reports)
    causes = [failure for failure in failures if failure.category != STOPPED]
    if not causes:
        return GangLost(evidence=Evidence(message="some ranks reported nothing, and no cause is known"))
    root = root_cause(causes)
    return _outcome(root, collateral=[failure for failure in causes if failure is not root])


def root_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure that explains the others."""
    roots = [failure for failure in failures if failure.category not in COLLATERAL] or list(failures)
    first = min(roots, key=_order)
    ooms = [f for f in roots if f.category == "oom" and f.at_s <= first.at_s + OOM_WINDOW_S]
    return min(ooms, key=_order) if ooms else first


def _order(failure: RankFailure) -> tuple[float, int, str, str, str]:
    rank = -1 if failure.rank is None else failure.rank
    return failure.at_s, rank, failure.node, failure.category, failure.message


def _outcome(root: RankFailure, *, collateral: Sequence[RankFailure]) -> Failure:
    evidence = Evidence(
        message=root.message,
        rank=root.rank,
        node=root.node or None,
        error_type=root.error_type,
        exit_code=root.exit_code,
        log_tail=root.log_tail,
        collateral=tuple(_describe(failure) for failure in sorted(collateral, key=_order)),
    )
    match root.category:
        case "oom":
            return OutOfMemory(evidence=evidence)
        case "infeasible" | "data":
            return Infeasible(evidence=evidence)
        case "diverged":
            return Diverged(evidence=evidence)
        case "deadline":
            return TimedOut(phase=root.phase, evidence=evidence)
        case "lost":
            return GangLost(evidence=evidence)
        case _:
            return Crashed(evidence=evidence)


def _describe(failure: RankFailure) -> str:
    where = failure.node if failure.rank is None else f"rank {failure.rank}"
    return f"{where}: {failure.category}: {failure.message}"


def _merge(reports: Sequence[RankReport]) -> Outcome:
    """``reports`` are those of all ranks, in rank order."""
    first = reports[0]
    if len({(len(r.step_times_s), r.world_size, r.tokens_per_step) for r in reports}) != 1:
        message = f"the ranks disagree on the number of steps: {[len(r.step_times_s) for r in reports]}"
        return Crashed(evidence=Evidence(message=message))
    slowest = max(reports, key=lambda report: sum(report.step_times_s))
    return Measured(
        measurement=Measurement(
            world_size=first.world_size,
            tokens_per_step=first.tokens_per_step,
            step_times_s=tuple(max(times) for times in zip(*(r.step_times_s for r in reports), strict=True)),
            breakdown=slowest.breakdown,
            peak_allocated_bytes=tuple(report.peak_allocated_bytes for report in reports),
            peak_reserved_bytes=tuple(report.peak_reserved_bytes for report in reports),
            num_warmup_steps=first.num_warmup_steps,
            losses=first.losses,
            grad_norms=first.grad_norms,
            model_flops_per_token=first.model_flops_per_token,
            peak_flops_per_s=first.peak_flops_per_s,
            num_skipped_steps=first.num_skipped_steps,
            compile_s=max(report.compile_s for report in reports),
            samples_per_step=first.samples_per_step,
            findings=merge_findings([report.findings for report in reports]),
        )
    )

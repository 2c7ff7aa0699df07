"""Whether what the ranks of a gang report can be true.

Reports are input like any other: a clock that was set back, a counter that ran over or a runner with a mistake in it
must not become a measurement that somebody promotes. Figures that no training can give make the attempt a fault of its
candidate, with rank, field and value in the message.

A rank that ran a program of the user's own may not know everything, not even its step times; then one of its peers has
to. Ranks of such a program count losses each in its own way, so these need not agree in number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields

from trials.outcome import Crashed, Diverged, Evidence, RankReport

MIN_STEP_S = 1e-6
"""Shortest step that is believed, in seconds: clocks resolve less than that only in name, and to launch a single kernel
takes longer."""
MAX_STEP_S = 1e7
"""Longest step that is believed, in seconds: months; what is beyond is no duration but a date."""
ERROR_TYPE = "ImplausibleReport"
"""Type of the error in the evidence."""

_LEAST = {
    "world_size": 1,
    "tokens_per_step": 1,
    "samples_per_step": 0,
    "num_warmup_steps": 0,
    "num_skipped_steps": 0,
    "peak_allocated_bytes": 0,
    "peak_reserved_bytes": 0,
    "model_flops_per_token": 0,
    "compile_s": 0,
    "num_ranks": 1,
    "step_time_resolution_s": 0,
}
"""Fields that hold an amount, and the least that it can be."""
_ALIKE = ("world_size", "tokens_per_step", "samples_per_step", "num_warmup_steps", "model_flops_per_token")
"""Fields that are the same on all ranks, being properties of the workload or of the protocol."""
_ALIKE_IN_SCRIPTS = ("world_size", "num_warmup_steps")
"""Those of them that no rank has to find out by listening to a program of the user's own."""


def refusal(reports: Sequence[RankReport]) -> Crashed | Diverged | None:
    """The outcome of a gang whose reports, in rank order, cannot be believed; None where they can.

    A loss or a gradient norm that is not finite is no fault of the report: the candidate diverged.
    """
    for rank, report in enumerate(reports):
        for field, value, wanted in _impossible(rank, report):
            message = f"rank {rank} reported {field} = {value}: it has to be {wanted}"
            return Crashed(evidence=Evidence(message=message, rank=rank, error_type=ERROR_TYPE))
    if problem := _disagreement(reports):
        return Crashed(evidence=Evidence(message=problem, error_type=ERROR_TYPE))
    return _divergence(reports)


def is_step_time(seconds: float | None) -> bool:
    """Whether a step can have taken that long; nan and None are no times."""
    return seconds is not None and MIN_STEP_S <= seconds <= MAX_STEP_S


def is_script(report: RankReport) -> bool:
    """Whether the rank ran a program of the user's own."""
    return report.findings.script is not None


def _impossible(rank: int, report: RankReport) -> Iterator[tuple[str, object, str]]:
    """Fields of one report that cannot be true: name, value, and what the value has to be."""
    if report.rank != rank:
        yield "rank", report.rank, f"{rank}, which it was started as"
    if not report.step_times_s and not is_script(report):
        yield "step_times_s", "()", "the time of one step at least"
    for index, step_s in enumerate(report.step_times_s):
        if not is_step_time(step_s):
            yield f"step_times_s[{index}]", step_s, f"a number of seconds from {MIN_STEP_S:g} to {MAX_STEP_S:g}"
    for name, value, least in _amounts(report):
        if not least <= value < math.inf:  # true of nan as well
            yield name, value, f"a finite number, at least {least:g}"
    if report.num_skipped_steps > max(len(report.losses), len(report.step_times_s)):
        yield "num_skipped_steps", report.num_skipped_steps, "no more than there were steps"
    if len(report.losses) != len(report.grad_norms) and not is_script(report):
        yield "grad_norms", f"{len(report.grad_norms)} values", f"as many as losses: {len(report.losses)}"


def _amounts(report: RankReport) -> Iterator[tuple[str, float, float]]:
    """Fields that hold an amount: name, value, and the least that it can be."""
    for name, least in _LEAST.items():
        yield name, getattr(report, name), least
    for phase in fields(report.breakdown):
        yield f"breakdown.{phase.name}", getattr(report.breakdown, phase.name), 0


def _disagreement(reports: Sequence[RankReport]) -> str:
    """How the reports contradict each other; empty where they do not."""
    told = [report for report in reports if report.step_times_s]
    if not told:
        return (
            "no rank told the time of any step: neither a report nor a hook, file or log line of the program gave one"
        )
    of_script = any(map(is_script, reports))
    for name, of in ({"steps": "step_times_s"} | ({} if of_script else {"losses": "losses"})).items():
        counts = [len(getattr(report, of)) for report in told]
        if len(set(counts)) != 1:
            return f"the ranks disagree on the number of {name}: {counts}"
    for name in _ALIKE_IN_SCRIPTS if of_script else _ALIKE:
        values = [getattr(report, name) for report in reports]
        odd = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            return f"the ranks disagree on {name}: rank 0 reported {values[0]}, rank {odd} {values[odd]}"
    return ""


def _divergence(reports: Sequence[RankReport]) -> Diverged | None:
    for rank, report in enumerate(reports):
        for name, values in (("loss", report.losses), ("gradient norm", report.grad_norms)):
            step = next((step for step, value in enumerate(values, start=1) if not math.isfinite(value)), None)
            if step is not None:
                message = f"rank {rank} reported a {name} of {values[step - 1]} in step {step}"
                return Diverged(evidence=Evidence(message=message, rank=rank))
    return None

"""The one table of words for the values of a report: every renderer takes its words from here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from orchestrator import units
from orchestrator.objective import unit_legend
from orchestrator.statistics import relative_spread
from orchestrator.sweep.state import SweepState, Trial, describe_failure
from orchestrator.sweep.values import Check, ConfirmationRun, Evaluation, GateReport, GateRole, GateRun
from trials.outcome import Measurement
from trials.reports.disturbance import FOREIGN_CPU_LIMIT, STOLEN_LIMIT, Disturbance
from trials.reports.findings import CompileCache, GraphReport

if TYPE_CHECKING:
    from orchestrator.objective import Figures
    from orchestrator.report.proof import Finalist
    from orchestrator.report.summary import Speedup
    from orchestrator.virtual import Virtual

FinalistOutcome = Literal[
    "winner",
    "faster",
    "slower",
    "not_shown",
    "not_shown_yet",
    "tied",
    "trains_differently",
    "not_judged",
    "failed_evaluation",
    "not_measured",
    "not_measured_yet",
]
"""What came of a finalist: ``not_shown`` faster than the baseline, ``tied`` with the winner; of one ``not_judged`` it
could not be told whether it trains the same."""

FINALIST_WORDS: Mapping[FinalistOutcome, str] = {
    "winner": "the winner",
    "faster": "faster",
    "slower": "slower",
    "not_shown": "not shown faster",
    "not_shown_yet": "not shown yet",
    "tied": "cannot be told from {cause}",
    "trains_differently": "does not train the same",
    "not_judged": "could not be told to train the same",
    "failed_evaluation": "failed your evaluation",
    "not_measured": "not measured again: {cause}",
    "not_measured_yet": "not measured yet",
}

GATE_ROLE_WORDS: Mapping[GateRole, str] = {
    "reference": " in fp32",
    "finalist_reference": " in fp32",
    "twin": " with rounding errors",
    "reference_twin": " in fp32 with rounding errors",
}
"""What follows the number of a trial that trains for the gate; nothing for a finalist or baseline as it is."""

CommandPurpose = Literal[
    "logs", "story", "retry", "delete", "ui", "page", "explain", "confirm", "promote", "force", "rollback"
]
"""What a command shown below a result is for; ``force`` is a promotion that is refused unless forced."""

PURPOSE_WORDS: Mapping[CommandPurpose, str] = {
    "logs": "what the failing ranks wrote",
    "story": "what happened to it, and what follows",
    "retry": "launch what failed again, once the cause is mended",
    "delete": "remove it: nothing was measured",
    "ui": "look at every trial in the browser",
    "page": "one page to keep or to send",
    "explain": "the bottleneck, and what answers it",
    "confirm": "measure it again beside the baseline",
    "promote": "make it the production configuration",
    "force": "refused unless forced: not confirmed",
    "rollback": "back to the one before",
}


def finalist_words(one: Finalist) -> str:
    """What came of a finalist: ``not shown faster``, ``cannot be told from t004``."""
    return FINALIST_WORDS[one.outcome].format(cause=one.cause)


def gate_words(report: GateReport) -> str:
    """``passed: loss 0.04 % off (1 % allowed), gradient norm 0.3 % off (10 % allowed)``, or why not."""
    if report.answer == "failed":
        return f"failed: {'; '.join(report.reasons)}"
    if report.answer == "inconclusive":
        return f"could not be told: {'; '.join((*report.doubts, report.remedy)).rstrip('; ')}"
    pairs = (
        ("loss", report.loss_deviation, report.loss_tolerance),
        ("gradient norm", report.grad_norm_deviation, report.grad_norm_tolerance),
    )
    parts = [
        f"{name} {units.percent(deviation)} off ({units.percent(tolerance)} allowed)"
        for name, deviation, tolerance in pairs
        if deviation is not None
    ]
    return f"passed: {', '.join(parts)}" if parts else "passed"


def evaluation_words(evaluation: Evaluation) -> str:
    """How the user's own evaluation ended: ``passed``, ``exit 3``."""
    if evaluation.passed:
        return "passed"
    return "could not be started, or took too long" if evaluation.exit_code is None else f"exit {evaluation.exit_code}"


def promotion_words(record: Mapping[str, str]) -> str:
    """``t004 became `llama` version 3, by me@host``."""
    what = "became" if record["action"] == "promote" else "was rolled back in"
    forced = ", by force" if record.get("forced") == "true" else ""
    trial = units.trial_id(int(record["trial"])) if record.get("trial", "").isdigit() else "it"
    return f"{trial} {what} `{record['name']}` version {record['to_version']}, by {record['by']}{forced}"


def change_heading(*, is_faster: bool) -> str:
    """The heading above the knobs in which the trial shown beside the baseline differs from it."""
    return "What changed" if is_faster else "How the fastest differs from what you have"


def confirmation_heading(virtual: Virtual | None) -> str:
    """The heading above the finalists; on a cluster that does not exist it claims no measurement."""
    return f"Confirmation, {virtual}" if virtual else "Confirmation"


def check_words(check: Check | None) -> str:
    """``t004 again, round 2`` of a check; empty for a trial of the search."""
    if check is None:
        return ""
    of = units.trial_id(check.of) if check.of else "the baseline"
    match check:
        case ConfirmationRun():
            return f"{of} again, round {check.round + 1}"
        case GateRun():
            is_repeat = check.role == "twin" and not check.perturbation
            role = " once more" if is_repeat else GATE_ROLE_WORDS.get(check.role, "")
            return f"{of}{role} for the loss gate"
        case _:
            return f"{of} with the profiler"


def failure(trial: Trial) -> str:
    """One line of evidence of a trial that was not measured."""
    return describe_failure(trial.outcome)


def peak_memory(measurement: Measurement) -> str:
    """What the fullest rank needed of its device, as far as that is known; a dash where nobody told any."""
    return units.num_bytes(measurement.peak_bytes) if measurement.peak_bytes else units.DASH


def peak_memory_parts(measurement: Measurement) -> str:
    """``58.9 GiB of tensors, 2.3 GiB outside the allocator, which held 64.0 GiB``; empty where that is not known."""
    found = measurement.device_memory
    if found is None or not measurement.peak_allocated_bytes:
        return ""
    tensors, held = max(measurement.peak_allocated_bytes), max(measurement.peak_reserved_bytes, default=0)
    parts = [
        f"{units.num_bytes(tensors)} of tensors",
        f"{units.num_bytes(found.outside_bytes)} outside the allocator, which held {units.num_bytes(held)}",
    ]
    if found.num_retries:
        parts.append(f"it gave its cache back {units.count(found.num_retries, 'time')}")
    if found.num_ooms:
        parts.append(f"{units.count(found.num_ooms, 'allocation')} failed")
    return ", ".join(parts)


_CACHES: Mapping[CompileCache, str] = {
    "cold": "nothing of it was in the sweep's cache",
    "warm": "all of it was in the sweep's cache",
    "mixed": "some of it was in the sweep's cache",
}


def compilation(graph: GraphReport) -> str:
    """``12 s, nothing of it was in the sweep's cache; 1.2 s again, from the cache``: how long compiling took, and once
    more with all in the cache that the trial left there, which is what a restart pays."""
    found = f", {_CACHES[graph.cache]}" if graph.cache else ""
    again = "" if graph.again_s is None else f"; {units.milliseconds(graph.again_s)} again, from the cache"
    return f"{units.milliseconds(graph.compile_s)}{found}{again}"


def spread(measurement: Measurement) -> str:
    """Half the relative inter-quartile range of the step times, no less than their digits show: ``± 1.2 %``."""
    return f"± {50 * relative_spread(measurement.step_times_s, measurement.step_time_resolution_s):.1f} %"


def versus(compared: Speedup | None) -> str:
    """``1.42x``, or ``≥ 1.06x`` where that is all that is sure; a difference inside the noise carries ``≈``."""
    if compared is None:
        return units.DASH
    if compared.verdict == "tie":
        return f"≈{compared.ratio.value:.2f}x"
    return units.short_ratio(compared.ratio.value, compared.ratio.ci95)


def figures(found: Figures, num_leased: int | None, per_device_unit: str) -> str:
    """``step 195 ms, 10,529 tokens/s, 5,265 tokens/s/p, 2 of 2 devices``, and the cost where that is the objective."""
    rate_unit = per_device_unit.removesuffix("/p")
    devices = f"{found.num_devices} of {num_leased} devices" if num_leased else units.count(found.num_devices, "device")
    parts = (
        f"step {units.milliseconds(found.step_time_s)}",
        f"{units.rate(found.tokens_per_s)} {rate_unit}",
        f"{units.rate(found.tokens_per_s_per_device)} {per_device_unit}",
        devices,
        *([cost(found, rate_unit.removesuffix("/s"))] if found.shows_cost else []),
    )
    return ", ".join(parts)


def trial_figures(state: SweepState, trial: Trial) -> str:
    """:func:`figures` of a measured trial, as it was measured itself; empty where it was not."""
    found = state.figures(trial)
    return figures(found, state.sweep.num_devices, state.sweep.workload.speed_unit) if found else ""


def legend(measured: str, *all_units: str) -> str:
    """What measured the figures, and what their units mean: ``measured by the search; tokens/s/p: tokens per second per
    device (p: processor)``."""
    return "; ".join((measured, *map(unit_legend, dict.fromkeys(all_units))))


def cost(found: Figures, noun: str) -> str:
    """``28.1 device-hours per 1e9 tokens``, and in money where a price is known."""
    hours = f"{units.rate(1e9 * found.device_hours_per_token)} device-hours per 1e9 {noun}"
    price = found.price_per_token
    return hours if price is None else f"{hours}, {units.rate(1e9 * price)} in money"


BUSY_MARK = "!"
"""Marks what was measured while the machine was busy with something else, or slowed down."""


def disturbance_words(one: Disturbance) -> str:
    """``others used 48 % of its processors (python 1.9)``: what disturbed a node, beginning with the most usual."""
    parts = []
    if one.foreign_cpu is not None and one.foreign_cpu >= FOREIGN_CPU_LIMIT:
        names = f" ({', '.join(one.foreign_processes)})" if one.foreign_processes else ""
        parts.append(f"others used {one.foreign_cpu:.0%} of its processors{names}")
    if one.steal is not None and one.steal >= STOLEN_LIMIT:
        parts.append(f"the hypervisor took {one.steal:.0%} of them")
    if one.quota is not None and one.quota >= STOLEN_LIMIT:
        parts.append(f"its quota stopped it for {one.quota:.0%} of the time")
    if one.foreign_on_devices:
        parts.append(f"others ran on its devices ({', '.join(one.foreign_on_devices[:3])})")
    if one.throttled_by:
        hot = f" at {one.highest_temperature_c:.0f} degrees" if one.highest_temperature_c is not None else ""
        low = f", down to {one.lowest_clock:.0%}" if one.lowest_clock is not None else ""
        parts.append(f"the devices' clocks were lowered ({', '.join(one.throttled_by)}{hot}{low})")
    return "; ".join(parts)


def disturbed(measurement: Measurement | None) -> str:
    """What disturbed a measurement, on the node where it was worst; empty where nothing did."""
    worst = measurement.disturbed_by if measurement else None
    return disturbance_words(worst) if worst else ""


def busy_note(measured: Mapping[int, Measurement | None]) -> str:
    """A line that explains :data:`BUSY_MARK`, with the worst figures of all trials; empty where none was disturbed."""
    worst = {number: one.disturbed_by for number, one in measured.items() if one is not None and one.disturbed_by}
    if not worst:
        return ""
    most = max(worst, key=lambda number: worst[number].severity)
    return f"{BUSY_MARK} measured on a busy machine; {units.trial_id(most)} most: {disturbance_words(worst[most])}"

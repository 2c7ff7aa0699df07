"""The one table of words for the values of a report: every renderer takes its words from here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from orchestrator import units
from orchestrator.statistics import relative_spread
from orchestrator.sweep.state import Trial, describe_failure
from orchestrator.sweep.values import Check, ConfirmationRun, Evaluation, GateReport, GateRun
from trials.outcome import Measurement

if TYPE_CHECKING:
    from orchestrator.report.proof import Finalist
    from orchestrator.report.summary import Speedup

FinalistOutcome = Literal[
    "winner",
    "faster",
    "slower",
    "not_shown",
    "not_shown_yet",
    "tied",
    "trains_differently",
    "failed_evaluation",
    "not_measured",
    "not_measured_yet",
]
"""What came of a finalist: ``not_shown`` faster than the baseline, ``tied`` with the winner."""

FINALIST_WORDS: Mapping[FinalistOutcome, str] = {
    "winner": "the winner",
    "faster": "faster",
    "slower": "slower",
    "not_shown": "not shown faster",
    "not_shown_yet": "not shown yet",
    "tied": "cannot be told from {cause}",
    "trains_differently": "does not train the same",
    "failed_evaluation": "failed your evaluation",
    "not_measured": "not measured again: {cause}",
    "not_measured_yet": "not measured yet",
}

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
    if not report.passed:
        return f"failed: {'; '.join(report.reasons)}"
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


def check_words(check: Check | None) -> str:
    """``t004 again, round 2`` of a check; empty for a trial of the search."""
    if check is None:
        return ""
    of = units.trial_id(check.of) if check.of else "the baseline"
    match check:
        case ConfirmationRun():
            return f"{of} again, round {check.round + 1}"
        case GateRun():
            return f"{of} in fp32 for the loss gate" if check.role.endswith("reference") else f"{of} for the loss gate"
        case _:
            return f"{of} with the profiler"


def value_words(value: object) -> str:
    """The value of a knob: ``on`` and ``off`` for truth values, a dash for none."""
    return {True: "on", False: "off", None: units.DASH}[value] if isinstance(value, bool | None) else str(value)


def failure(trial: Trial) -> str:
    """One line of evidence of a trial that was not measured."""
    return describe_failure(trial.outcome)


def peak_memory(measurement: Measurement) -> str:
    """The largest peak over ranks, reserved by the allocator where that is known."""
    return units.num_bytes(measurement.peak_bytes)


def spread(measurement: Measurement) -> str:
    """Half the relative inter-quartile range of the step times: ``± 1.2 %``."""
    return f"± {50 * relative_spread(measurement.step_times_s):.1f} %"


def versus(compared: Speedup | None) -> str:
    """``1.42x``; a difference inside the noise carries ``≈``."""
    if compared is None:
        return units.DASH
    return f"{'≈' if compared.verdict == 'tie' else ''}{compared.ratio.value:.2f}x"

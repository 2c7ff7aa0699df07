"""Of the page: the confirmation, the loss gate, the user's own evaluation."""

from __future__ import annotations

from orchestrator import units
from orchestrator.report import proof
from orchestrator.report.page.html import cell, code, row, table, text
from orchestrator.report.verdict import evaluation_words, percent, ratio_interval
from orchestrator.space.naming import short_name
from orchestrator.sweep.state import SweepState
from orchestrator.sweep.values import GateReport

_KINDS = {"the winner": "good", "faster": "good", "does not train the same": "bad", "slower": "bad"}


def confirmation(state: SweepState) -> str:
    """A row per finalist, a column per round."""
    found = proof.finalists(state)
    if not found:
        return ""
    numbers = sorted({ratio.round for one in found for ratio in one.rounds})
    rows = []
    for one in found:
        of = {ratio.round: ratio for ratio in one.rounds}
        each = [cell(f"{of[n].value:.2f}x" if n in of else "", "num dim keep") for n in numbers]
        rows.append(
            row(
                cell(units.trial_id(one.trial)),
                cell(code(short_name(state.trials[one.trial].candidate))),
                cell(f"<strong>{one.overall.value:.2f}x</strong>" if one.overall else units.DASH, "num"),
                cell(ratio_interval(one.overall) if one.overall else "", "num dim keep"),
                cell(text(one.words), _KINDS.get(one.words, "")),
                *each,
            )
        )
    heads = ("trial", "configuration", "speed-up", "95 % interval", "result", *(f"round {n + 1}" for n in numbers))
    note = (
        "Speed over the baseline's. In every round all of them were measured once more, one after another on the same "
        "devices, so that drift cancels; the interval holds for all finalists and all looks together."
    )
    return table(rows, heads, numbers=(2, 3, *range(5, len(heads)))) + f'<p class="dim">{note}</p>'


def gate(state: SweepState) -> str:
    """A row per finalist that was judged."""
    reports = proof.gates(state)
    if not reports:
        return ""
    heads = ("trial", "result", "loss", "allowed", "gradient norm", "allowed", "steps", "judged as", "against")
    notes = [f"{units.trial_id(report.trial)}: {note}" for report in reports for note in report.notes]
    words = "".join(f'<p class="dim">{text(note)}</p>' for note in notes)
    return table(map(_judged, reports), heads, numbers=(2, 3, 4, 5, 6)) + words


def _judged(report: GateReport) -> str:
    return row(
        cell(units.trial_id(report.trial)),
        cell("passed" if report.passed else text("; ".join(report.reasons)), "good" if report.passed else "bad"),
        cell(units.DASH if report.loss_deviation is None else percent(report.loss_deviation), "num keep"),
        cell(percent(report.loss_tolerance), "num dim keep"),
        cell(units.DASH if report.grad_norm_deviation is None else percent(report.grad_norm_deviation), "num keep"),
        cell(percent(report.grad_norm_tolerance), "num dim keep"),
        cell(str(report.num_steps), "num"),
        cell(text(report.precision_class)),
        cell("fp32 reference" if report.compared_with == "reference" else "baseline"),
    )


def evaluations(state: SweepState) -> str:
    """What the user's own command said of finalists."""
    found = proof.evaluations(state)
    if not found:
        return ""
    parts = ["<h3>Your evaluation</h3>"]
    for one in found:
        kind = "good" if one.passed else "bad"
        parts.append(f'<p>{units.trial_id(one.trial)}: <span class="{kind}">{text(evaluation_words(one))}</span></p>')
        if one.output_tail:
            parts.append(
                f"<details><summary>last lines</summary><pre>{text(chr(10).join(one.output_tail))}</pre></details>"
            )
    return "".join(parts)

"""The result of a sweep as one self-contained HTML page, made to be read beside the runs in MLflow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from orchestrator import report_format as fmt
from orchestrator.findings_text import findings_lines
from orchestrator.report import by_speed, changed_knobs, cost, found_out, headline, winner_and_baseline
from orchestrator.space import short_name
from orchestrator.state import SweepState, Trial
from orchestrator.summary import ENDED, Summary

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #7a7f87; --good: #1a7f37; --bar: #4c8bf540 }
body { font: 13px/1.5 system-ui, sans-serif; margin: 16px; max-width: 1000px }
h1 { font-size: 20px; margin: 0 } h2 { font-size: 15px; margin: 28px 0 6px } p { margin: 2px 0 }
.dim { color: var(--dim) } .faster { color: var(--good) } .num { text-align: right; font-variant-numeric: tabular-nums }
.result { font-size: 17px; font-weight: 600; margin-top: 14px }
table { border-collapse: collapse } th, td { padding: 3px 10px 3px 0; text-align: left; white-space: nowrap }
th { border-bottom: 1px solid var(--line); font-weight: 600 } td.wrap { white-space: normal }
code { font: 12px ui-monospace, monospace } tr.best td { font-weight: 600 }
.bar { background: linear-gradient(90deg, var(--bar) var(--share), transparent 0);
  padding-left: 4px; background-clip: padding-box; border-right: 10px solid transparent }
.stack { display: flex; height: 14px; width: 260px; border-radius: 3px; overflow: hidden }
"""
_PHASE_COLORS = {
    "data": "#d97706",
    "forward": "#4c8bf5",
    "backward": "#7c5cd6",
    "bubble": "#e11d48",
    "optimizer": "#0d9488",
    "other": "#9ca3af",
}


def report_html(state: SweepState, summary: Summary) -> str:
    """The page: result, what changed, where the step time goes, all trials by speed, failures."""
    body = [_heading(state, summary), _results(summary)]
    if summary.best and summary.baseline and summary.best.trial.number != 0:
        body.append(_changes(summary.baseline.trial, summary.best.trial))
    body += [_breakdown(summary), _findings(summary), _trials(state, summary), _failures(state)]
    title = escape(f"{summary.sweep}: {headline(summary)}")
    page = f"<title>{title}</title><style>{_STYLE}</style><body>{''.join(body)}</body>"
    return f'<!doctype html><html lang="en"><meta charset="utf-8">{page}</html>\n'


def _heading(state: SweepState, summary: Summary) -> str:
    kind = "result faster" if summary.speedup and summary.speedup.verdict == "faster" else "result"
    ratio = summary.speedup.ratio.ci95 if summary.speedup and summary.best and summary.best.trial.number else None
    confidence = f'<p class="dim">95 % confidence: {fmt.ratio_interval(ratio)}</p>' if ratio else ""
    reason = f", {summary.reason}" if summary.reason else ""
    where = escape(f"{state.sweep.hardware} · {summary.state}{reason} · {cost(summary)}")
    result = f'<p class="{kind}">{escape(headline(summary))}</p>'
    return f'<h1>{escape(summary.sweep)}</h1><p class="dim">{where}</p>{result}{confidence}'


def _results(summary: Summary) -> str:
    rows = []
    for label, result in winner_and_baseline(summary):
        rows.append(
            _row(
                f'<td class="dim">{label}</td>',
                f"<td>{fmt.trial_id(result.trial.number)}</td><td><code>{escape(short_name(result.trial.candidate))}</code></td>",
                f'<td class="num"><b>{fmt.rate(result.speed.value)}</b> {summary.unit}</td>',
                f'<td class="num dim">{fmt.interval(result.speed.ci95)}</td>',
            )
        )
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _breakdown(summary: Summary) -> str:
    rows = []
    for label, result in winner_and_baseline(summary):
        measurement = result.trial.measurement
        assert measurement is not None
        step = f'<td class="num">{fmt.milliseconds(measurement.step_time_s)}</td>'
        if shares := fmt.breakdown(measurement):
            rows.append(_row(f'<td class="dim">{label}</td>{step}<td>{_stack(shares)}</td>'))
    keys = " ".join(f'<span style="color:{color}">■</span> {name}' for name, color in _PHASE_COLORS.items())
    table = f'<table>{"".join(rows)}</table><p class="dim">{keys}</p>'
    return f"<h2>Where the step time goes</h2>{table}" if rows else ""


def _findings(summary: Summary) -> str:
    rows = [
        _row(f'<td class="dim">{"" if i else label}</td><td class="wrap">{escape(line)}</td>')
        for label, result in winner_and_baseline(summary)
        for i, line in enumerate(findings_lines(found_out(result)))
    ]
    return f"<h2>Found out</h2><table>{''.join(rows)}</table>" if rows else ""


def _stack(parts: Iterable[tuple[str, float]]) -> str:
    blocks = (
        f'<div title="{name} {share:.0%}" style="flex:{share:.4f};background:{_PHASE_COLORS[name]}"></div>'
        for name, share in parts
    )
    return f'<div class="stack">{"".join(blocks)}</div>'


def _changes(before: Trial, after: Trial) -> str:
    rows = [
        _row(f"<td>{escape(knob)}</td><td>{escape(old)}</td><td>→</td><td><b>{escape(new)}</b></td>")
        for knob, old, new in changed_knobs(before, after)
    ]
    return f"<h2>What changed</h2><table>{''.join(rows)}</table>"


def _trials(state: SweepState, summary: Summary) -> str:
    heads = ("trial", "configuration", "state", summary.unit, "spread", "speed-up", "memory")
    head = "".join(f'<th class="{"num" if i >= 3 else ""}">{name}</th>' for i, name in enumerate(heads))
    top = summary.best.speed.value if summary.best else 1.0
    rows = "".join(_trial(state, trial, top) for trial in by_speed(state))
    return f"<h2>Trials</h2><table style='width:100%'><tr>{head}</tr>{rows}</table>"


def _trial(state: SweepState, trial: Trial, top: float) -> str:
    """A row; the shade behind the configuration is as long as the trial is fast."""
    speed = trial.measurement.tokens_per_s_per_device if trial.measurement else 0.0
    name = f"<code>{escape(short_name(trial.candidate))}</code>"
    cells = [
        f"<td>{fmt.trial_id(trial.number)}</td>",
        f'<td class="bar" style="--share:{100 * speed / top:.1f}%">{name}</td>',
        f"<td>{fmt.status_words(trial.status)}</td>",
    ]
    if trial.measurement:
        versus = "baseline" if trial.number == 0 else fmt.versus(fmt.versus_baseline(trial, state))
        numbers = (fmt.rate(speed), fmt.spread(trial.measurement), versus, fmt.peak_memory(trial.measurement))
        cells += [f'<td class="num">{text}</td>' for text in numbers]
    kind = ' class="best"' if state.best and state.best.number == trial.number else ""
    return f"<tr{kind}>{''.join(cells)}</tr>"


def _failures(state: SweepState) -> str:
    rows = []
    for status in ENDED[1:]:
        trials = [trial for trial in state.trials if trial.status == status]
        if trials:
            evidence = escape(fmt.failure(trials[0]))
            numbers = _numbers(trials)
            rows.append(_row(f"<td>{fmt.status_words(status)}</td><td>{numbers}</td><td class='wrap'>{evidence}</td>"))
    return f"<h2>Not measured</h2><table>{''.join(rows)}</table>" if rows else ""


def _numbers(trials: Sequence[Trial]) -> str:
    return " ".join(fmt.trial_id(trial.number) for trial in trials)


def _row(*cells: str) -> str:
    return f"<tr>{''.join(cells)}</tr>"

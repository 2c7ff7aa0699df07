"""Of the page: the plan and what it left out, profiles, workload and environment, what to do next."""

from __future__ import annotations

from pathlib import Path

from orchestrator import units
from orchestrator.invocation import Invocation
from orchestrator.report.artifacts import profile_files, sweep_params
from orchestrator.report.page.html import cell, code, row, table, text
from orchestrator.report.page.profile import profile_html
from orchestrator.report.sources import Sources
from orchestrator.report.summary import Summary
from orchestrator.report.verdict import promotion_words
from orchestrator.sweep.state import SweepState
from orchestrator.sweep.values import ProfileRun


def plan_and_rejected(sources: Sources) -> str:
    """How many candidates there were, and by which rules others were left out."""
    plan = sources.plan
    if plan is None:
        return ""
    legal = f"{plan['num_legal']:,} legal candidates of {plan['product_size']:,} combinations"
    alike = f"; {plan['num_duplicates']:,} alike after removing knobs without effect" if plan["num_duplicates"] else ""
    words = f"<p>{legal}{alike}. {text(plan['too_large'])}</p>"
    if not plan["rejected"]:
        return words
    rows = []
    for rule in plan["rejected"]:
        example = rule["examples"][0] if rule["examples"] else {"short_name": "", "reason": ""}
        why = f"{code(example['short_name'])}: {text(example['reason'])}"
        rows.append(row(cell(code(rule["rule"])), cell(f"{rule['count']:,}", "num"), cell(why)))
    return words + table(rows, ("rejected by rule", "candidates", "for example"), numbers=(1,))


def profiles(state: SweepState, folder: Path | None) -> str:
    """Of every profiled trial, what its profile shows; its files are looked for in the sweep's ``folder``."""
    parts = []
    for trial in state.trials:
        if isinstance(trial.check, ProfileRun) and trial.measurement is not None:
            html = profile_html(trial, profile_files(folder, trial) if folder else ())
            parts.append(f"<h3>{units.trial_id(trial.check.of)}</h3>{html}" if html else "")
    return "".join(parts)


def environment(state: SweepState, sources: Sources) -> str:
    """What was trained, on what: results compare only where it is equal."""
    created = state.sweep
    what = [row(cell(code(name)), cell(text(value))) for name, value in sweep_params(created).items()]
    prints = [row(cell(code(name)), cell(text(value))) for name, value in created.fingerprint.items()]
    file = f"<details><summary>Sweep file</summary><pre>{text(sources.sweep_yaml)}</pre></details>"
    return (
        f"<h3>Environment</h3>{table(prints)}<details><summary>Workload and budget</summary>{table(what)}</details>"
        + (file if sources.sweep_yaml else "")
    )


def next_steps(state: SweepState, summary: Summary, invocation: Invocation) -> str:
    """Commands to copy; what was promoted."""
    name = summary.sweep
    conclusion = state.verdict.conclusion if state.verdict else None
    commands: dict[str, str] = {}
    if conclusion == "confirmed":
        commands["Make it the production configuration"] = invocation.command("promote", name, "--name", "MODEL")
    if state.promotions:
        production = state.promotions[-1].record["name"]
        commands["Back to the one before"] = invocation.command("rollback", production)
    if conclusion != "keep":
        commands["Measure it again beside the baseline"] = invocation.command("confirm", name)
    commands["Look at every trial in the browser"] = invocation.command("ui", name)
    done = "".join(f"<p>{text(promotion_words(event.record))}</p>" for event in state.promotions)
    rows = [row(cell(text(what), "keep"), cell(code(command))) for what, command in commands.items()]
    return done + table(rows)

"""The report of a sweep as one value, made from its state, as the only input of all renderers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from orchestrator import units
from orchestrator.diagnosis.values import Part, PartName, StepParts, SweepExplanation
from orchestrator.errors import ConfigError
from orchestrator.mlflow_urls import sweep_links
from orchestrator.objective import Figures
from orchestrator.process_support import PLAIN, Invocation
from orchestrator.proof.next_check import promising
from orchestrator.report import descriptions
from orchestrator.report.curves import (
    GateCurves,
    History,
    ParallelCoordinates,
    ProofResult,
    coordinates,
    gate_curves,
    history,
    proof_result,
)
from orchestrator.report.descriptions import (
    CommandPurpose,
    figures,
    findings_lines,
    legend,
    promotion_text,
    spelled_name,
    trend,
)
from orchestrator.report.profile_tables import ProfileTables
from orchestrator.report.sources import PlanFacts, Sources, profile_files, sweep_params
from orchestrator.report.summary import (
    Summary,
    TrialResult,
    chosen_result,
    confidence,
    cost,
    details,
    headline,
    is_worth_it,
)
from orchestrator.report.tables import Failures, TrialTable, by_speed, change_table, failures, judged, make_trial_table
from orchestrator.report.view import ShownTable
from orchestrator.space.notation import diff, short_name
from orchestrator.statistics import Estimate
from orchestrator.sweep.events import CandidatesPruned, Conclusion
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.units import is_wide, trial_id, watermark
from trials.files import to_json
from trials.outcome import Infeasible, Measurement, NotBelieved

logger = logging.getLogger(__name__)


ShownRole = Literal["winner", "fastest", "baseline"]
"""Why a trial is shown first; only a confirmed one is called the winner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTrial:
    """A measured trial at the top of the report: the recommended one, or the baseline."""

    role: ShownRole
    number: int
    configuration: str
    """Short name of its candidate."""
    spelled: str
    """The same with the meaning of its signs."""
    speed: Estimate
    """Speed in the summary's unit with its 95% CI, measured by the search."""
    figures: Figures
    """Speed in every unit: measured by the confirmation if there was one, else by the search."""
    is_confirmed: bool
    """Whether the figures are from the confirmation, like the verdict's ratio."""
    measurement: Measurement
    """The measurement of the search."""
    step: StepParts
    """Its step time breakdown: from the explanation, else by its own clock; empty if neither is known."""
    findings: tuple[str, ...]
    """Further findings of its ranks, one per line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How the shown trial differs from the baseline."""

    knobs: ShownTable
    reason: str
    """Why the search proposed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuledOut:
    """Candidates not tried because they need at least as much memory as a trial that ran out, or use a knob that the
    program rejects."""

    witness: int
    """The trial that shows it."""
    rules: Mapping[str, int]
    """Rule to number of candidates."""
    refusal: str = ""
    """Why the program rejected the witness; empty if it ran out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A trial that was run under the profiler."""

    of: int
    """The trial of the search that was run again."""
    tables: ProfileTables
    files: tuple[Path, ...]
    """Paths of its files on this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextCommand:
    """A suggested next command, ready to copy."""

    purpose: CommandPurpose
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortReport:
    """The result or state of a sweep in short. Renderers choose what to show and how."""

    summary: Summary
    hardware: str
    headline: str
    """The result in one sentence."""
    details: tuple[str, ...]
    """Reasons of the verdict that the headline omits."""
    confidence: str
    """The confidence of the result; empty without a result."""
    cost: str
    """Trials by outcome and their device time, in one line."""
    conclusion: Conclusion | None
    """The conclusion of the proof; None without a verdict."""
    is_faster: bool
    """Whether something is shown to be faster than the baseline."""
    shown: tuple[ShownTrial, ...]
    """The winner or fastest, then the baseline, if measured; only the baseline if nothing beat it."""
    change: Change | None
    """How the shown trial differs from the baseline; None if only one of them is shown."""
    figures: Mapping[str, str]
    """Role of each shown trial, with its figures in words."""
    legend: str
    """The source of the figures and the definition of their units; empty if nothing is shown."""
    proof: ProofResult
    promotions: tuple[str, ...]
    """Promotions and rollbacks, one sentence each."""
    note: str
    """A person's note on the sweep, in one line; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(ShortReport):
    """The full report: every trial and failure, and data from outside the events."""

    trials: TrialTable
    """The search's trials, fastest first."""
    failures: tuple[Failures, ...]
    ruled_out: tuple[RuledOut, ...]
    profiles: tuple[Profiled, ...]
    explanation: SweepExplanation | None
    """The explanation of the speeds; None if not requested, or nothing was measured."""
    history: History
    coordinates: ParallelCoordinates
    gate_curves: tuple[GateCurves, ...]
    plan: PlanFacts | None
    memory_limit_bytes: int | None
    """Device memory per rank; None if unknown."""
    workload: Mapping[str, str]
    """The workload and the budget, flat."""
    environment: Mapping[str, str]
    """The fingerprint: results are comparable only if it is equal."""
    sweep_yaml: str
    """The sweep file as submitted; empty if it was not kept."""
    is_recorded: bool
    """Whether the sweep is recorded in MLflow."""
    links: Mapping[str, str]
    """Name to address of the sweep's pages on a tracking server."""
    commands: tuple[NextCommand, ...]


def make_short_report(state: SweepState, summary: Summary, explanation: SweepExplanation | None = None) -> ShortReport:
    """Only the result, at a cost nearly independent of the number of trials; ``summary`` is the state's."""
    shown, unit = _shown(state, summary, explanation), state.sweep.workload.speed_unit
    return ShortReport(
        summary=summary,
        hardware=state.sweep.hardware,
        headline=headline(state, summary),
        details=tuple(details(state)),
        confidence=confidence(state, summary),
        cost=cost(summary),
        conclusion=state.verdict.conclusion if state.verdict else None,
        is_faster=is_worth_it(state, summary),
        shown=shown,
        figures={one.role: figures(one.figures, summary.num_leased, unit) for one in shown},
        legend=legend(state.virtual or _measured_by(shown), unit, summary.unit) if shown else "",
        change=_change(state, summary),
        proof=proof_result(state),
        promotions=tuple(promotion_text(event.record) for event in state.promotions),
        note=descriptions.note_text(state.note),
    )


def make_report(
    state: SweepState,
    summary: Summary,
    *,
    sources: Sources | None = None,
    explanation: SweepExplanation | None = None,
    invocation: Invocation = PLAIN,
) -> Report:
    """The report of a sweep in this state; ``summary`` is the state's.

    Args:
        sources: data from outside the events; without it, the report uses only the events.
        explanation: step time breakdown and effects of knobs, if they are to be shown.
        invocation: how to write commands.
    """
    sources = sources or Sources()
    effects = explanation.effects if explanation else ()
    order = list(dict.fromkeys(name for effect in effects for name in effect.knobs))
    recorded, uri = sources.recorded, summary.tracking_uri
    short = make_short_report(state, summary, explanation)
    return Report(
        **{field.name: getattr(short, field.name) for field in fields(short)},
        trials=make_trial_table(state, by_speed(state)),
        failures=tuple(failures(state)),
        ruled_out=tuple(_ruled_out(state, event) for event in summary.ruled_out),
        profiles=_profiles(state, summary, sources.folder),
        explanation=explanation,
        history=history(state),
        coordinates=coordinates(state, order),
        gate_curves=tuple(gate_curves(state)),
        plan=PlanFacts.from_document(sources.plan) if sources.plan else None,
        memory_limit_bytes=sources.memory_limit_bytes,
        workload=sweep_params(state.sweep),
        environment=state.sweep.fingerprint,
        sweep_yaml=sources.sweep_yaml,
        is_recorded=recorded is not None,
        links=sweep_links(uri, recorded.experiment_id, recorded.run_id, summary.sweep) if recorded else {},
        commands=tuple(next_commands(state, invocation)),
    )


def _ruled_out(state: SweepState, event: CandidatesPruned) -> RuledOut:
    outcome = state.trials[event.witness].outcome
    refusal = outcome.evidence.message if isinstance(outcome, Infeasible) else ""
    return RuledOut(witness=event.witness, rules=event.rules, refusal=refusal)


def read_report(ledger: Ledger, state: SweepState, summary: Summary, invocation: Invocation = PLAIN) -> Report:
    """The full report from the ledger and its folder; ``state`` is a fold of its events."""
    return make_report(
        state, summary, sources=Sources.of(ledger), explanation=_explain(ledger, state), invocation=invocation
    )


def _explain(ledger: Ledger, state: SweepState) -> SweepExplanation | None:
    """The explanation of the sweep; None if it fails, since the report is useful without it."""
    from orchestrator.diagnosis.explain import explain_ledger

    try:
        return explain_ledger(ledger, state=state)
    except ConfigError:
        return None  # nothing was measured
    except Exception:
        logger.warning("the report of %s has no explanation, because it failed", state.sweep.sweep, exc_info=True)
        return None


def _measured_by(shown: Sequence[ShownTrial]) -> str:
    """The source of the figures of the shown trials."""
    return "measured by the confirmation" if any(one.is_confirmed for one in shown) else "measured by the search"


def _shown(state: SweepState, summary: Summary, explanation: SweepExplanation | None) -> tuple[ShownTrial, ...]:
    chosen, confirmed = chosen_result(state, summary), summary.confirmed
    pair = confirmed if confirmed and chosen and chosen.trial.number == confirmed.trial else None
    own = pair.baseline if pair else None
    found = [_shown_trial("baseline", summary.baseline, own, explanation)] if summary.baseline else []
    if chosen is None:
        return tuple(found)
    is_confirmed = state.verdict is not None and state.verdict.conclusion == "confirmed"
    role: ShownRole = "winner" if is_confirmed else "fastest"
    return (_shown_trial(role, chosen, pair.figures if pair else None, explanation), *found)


def _shown_trial(
    role: ShownRole, result: TrialResult, confirmed: Figures | None, explanation: SweepExplanation | None
) -> ShownTrial:
    trial, measurement = result.trial, result.trial.measurement
    assert measurement is not None, "only measured trials have a result"
    explained = explanation.step_parts.get(trial.number) if explanation else None
    return ShownTrial(
        role=role,
        number=trial.number,
        configuration=short_name(trial.candidate),
        spelled=spelled_name(trial.candidate),
        speed=result.speed,
        figures=confirmed or result.figures,
        is_confirmed=confirmed is not None,
        measurement=measurement,
        step=explained if explained and explained.parts else clock_parts(trial.number, measurement),
        findings=tuple(filter(None, (trend(measurement), *findings_lines(measurement.findings)))),
    )


def clock_parts(number: int, measurement: Measurement) -> StepParts:
    """The step time breakdown by the trial's own clock, scaled to the median step; keeps parts of zero time."""
    clock: dict[PartName, float] = {
        name.removesuffix("_s"): max(0.0, seconds) for name, seconds in to_json(measurement.breakdown).items()
    }
    step_time_s = measurement.step_time_s
    if not any(seconds for name, seconds in clock.items() if name != "other"):
        return StepParts(trial=number, step_time_s=step_time_s, parts=())  # no breakdown, as on simulated clusters
    separate_parts: tuple[PartName, ...] = ("bubble", "recompute", "communication")
    clock = {name: seconds for name, seconds in clock.items() if seconds or name not in separate_parts}
    if measurement.findings.script is not None:
        clock = {name: seconds for name, seconds in clock.items() if seconds}  # it reports only some phases
    scale = step_time_s / sum(clock.values())
    parts = tuple(Part(name, seconds * scale, "measured") for name, seconds in clock.items())
    return StepParts(trial=number, step_time_s=step_time_s, parts=parts)


def _change(state: SweepState, summary: Summary) -> Change | None:
    chosen = chosen_result(state, summary)
    if chosen is None or summary.baseline is None:
        return None
    changed = diff(chosen.trial.candidate, summary.baseline.trial.candidate)
    return Change(knobs=change_table(changed), reason=chosen.trial.reason)


def _profiles(state: SweepState, summary: Summary, folder: Path | None) -> tuple[Profiled, ...]:
    def files(trial: Trial) -> tuple[Path, ...]:
        return tuple(profile_files(folder, trial)) if folder else ()

    return tuple(
        Profiled(of=of, tables=tables, files=files(state.trials[tables.trial])) for of, tables in summary.profiles
    )


def next_commands(state: SweepState, invocation: Invocation) -> list[NextCommand]:
    """Suggested next commands, most useful first."""
    words = _failed_commands(state) if state.status == "failed" else _result_commands(state)
    return [NextCommand(purpose=purpose, command=invocation.command(*argv)) for purpose, argv in words.items()]


def _failed_commands(state: SweepState) -> dict[CommandPurpose, tuple[str, ...]]:
    """Commands after a failed sweep: show the cause first, then continue."""
    name = state.sweep.sweep
    words: dict[CommandPurpose, tuple[str, ...]] = {}
    if state.last_failures:
        trial = trial_id(state.last_failures[0][0])
        words |= {"logs": ("logs", name, trial), "story": ("explain", name, trial)}
    words["retry"] = ("retry", name, _failed_option(state))
    if state.best is None:
        words["delete"] = ("delete", name)
    return words


def _failed_option(state: SweepState) -> str:
    """Trials to launch again: those that failed, or a baseline that was not believed, once its timer is fixed."""
    is_believed = state.baseline is None or not isinstance(state.baseline.outcome, NotBelieved)
    return "--failed" if is_believed else f"--failed={NotBelieved.kind}"


def _is_undecided(state: SweepState) -> bool:
    """Whether nothing is shown to be faster, but the fastest trial was not measured again, or with too much noise."""
    if state.verdict is None or state.verdict.conclusion != "keep" or state.best is None or state.best.number == 0:
        return False
    measured_again = state.proof.finalists if state.proof is not None else ()
    return state.best.number not in measured_again or is_wide(state.verdict.speedup)


def _result_commands(state: SweepState) -> dict[CommandPurpose, tuple[str, ...]]:
    name, conclusion = state.sweep.sweep, state.verdict.conclusion if state.verdict else None
    words: dict[CommandPurpose, tuple[str, ...]] = {"ui": ("ui", name), "page": ("report", name, "--html")}
    if state.best is None:
        return words  # there is nothing to explain, to confirm or to promote
    words["explain"] = ("explain", name)
    if state.trials[0].measurement is None:  # without it nothing can be confirmed
        words |= {"logs": ("logs", name, trial_id(0)), "story": ("explain", name, trial_id(0))}
        words["retry"] = ("retry", name, _failed_option(state))
    elif state.verdict is not None and state.verdict.disqualified and state.verdict.winner is None:
        if left := promising(state):
            words["confirm"] = ("confirm", name, trial_id(left[0]))
    elif conclusion not in ("keep", "rehearsed") or _is_undecided(state):
        words["confirm"] = ("confirm", name)
    if conclusion in (None, "confirmed"):
        words["promote" if conclusion else "force"] = ("promote", name, "--name", "NAME")
    if state.virtual is not None:  # nothing to confirm, nothing for production
        words = {purpose: argv for purpose, argv in words.items() if purpose not in ("confirm", "promote", "force")}
    if state.promotions:
        words["rollback"] = ("rollback", state.promotions[-1].record["name"])
    return words


# The report of a sweep as a short story in Markdown: the note of its run in MLflow.


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """Related links of the note."""

    links: Mapping[str, str] = field(default_factory=dict)
    """Title to address of further pages."""
    plots: Mapping[str, str] = field(default_factory=dict)
    """Name of a plot to its address."""


def report_markdown(report: ShortReport, attached: Attached | None = None) -> str:
    """The result; the first line is the verdict, the second its confidence, the third has links."""
    attached = attached or Attached()
    virtual = report.summary.virtual
    lines = [f"# {watermark(virtual)}", ""] if virtual else []
    lines += [f"**{report.headline}**", ""]
    if report.confidence:
        lines += [report.confidence + ".", ""]
    if report.proof.caution:
        lines += [report.proof.caution + ".", ""]
    if report.note:
        lines += [report.note, ""]
    if attached.links:
        lines += [" · ".join(f"[{what}]({url})" for what, url in attached.links.items()), ""]
    lines += [*(f"- {reason}" for reason in report.details), ""] if report.details else []
    lines += _results(report)
    lines += ["", *_facts(report)]
    for name, url in attached.plots.items():
        lines += ["", f"![{name}]({url})"]
    summary = report.summary
    state = units.with_reason(summary.state, summary.reason)
    lines += ["", f"Live page: run `tune-cluster ui {summary.sweep}` on the host of the sweep"]
    return "\n".join([*lines, "", f"{report.hardware} · {state} · {report.cost}"])


def _results(report: ShortReport) -> Iterator[str]:
    if not report.shown:
        return
    yield "| | trial | configuration | speed |"
    yield "|---|---|---|---|"
    for one in report.shown:
        yield f"| {one.role} | {units.trial_id(one.number)} | `{one.configuration}` | {report.figures[one.role]} |"
    yield ""
    yield report.legend


def _facts(report: ShortReport) -> Iterator[str]:
    if report.change is not None:
        changes = (
            f"`{c['knob'].text}` {c['before'].text} → {c['after'].text}"
            for c in (row.cells for row in report.change.knobs.rows)
        )
        yield f"- {descriptions.change_heading(is_faster=report.is_faster)}: {'; '.join(changes)}"
    for finalist in report.proof.finalists:
        ratio = units.ratio(finalist.overall.value, finalist.overall) if finalist.overall else "no round yet"
        yield f"- Confirmation of {units.trial_id(finalist.trial)}: {ratio}, {descriptions.finalist_text(finalist)}"
    for one in judged(report.proof):
        has_details = one.kind == "Loss gate" and one.answer != "passed" and report.details
        text = one.answer if has_details else "; ".join((one.text, *(one.notes if one.kind == "Soak" else ())))
        if one.kind != "Your evaluation":
            yield f"- {one.kind} of {units.trial_id(one.trial)}: {text}"
    for shown in report.shown:
        yield from (f"- {shown.role}: {line}" for line in shown.findings)
    yield from (f"- {promotion}" for promotion in report.promotions)

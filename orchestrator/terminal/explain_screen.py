"""Explanations on the terminal: where the step time of a sweep goes, and what happened to one trial."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from orchestrator import units
from orchestrator.diagnosis.remedies import change_text, memory_text
from orchestrator.diagnosis.values import (
    PART_NAMES,
    Bottleneck,
    Diagnosis,
    KnobEffect,
    Part,
    PartName,
    Predictions,
    SweepExplanation,
)
from orchestrator.report.descriptions import disturbed, note_text, peak_memory, peak_memory_parts, trend
from orchestrator.report.view import Column
from orchestrator.space.inside import BUILT_IN, MICRO_BATCH
from orchestrator.space.knobs import inside_name, is_inside
from orchestrator.space.notation import short_name, spelled
from orchestrator.status.explanation import AttemptExplanation, Explanation
from orchestrator.sweep.state import Trial, nodes_of
from orchestrator.terminal.fitted import FittedTable, indented, label_grid, mark, section, status_text
from orchestrator.text import one_line, plain
from orchestrator.units import count
from trials.outcome import Evidence

# The explanation of a sweep on the terminal: step time, bottlenecks, importance of knobs, accuracy of predictions.


MAX_EFFECTS = 8
MAX_OTHERS = 4
BAR_WIDTH = 10
"""Characters of the bar for the full step."""
ROUGH = 0.3
"""Relative error of the cost model from which on a warning is shown."""
WIDE = 10.0
"""Ratio of an interval's ends from which on only its lower end is shown."""
MIN_SHARE = 0.001
"""Share of the step below which a part has no line."""

PART_LABELS: Mapping[PartName, str] = {
    "communication": "exposed comm.",
    "host_copies": "host copies",
    "bubble": "bubble",
    "forward_backward": "forward+backward",
    "data": "data wait",
}
SOURCE_MARKS = {"measured": "", "profiled": "p", "modelled": "~"}


def render_sweep_explanation(explained: SweepExplanation) -> RenderableType:
    """All sections, for a terminal of 80 columns or more."""
    head = Text.assemble((explained.sweep, "bold"), f" on {one_line(explained.hardware)}: {explained.phase}")
    sections: list[RenderableType] = [
        *mark(explained.virtual),
        head,
        section("Where the step time goes", _parts(explained)),
    ]
    sections.append(section("Bottlenecks", _diagnoses(explained)))
    sections.append(
        section(
            "Effect of each knob",
            Group(_effects(explained.effects, explained.unit), *_left_out(explained)),
        )
    )
    sections.append(section(f"Expected and {explained.virtual or 'measured'}", _predictions(explained.predictions)))
    return Group(*sections)


def _left_out(explained: SweepExplanation) -> list[RenderableType]:
    """A note if the sweep is too long to examine every trial."""
    if explained.num_examined >= explained.num_trials:
        return []
    numbers = f"{explained.num_examined:,} of {explained.num_trials:,} trials"
    return [Text(f"from {numbers}: those most similar to the ones above, and a sample of the others", style="dim")]


def _parts(explained: SweepExplanation) -> RenderableType:
    sides = [side for side in (explained.baseline, explained.chosen) if side is not None]
    columns = [Column(title="")]
    for side in sides:
        columns.append(Column(title=f"{side.role} {units.trial_id(side.trial)}", is_number=True))
        columns.append(Column(title="", name="shares", priority=2, is_number=True))
        columns.append(Column(title="", name="bars", priority=1))
    table = FittedTable(columns=columns)
    for name in PART_NAMES:
        if any(side.parts.share(name) >= MIN_SHARE for side in sides):
            cells = [cell for side in sides for cell in _part_cells(side, name)]
            table.add_row(PART_LABELS.get(name, name), *cells)
    total = [cell for side in sides for cell in (units.milliseconds(side.parts.step_time_s), "", "")]
    table.add_section()
    table.add_row("step", *total, style="bold")
    return Group(table, *_part_notes(explained, sides))


def _part_cells(side: Diagnosis, name: PartName) -> tuple[str, str, Text]:
    found = [part for part in side.parts.parts if part.name == name]
    share = side.parts.share(name)
    if share < MIN_SHARE:
        return "", "", Text("")
    style = "cyan" if name in ("compute", "forward_backward") else "yellow"
    bar = Text("█" * round(BAR_WIDTH * share), style=style)
    words = f"{share:.0%}" if share >= 0.005 else "<1%"
    return f"{_mark(found)}{units.milliseconds(side.parts.seconds(name))}", words, bar


def _mark(parts: Iterable[Part]) -> str:
    marks = {SOURCE_MARKS[part.source] for part in parts} - {""}
    return f"{'/'.join(sorted(marks))} " if marks else ""


def _part_notes(explained: SweepExplanation, sides: Iterable[Diagnosis]) -> list[RenderableType]:
    sources = {part.source for side in sides for part in side.parts.parts}
    whole = f"the {explained.virtual} step" if explained.virtual else "the measured step"
    legend = {
        "measured": "unmarked: measured by the trial",
        "profiled": f"p: {whole}, split by a profile",
        "modelled": f"~: {whole}, split by the cost model",
    }
    lines = [words for source, words in legend.items() if source in sources]
    if "modelled" in sources:
        lines[-1] += f"; {_trust(explained.model_error)}"
    notes: dict[str, list[str]] = {}
    for side in sides:
        for note in side.parts.notes:
            notes.setdefault(note, []).append(units.trial_id(side.trial))
    lines += [f"{' '.join(trials)}: {note}" for note, trials in notes.items()]
    return [Text(line, style="dim") for line in lines]


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"


def _trust(error: float | None) -> str:
    if error is None:
        return "its error is unknown: too few trials"
    rough = ": the split is a rough estimate" if error > ROUGH else ""
    return f"its typical error in this sweep is {_percent(error)}{rough}"


def _diagnoses(explained: SweepExplanation) -> RenderableType:
    parts: list[RenderableType] = []
    for side in (explained.chosen, explained.baseline):
        if side is not None:
            parts += [Text("") for _ in parts[:1]] + _diagnosis(side, explained)
    return Group(*parts)


def _diagnosis(side: Diagnosis, explained: SweepExplanation) -> list[RenderableType]:
    name = f"{side.role} {units.trial_id(side.trial)}"
    if side.bottleneck is None:
        advice = f"; to measure it: {_profile_command(explained, side)}"
        return [Text.assemble((name, "bold"), f": bottleneck unknown: {explained.unmodelled}{advice}")]
    first, *others = side.bottlenecks
    words = Text.assemble((f"{name}: ", "bold"))
    if _is_guess(first, explained):
        words.append("unknown without a profile", "bold yellow")
    else:
        words.append(first.title, "bold yellow").append(f", {_cost(first)}")
    lines: list[RenderableType] = [words, _bottleneck_grid(first, explained, side)]
    shown = [one for one in others if one.kind not in ("compute", "passes") or one.remedy is not None][:MAX_OTHERS]
    if shown:
        lines += [Text("also:", style="dim"), _others(shown)]
    if side.advice:
        grid = label_grid("dim")
        for i, line in enumerate(side.advice):
            grid.add_row("" if i else "advice", Text(line))
        lines.append(indented(grid))
    return lines


def _is_guess(one: Bottleneck, explained: SweepExplanation) -> bool:
    """Whether only the cost model attributes the step to computation: it misses parts that a profile shows."""
    return one.kind == "compute" and one.source == "modelled" and explained.virtual is None


def _profile_command(explained: SweepExplanation, side: Diagnosis) -> str:
    return f"tune-cluster profile {explained.sweep} {units.trial_id(side.trial)}"


def _cost(one: Bottleneck) -> str:
    source = "" if one.source == "measured" else f" ({one.source})"
    return f"{one.share:.0%} of the step, {units.milliseconds(one.seconds)}{source}"


def _bottleneck_grid(one: Bottleneck, explained: SweepExplanation, side: Diagnosis) -> RenderableType:
    grid, is_guess = label_grid("dim"), _is_guess(one, explained)
    if side.changed and explained.baseline is not None:
        grid.add_row(
            "knobs", Text(f"{units.changes_text(side.changed)} (from {units.trial_id(explained.baseline.trial)})")
        )
    if is_guess:
        estimate = f"{one.share:.0%} of the step, {units.milliseconds(one.seconds)}, by the cost model"
        grid.add_row(
            "compute",
            Text(f"{estimate}, which does not model all waiting for the host or other ranks"),
        )
    if one.kind == "passes":
        grid.add_row(
            "", Text("computation, or waiting for the host or other ranks: only a profile can distinguish them")
        )
    for i, line in enumerate(one.evidence):
        grid.add_row(("seen" if is_guess or one.kind == "passes" else "because") if i == 0 else "", Text(line))
    is_open = one.source == "modelled" or one.kind == "passes"
    if is_open and explained.virtual is None:
        grid.add_row("profile", Text(f"{_profile_command(explained, side)} measures it"))
    if one.remedy is not None:
        grid.add_row("change", Text(change_text(one.remedy), style="green"))
        grid.add_row("gain", Text(_gain(one)))
        if memory := memory_text(one.remedy, explained.limit_bytes):
            grid.add_row("memory", Text(memory))
    else:
        grid.add_row("change", Text(one.note or "no faster alternative known"))
    if one.at_most is not None:
        grid.add_row("at most", Text(f"{units.ceil(one.at_most)}x by eliminating this alone"))
    if one.fixed:
        grid.add_row("fixed", Text(_fixed(one, explained)))
    return indented(grid)


def _fixed(one: Bottleneck, explained: SweepExplanation) -> str:
    fixed = one.fixed[:5]
    settable = [
        knob for knob in fixed if explained.is_script and (knob in BUILT_IN or is_inside(knob)) and knob != MICRO_BATCH
    ]
    names, own = ([inside_name(knob) for knob in knobs] for knobs in (fixed, settable))
    how = f"; space.inside can set {', '.join(own)} without an option" if own else ""
    return f"not varied by this sweep: {', '.join(names)}{how}"


def _others(bottlenecks: Iterable[Bottleneck]) -> RenderableType:
    grid = label_grid("dim")
    for one in bottlenecks:
        found = one.remedy
        words = f"{change_text(found)}: {_gain(one)}" if found else "no faster alternative known"
        grid.add_row(one.title, Text(f"{one.share:.0%}  {words}"))
    return indented(grid)


def _gain(one: Bottleneck) -> str:
    """The gain to claim for the remedy: the lower end of the measurement, at most the cost of the bottleneck."""
    remedy, gain = one.remedy, one.gain
    assert remedy is not None and gain is not None
    if remedy.source == "modelled" or remedy.trial is None:
        spread = f" (± {100 * remedy.log_spread:.0f}%)" if remedy.log_spread else ""
        return f"{units.floor(gain)}x expected{spread}, not tried"
    trial = units.trial_id(remedy.trial)
    how = f"in {units.count(remedy.num_rounds, 'round')}" if remedy.num_rounds else "once"
    more = "; this alone does not explain its speed" if one.is_exceeded else ""
    return f"at least {units.floor(gain)}x; {trial} was measured {how}{more}"


def _effects(effects: tuple[KnobEffect, ...], unit: str) -> RenderableType:
    if not effects:
        return Text("no two trials differ in a single knob only")
    columns = (
        Column(title="", name="change", min_width=24),
        Column(title="", name="speed", is_number=True),
        Column(title="", name="interval", priority=9, mood="rest"),
        Column(title="", name="pairs", priority=5, mood="rest"),
    )
    grid = FittedTable(columns=columns)
    for effect in effects[:MAX_EFFECTS]:
        pairs = units.count(effect.num_pairs, "pair") if effect.num_pairs else "regression"
        grid.add_row(_contrast(effect), units.short_ratio(effect.ratio, effect), _interval(effect), pairs)
    more = (
        [Text(f"and {len(effects) - MAX_EFFECTS} smaller effects", style="dim")] if len(effects) > MAX_EFFECTS else []
    )
    return Group(Text(f"speed in {unit}, all else equal; 95% CI:", style="dim"), grid, *more)


def _interval(effect: KnobEffect) -> str:
    if effect.is_without_effect:
        return "no effect observed"
    if not effect.low or not effect.high:
        return "no interval"
    low, high = f"{units.floor(effect.low)}", f"{units.ceil(effect.high)}"
    return f"{low}{units.DASH}{high}" if effect.high < WIDE * effect.low else f"{low} or more"


def _contrast(effect: KnobEffect) -> Text:
    words = Text()
    for i, (knob, before, after) in enumerate(zip(effect.knobs, effect.before, effect.after, strict=True)):
        words.append(", " if i else "").append(f"{knob} ", style="dim").append(
            f"{units.value_text(after)} over {units.value_text(before)}"
        )
    return words


def _predictions(predictions: Predictions) -> RenderableType:
    if not predictions.trials or predictions.mape is None:
        return Text("no predictions for the measured trials")
    lines = [f"step time: mean error {_percent(predictions.mape)} over {len(predictions.trials)} trials"]
    if predictions.rank_correlation is not None:
        lines[0] += f", rank correlation {predictions.rank_correlation:.2f}"
    if predictions.within_spread is not None:
        lines.append(f"{predictions.within_spread:.0%} were within two predicted standard deviations (ideal: 95%)")
    if predictions.memory_mape is not None:
        lines.append(f"peak memory: mean error {_percent(predictions.memory_mape)}")
    if predictions.num_memory_surprises:
        lines.append(f"{predictions.num_memory_surprises} ran out of memory despite being expected to fit")
    by_trial = {predicted.trial: predicted for predicted in predictions.trials}
    for number in predictions.outliers:
        found = by_trial[number]
        took, expected = units.milliseconds(found.step_time_s), units.milliseconds(found.expected_step_time_s)
        lines.append(f"{units.trial_id(number)} took {took} instead of the expected {expected} ({found.ratio:.2f}x)")
    if predictions.in_common:
        lines.append(f"these have in common: {', '.join(predictions.in_common)}")
    return Group(*[Text(line) for line in lines])


# The explanation of one trial on the terminal: why it was proposed, waits, or failed.


MAX_LOG_LINES = 12
MAX_COLLATERAL = 4
MAX_NODES = 8


def render_explanation(explained: Explanation) -> RenderableType:
    """The history of the trial, from its proposal to the candidates it ruled out."""
    trial = explained.trial
    head = Text.assemble((f"{explained.sweep} {units.trial_id(trial.number)} ", "bold"), status_text(trial.status))
    parts: list[RenderableType] = [*mark(explained.virtual), head, Text(short_name(trial.candidate)), _spelled(trial)]
    if trial.note is not None:
        parts.append(Text(one_line(plain(note_text(trial.note)))))
    parts += [_heading("Proposed"), _proposed(explained)]
    if explained.pending:
        parts += [_heading("Waits"), *_lines(explained.pending, "yellow")]
    for explanation in explained.attempts:
        parts += [_attempt_heading(explanation), *_attempt(explanation)]
    if explained.proof:
        parts += [_heading("Proof"), *_lines(explained.proof)]
    if explained.ruled_out:
        total = sum(explained.ruled_out.values())
        rules = ", ".join(f"{rule} {number}" for rule, number in explained.ruled_out.items())
        why = "use a knob that the program rejects" if trial.status == "infeasible" else "need at least as much memory"
        parts += [_heading("Ruled out"), *_lines([f"{total} candidates that {why}: {rules}"])]
    return Group(*parts)


def _spelled(trial: Trial) -> RenderableType:
    """The meaning of each sign in the configuration's name."""
    grid = label_grid()
    for sign, meaning in spelled(trial.candidate):
        grid.add_row(Text(sign), Text(meaning, style="dim"))
    return indented(grid)


def _proposed(explained: Explanation) -> RenderableType:
    trial, measured = explained.trial, explained.measurement
    grid = label_grid("dim")
    grid.add_row("why", Text(plain(trial.reason)))
    if explained.changed:
        grid.add_row("changed", Text(units.changes_text(explained.changed)))
    if explained.expected:
        grid.add_row("expected", Text(explained.expected))
    if measured:
        ratio = f"; {explained.surprise:.2f}x the expected step time" if explained.surprise is not None else ""
        peak = f", peak {peak_memory(measured)}" if measured.peak_bytes else ""
        grid.add_row("measured", Text(f"{explained.figures}{peak}{ratio}"))
        if parts := peak_memory_parts(measured):
            grid.add_row("memory", Text(parts))
        if why := disturbed(measured):
            grid.add_row("disturbed", Text(why, style="yellow"))
        if why := trend(measured):
            grid.add_row("trend", Text(why, style="yellow"))
    return indented(grid)


def _attempt_heading(explanation: AttemptExplanation) -> Text:
    outcome = explanation.attempt.outcome
    kind = outcome.kind if outcome else "running"
    return Text.assemble((f"\nAttempt {explanation.number} ", "bold"), status_text(kind))


def _attempt(explanation: AttemptExplanation) -> Iterable[RenderableType]:
    attempt, names = explanation.attempt, nodes_of(explanation.attempt)
    more = f" +{len(names) - MAX_NODES}" if len(names) > MAX_NODES else ""
    grid = label_grid("dim")
    devices = f"{count(len(attempt.ranks), 'rank')}, {count(attempt.num_devices, 'device')}"
    grid.add_row("on", Text(f"{' '.join(names[:MAX_NODES])}{more}: {devices}"))
    charged = f", {units.device_time(attempt.device_seconds)} charged" if attempt.outcome else " so far"
    grid.add_row("took", Text(f"{units.duration(explanation.duration_s)}{charged}"))
    if explanation.evidence:
        for label, words in _evidence(explanation.evidence, explanation.blamed):
            grid.add_row(label, words)
    for i, line in enumerate(explanation.consequences):
        grid.add_row("effect" if i == 0 else "", Text(line))
    if attempt.outcome is None or explanation.evidence:
        grid.add_row("logs", Text(str(explanation.folder), style="dim", overflow="fold"))
    yield indented(grid)


def _evidence(evidence: Evidence, blamed: str) -> Iterable[tuple[str, Text]]:
    if blamed:
        yield "blamed", Text(blamed)
    yield "because", Text(plain(evidence.message.strip()), style="red")
    for i, line in enumerate(evidence.log_tail[-MAX_LOG_LINES:]):
        yield "log" if i == 0 else "", Text(plain(line), style="dim")
    for i, line in enumerate(evidence.collateral[:MAX_COLLATERAL]):
        yield "then" if i == 0 else "", Text(plain(line), style="dim")
    if len(evidence.collateral) > MAX_COLLATERAL:
        yield "", Text(f"... and {len(evidence.collateral) - MAX_COLLATERAL} more", style="dim")


def _heading(title: str) -> Text:
    return Text(f"\n{title}", style="bold")


def _lines(lines: Iterable[str], style: str = "") -> list[RenderableType]:
    return [indented(Text(plain(line), style=style)) for line in lines]

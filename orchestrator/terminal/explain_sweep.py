"""The explanation of a sweep on the terminal: where the time goes, what holds it back, which knob matters, how good
the predictions were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from orchestrator import units
from orchestrator.diagnosis.remedies import change_words, memory_words
from orchestrator.diagnosis.values import (
    PART_NAMES,
    Bottleneck,
    Diagnosis,
    Importance,
    KnobEffect,
    Part,
    PartName,
    Predictions,
    Remedy,
    SweepExplanation,
)
from orchestrator.terminal.layout import indented, label_grid, mark, section
from orchestrator.terminal.table import Column, FittedTable

MAX_KNOBS = 8
MAX_EFFECTS = 8
MAX_OTHERS = 4
BAR_WIDTH = 10
"""Characters of a bar of the whole step."""
ROUGH = 0.3
"""Error of the cost model, as a share, from which on people are warned."""
WIDE = 10.0
"""High over low of an interval from which on it is not shown."""
MIN_SHARE = 0.001
"""Share of the step below which a part has no line."""

PART_WORDS: Mapping[PartName, str] = {
    "communication": "exposed comm.",
    "host_copies": "host copies",
    "bubble": "bubble",
    "forward_backward": "forward+backward",
    "data": "data wait",
}
KIND_WORDS = {"io": "IO", "imbalance": "imbalance"}
SOURCE_MARKS = {"measured": "", "profiled": "p", "modelled": "~"}


def render_sweep_explanation(explained: SweepExplanation) -> RenderableType:
    """All sections, for a terminal of 80 columns or more."""
    head = Text.assemble((explained.sweep, "bold"), f" on {explained.hardware}: {explained.phase}")
    sections: list[RenderableType] = [
        *mark(explained.virtual),
        head,
        section("Where the step time goes", _parts(explained)),
    ]
    sections.append(section("What holds it back", _diagnoses(explained)))
    sections.append(
        section("Which knob matters", Group(_knobs(explained.importance, explained.effects), *_left_out(explained)))
    )
    sections.append(section(f"Expected and {explained.virtual or 'measured'}", _predictions(explained.predictions)))
    return Group(*sections)


def _left_out(explained: SweepExplanation) -> list[RenderableType]:
    """That the sweep is too long to look at every trial, where it is."""
    if explained.num_looked_at >= explained.num_trials:
        return []
    numbers = f"{explained.num_looked_at:,} of {explained.num_trials:,} trials"
    return [Text(f"from {numbers}: those most like the ones above, and some of all others", style="dim")]


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
            table.add_row(PART_WORDS.get(name, name), *cells)
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
    whole = f"the {explained.virtual} step" if explained.virtual else "what the clock measured"
    legend = {
        "measured": "unmarked: measured by the trial's own clock",
        "profiled": f"p: a profile's share of {whole}",
        "modelled": f"~: the cost model's share of {whole}",
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
        return "too few trials tell how far off it is"
    rough = ", so take its split as a guess" if error > ROUGH else ""
    return f"it is typically {_percent(error)} off in this sweep{rough}"


def _diagnoses(explained: SweepExplanation) -> RenderableType:
    parts: list[RenderableType] = []
    for side in (explained.chosen, explained.baseline):
        if side is not None:
            parts += [Text("") for _ in parts[:1]] + _diagnosis(side, explained)
    return Group(*parts)


def _diagnosis(side: Diagnosis, explained: SweepExplanation) -> list[RenderableType]:
    name = f"{side.role} {units.trial_id(side.trial)}"
    if side.bottleneck is None:
        advice = "" if explained.is_script else "; a profile of it would tell (`tune-cluster profile`)"
        return [Text.assemble((name, "bold"), f": nothing tells what holds it back: {explained.unmodelled}{advice}")]
    first, *others = side.bottlenecks
    words = Text.assemble((f"{name}: ", "bold"), (KIND_WORDS.get(first.kind, first.kind), "bold yellow"))
    words.append(f", {_cost(first)}")
    lines: list[RenderableType] = [words, _bottleneck_grid(first, explained)]
    shown = [one for one in others if one.kind != "compute" or one.remedy is not None][:MAX_OTHERS]
    if shown:
        lines += [Text("besides:", style="dim"), _others(shown)]
    return lines


def _cost(one: Bottleneck) -> str:
    said = "" if one.source == "measured" else f" ({one.source})"
    return f"{one.share:.0%} of the step, {units.milliseconds(one.seconds)}{said}"


def _bottleneck_grid(one: Bottleneck, explained: SweepExplanation) -> RenderableType:
    grid = label_grid("dim")
    for i, line in enumerate(one.evidence):
        grid.add_row("because" if i == 0 else "", Text(line))
    if one.remedy is not None:
        grid.add_row("change", Text(change_words(one.remedy), style="green"))
        grid.add_row("gain", Text(_gain(one.remedy)))
        if memory := memory_words(one.remedy, explained.limit_bytes):
            grid.add_row("memory", Text(memory))
    else:
        grid.add_row("change", Text(one.note or "none is known to be faster"))
    if one.at_most is not None:
        grid.add_row("at most", Text(f"{one.at_most:.2f}x from this alone, if all of it went"))
    if one.fixed:
        grid.add_row("fixed", Text(f"not varied by this sweep: {', '.join(one.fixed[:5])}"))
    return indented(grid)


def _others(bottlenecks: Iterable[Bottleneck]) -> RenderableType:
    grid = label_grid("dim")
    for one in bottlenecks:
        found = one.remedy
        words = f"{change_words(found)}: {_gain(found)}" if found else "no change is known to be faster"
        grid.add_row(KIND_WORDS.get(one.kind, one.kind), Text(f"{one.share:.0%}  {words}"))
    return indented(grid)


def _gain(remedy: Remedy) -> str:
    if remedy.source == "measured" and remedy.trial is not None:
        return f"{remedy.gain:.2f}x, measured in {units.trial_id(remedy.trial)}"
    spread = f" (give or take {100 * remedy.log_spread:.0f} %)" if remedy.log_spread else ""
    return f"{remedy.gain:.2f}x expected{spread}, not tried"


def _knobs(importance: Importance, effects: tuple[KnobEffect, ...]) -> RenderableType:
    parts: list[RenderableType] = [_importance(importance)]
    if effects:
        parts += [Text(""), _effects(effects)]
    return Group(*parts)


def _importance(importance: Importance) -> RenderableType:
    if importance.reason:
        return Text(importance.reason)
    columns = (
        Column(title="", name="knob", min_width=20),
        Column(title="", name="share", is_number=True),
        Column(title="", name="interval", priority=6, style="dim"),
        Column(title="", name="bars", priority=5),
    )
    grid = FittedTable(columns=columns)
    for knob in importance.knobs[:MAX_KNOBS]:
        bar = Text("█" * round(2 * BAR_WIDTH * knob.share), style="cyan")
        interval = f"{knob.low:.0%} {units.DASH} {knob.high:.0%}"
        grid.add_row(" + ".join(knob.knobs), f"{knob.share:.0%}", interval, bar)
    rest = len(importance.knobs) - MAX_KNOBS
    bounds = f", {importance.num_bounds} of them stopped early" if importance.num_bounds else ""
    note = f"share of the variance of log step time, {importance.num_trials} trials{bounds}; 95 % by bootstrap"
    more = [Text(f"and {rest} more knobs", style="dim")] if rest > 0 else []
    return Group(grid, *more, Text(note, style="dim"))


def _effects(effects: tuple[KnobEffect, ...]) -> RenderableType:
    columns = (
        Column(title="", name="change", min_width=24),
        Column(title="", name="speed", is_number=True),
        Column(title="", name="interval", priority=9, style="dim"),
        Column(title="", name="pairs", priority=5, style="dim"),
    )
    grid = FittedTable(columns=columns)
    for effect in effects[:MAX_EFFECTS]:
        pairs = units.count(effect.num_pairs, "pair") if effect.num_pairs else "regression"
        grid.add_row(_contrast(effect), f"{effect.ratio:.2f}x", _interval(effect), pairs)
    more = [Text(f"and {len(effects) - MAX_EFFECTS} smaller", style="dim")] if len(effects) > MAX_EFFECTS else []
    return Group(Text("speed in tokens/s/p, all else equal; 95 % interval:", style="dim"), grid, *more)


def _interval(effect: KnobEffect) -> str:
    if not effect.low or not effect.high:
        return "no interval"
    return f"{effect.low:.2f} {units.DASH} {effect.high:.2f}" if effect.high < WIDE * effect.low else "not known"


def _contrast(effect: KnobEffect) -> Text:
    words = Text()
    for i, (knob, before, after) in enumerate(zip(effect.knobs, effect.before, effect.after, strict=True)):
        words.append(", " if i else "").append(f"{knob} ", style="dim").append(
            f"{units.value_words(after)} over {units.value_words(before)}"
        )
    return words


def _predictions(predictions: Predictions) -> RenderableType:
    if not predictions.trials or predictions.mape is None:
        return Text("nothing was predicted of the measured trials")
    lines = [f"step times: {_percent(predictions.mape)} off on average over {len(predictions.trials)} trials"]
    if predictions.rank_correlation is not None:
        lines[0] += f", order of trials: rank correlation {predictions.rank_correlation:.2f}"
    if predictions.within_spread is not None:
        lines.append(
            f"{predictions.within_spread:.0%} lay within two of their predicted standard deviations (ideal: 95 %)"
        )
    if predictions.memory_mape is not None:
        lines.append(f"peak memory: {_percent(predictions.memory_mape)} off on average")
    if predictions.num_memory_surprises:
        lines.append(f"{predictions.num_memory_surprises} ran out of memory although expected to fit")
    by_trial = {predicted.trial: predicted for predicted in predictions.trials}
    for number in predictions.outliers:
        found = by_trial[number]
        took, expected = units.milliseconds(found.step_time_s), units.milliseconds(found.expected_step_time_s)
        lines.append(f"{units.trial_id(number)} took {took} where {expected} were expected ({found.ratio:.2f}x)")
    if predictions.in_common:
        lines.append(f"these have in common: {', '.join(predictions.in_common)}")
    return Group(*[Text(line) for line in lines])

"""What is known before a sweep, on the terminal: its plan, and dry runs of candidates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from cluster.cost.stage_balance import Balance
from orchestrator import units
from orchestrator.commands.forecast import DryRunVerdict, PlannedFile
from orchestrator.frameworks.shell import assignments
from orchestrator.objective import unit_legend
from orchestrator.planning.planner import Plan
from orchestrator.planning.predictions import PlanPredictions, UsualGain, UsualRanking, Why
from orchestrator.report.view import Column
from orchestrator.search.predictor import Prediction
from orchestrator.space.notation import legend, short_name
from orchestrator.terminal.fitted import FittedTable, render_legend
from orchestrator.units import chance, count, device_time, milliseconds, num_bytes, rate
from trials.dryrun.estimate import DryRunEstimate, RunFailure, StageEstimate
from trials.spec import Candidate

# A plan with its predictions on the terminal.


MAX_CANDIDATES = 20
"""Candidates of a plan that are shown."""
SURELY_FITS = 0.995
"""Probability of fitting into memory from which on it is not told."""
MAX_PREDICTIONS = 10
"""Candidates expected to be fastest that are shown."""


def render_planned_file(planned: PlannedFile) -> RenderableType:
    """The ranking, then how it came about; of one candidate only, where one was asked for."""
    if planned.why is not None:
        return render_why(planned.why)
    if planned.predictions is None and planned.usual is not None and planned.usual.top:
        ranking = render_usual(planned.usual, planned.unpredicted)
        return Group(ranking, Text(""), render_plan(planned.plan, is_ranked=True, has_baseline=True))
    if planned.predictions is None:
        return Group(render_plan(planned.plan), Text(""), Text(f"no prediction: {planned.unpredicted}"))
    return Group(render_predictions(planned.predictions), Text(""), render_plan(planned.plan, is_ranked=True))


def render_plan(plan: Plan, *, is_ranked: bool = False, has_baseline: bool = False) -> RenderableType:
    """How many candidates there are, the first of them, and what was ruled out by which rule.

    ``is_ranked``: the candidates were listed before, the baseline among them unless ``has_baseline``; only what a dry
    run predicted of some is told here.
    """
    parts: list[RenderableType] = [_head(plan)]
    if plan.too_large:
        parts.append(Text(plan.too_large, style="yellow"))
    parts += [Text(plan.devices)] if plan.devices else []
    if not is_ranked or has_baseline:
        parts.append(_baseline(plan))
    if not is_ranked or _has_memory(plan):
        parts += [Text(""), _candidates(plan)]
    if plan.balances:
        parts.append(Text(f"{len(plan.balances)} of them balanced by the cost model: layers and recompute per stage"))
    if plan.unbalanced:
        parts.append(Text(f"nothing was balanced: {plan.unbalanced}", style="yellow"))
    if plan.num_rejected:
        parts += [Text(""), _rejected(plan)]
    if plan.env or len(plan.defaults) > 1:  # on one host of cores it is loopback for gloo, and nothing to choose
        parts += [Text(""), *_environment(plan)]
    if plan.notes:
        parts += [Text(""), *(Text(f"note: {note}", style="yellow") for note in plan.notes)]
    return Group(*parts)


def _environment(plan: Plan) -> list[Text]:
    """What ranks get by the file, and by default."""
    given = assignments(plan.env) or "nothing"
    kept = [f"{one.name}={one.value}" for one in plan.defaults if one.name not in plan.env]
    return [
        Text(f"environment of every rank  {given}"),
        Text(f"and unless their host says otherwise  {' '.join(kept) or 'nothing'}", style="dim"),
    ]


def _baseline(plan: Plan) -> Text:
    memory = _memory(plan, plan.baseline)
    words = f"  predicted peak {memory[0]}, {memory[1]} with margin" if any(memory) else ""
    return Text.assemble("baseline  ", (short_name(plan.baseline), "bold"), words)


def _head(plan: Plan) -> Text:
    rejected = f"{sum(plan.num_rejected.values()):,} rejected"
    if plan.too_large:
        drawn = (f"{len(plan.candidates):,} legal candidates drawn", "bold green")
        return Text.assemble(drawn, f"; {rejected} on the way")
    return Text.assemble(
        (f"{len(plan.candidates):,} legal candidates", "bold green"),
        f" of {plan.product_size:,} combinations; {rejected}, "
        f"{plan.num_duplicates:,} alike after removing knobs without effect",
    )


def _has_memory(plan: Plan) -> bool:
    """Whether a dry run told the memory of a candidate that is shown."""
    return any(map(plan.estimates.to_json, plan.candidates[:MAX_CANDIDATES]))


def _candidates(plan: Plan) -> RenderableType:
    columns = [Column(title="#", is_number=True), Column(title="configuration", min_width=24)]
    shown, has_memory = plan.candidates[:MAX_CANDIDATES], _has_memory(plan)
    if has_memory:
        columns += [Column(title="predicted peak", priority=1, is_number=True)]
        columns += [Column(title="with margin", priority=2, is_number=True)]
    table = FittedTable(title="candidates", columns=columns)
    for i, candidate in enumerate(shown, start=1):
        table.add_row(str(i), short_name(candidate), *(_memory(plan, candidate) if has_memory else ()))
    if (hidden := len(plan.candidates) - MAX_CANDIDATES) > 0:
        table.add_row("", f"... and {hidden} more (--json lists all)")
    return Group(table, render_legend(legend((plan.baseline, *shown))))


def _memory(plan: Plan, candidate: Candidate) -> tuple[str, str]:
    """Predicted peak, and with margin; empty where they are unknown."""
    estimate = plan.estimates.by_candidate.get(candidate)
    if estimate is None:
        return "", ""
    return num_bytes(estimate.peak_bytes), num_bytes(plan.estimates.needed_bytes(candidate))


def _rejected(plan: Plan) -> RenderableType:
    columns = (
        Column(title="rule"),
        Column(title="count", is_number=True),
        Column(title="why", priority=2, min_width=28),
        Column(title="for example", priority=1, min_width=34),
    )
    table = FittedTable(title="rejected", columns=columns)
    for rule_id, number in plan.num_rejected.items():
        example = next(example for example in plan.examples if example.rule_id == rule_id)
        table.add_row(rule_id, f"{number:,}", example.reason, short_name(example.candidate))
    return table


NUM_TIME_TERMS, NUM_MEMORY_TERMS = 2, 1
"""Largest terms shown per figure; explaining one candidate, or JSON, gives all."""


def render_predictions(predictions: PlanPredictions) -> RenderableType:
    """The candidates expected to be fastest, with what their time and memory consist of."""
    head = Text.assemble(
        (f"{predictions.num_fitting:,} of {predictions.num_candidates:,} candidates expected to fit", "bold"),
        f" on {predictions.hardware} (catalogue: {predictions.accelerator}{_probed(predictions)}); "
        f"about {device_time(predictions.device_hours * 3600)} for {count(predictions.num_trials, 'trial')}",
    )
    shown = (*predictions.top[:MAX_PREDICTIONS], predictions.baseline)
    has_sizes = len({prediction.figures.num_devices for prediction in shown}) > 1
    columns = _ranking_columns(predictions.baseline.unit, has_sizes=has_sizes)
    table = FittedTable(title="expected to be fastest", columns=columns)
    for prediction in shown[:-1]:
        speedup = prediction.score / predictions.baseline.score
        table.add_row(*_row(prediction, f"{speedup:.2f}x", has_sizes=has_sizes))
    table.add_section()
    table.add_row(*_row(predictions.baseline, "baseline", has_sizes=has_sizes))
    explained = render_legend(legend(prediction.candidate for prediction in shown))
    notes = [Text(predictions.usual, style="dim")] if predictions.usual else []
    return Group(head, Text(""), table, *notes, Text(unit_legend(predictions.baseline.unit), style="dim"), explained)


def render_usual(ranking: UsualRanking, unpredicted: str) -> RenderableType:
    """The candidates that come first by what knobs usually do, relative to the baseline."""
    head = Text(f"no prediction: {unpredicted}; this is what the knobs do to most programs, not a model of this one")
    has_limit = any(one.probability_fits < SURELY_FITS for one in ranking.top)
    columns = [Column(title="#", is_number=True), Column(title="configuration", min_width=24)]
    columns += [Column(title="speed-up", is_number=True), Column(title="two of three", priority=9)]
    columns += [Column(title="fits", priority=8, is_number=True)] if has_limit else []
    table = FittedTable(title="usually the best", columns=columns)
    for one in ranking.top:
        fits = (f"{one.probability_fits:.0%}",) if has_limit else ()
        between = f"{one.low:.2f}x to {one.high:.2f}x"
        table.add_row(str(one.number), short_name(one.candidate), f"{one.gain:.2f}x", between, *fits)
    order = "; ordered by speed-up x probability of fitting" if has_limit else ""
    note = f"speed-up over the baseline: the median over programs, and where two of three lie{order}"
    return Group(
        head, Text(""), table, Text(note, style="dim"), render_legend(legend(one.candidate for one in ranking.top))
    )


def _ranking_columns(unit: str, *, has_sizes: bool) -> tuple[Column, ...]:
    return (
        Column(title="#", is_number=True),
        Column(title="configuration", min_width=24),
        *((Column(title="devices", is_number=True),) if has_sizes else ()),
        Column(title=unit, is_number=True),
        Column(title="speed-up", priority=7, is_number=True),
        Column(title="step", priority=5, is_number=True),
        Column(title="memory", priority=6, is_number=True),
        Column(title="time, mostly", name="time terms", priority=2, mood="rest"),
        Column(title="memory, mostly", name="memory terms", priority=1, mood="rest"),
    )


def _probed(predictions: PlanPredictions) -> str:
    return f", {predictions.num_probed} node(s) probed" if predictions.num_probed else ""


def render_why(why: Why) -> RenderableType:
    """Legal or not, and the terms of the prediction one by one."""
    parts: list[RenderableType] = [Text(short_name(why.candidate), style="bold")]
    changed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in why.changed.items())
    parts.append(Text(f"against the baseline: {changed or 'nothing differs'}"))
    if why.violations:
        parts += [Text(f"not legal, rule {v.rule_id}: {v.reason}", style="red") for v in why.violations]
        return Group(*parts)
    where = f"candidate {why.number} of the plan" if why.number else "legal, but not in this file's space"
    parts.append(Text(where, style="green" if why.number else "yellow"))
    if why.prediction is None:
        usual = () if why.usual is None else (_usual(why.usual),)
        return Group(*parts, Text(f"no prediction: {why.unpredicted}"), *usual)
    parts.append(_terms(why.prediction))
    if why.balance is not None:
        parts.append(_balance(why.balance))
    return Group(*parts)


def _usual(found: UsualGain) -> Text:
    fits = "" if found.probability_fits >= SURELY_FITS else f"; fits with {chance(found.probability_fits)}"
    return Text(
        f"by what knobs usually do {found.gain:.2f}x the baseline, "
        f"{found.low:.2f}x to {found.high:.2f}x in two programs of three{fits}"
    )


def _balance(balance: Balance) -> RenderableType:
    """Where the step time of a balanced pipeline goes, and what every stage holds."""
    where = ", ".join(
        f"{name} {milliseconds(value)} ({value / balance.step_s:.1%})" for name, value in balance.step_terms_s.items()
    )
    proven = "no split is faster" if balance.gap < 1e-6 else f"at most {balance.gap:.1%} from the best split"
    columns = [Column(title="stage", is_number=True), Column(title="layers", is_number=True)]
    columns += [Column(title="micro-batch", is_number=True), Column(title="memory", priority=9, is_number=True)]
    columns += [Column(title=name, priority=8 - i, is_number=True) for i, name in enumerate(balance.state_counts)]
    table = FittedTable(title="stages", columns=columns)
    for stage, seconds in enumerate(balance.stage_s):
        counts = (balance.stage_layers, *balance.state_counts.values())
        layers, *by_state = (" + ".join(str(row[stage]) for row in rows) for rows in counts)
        memory = num_bytes(balance.peak_bytes[stage])
        table.add_row(str(stage), layers, milliseconds(seconds), memory, *by_state)
    return Group(Text(f"balanced by the cost model: {where}; {proven}"), table)


def _row(prediction: Prediction, speedup: str, *, has_sizes: bool) -> tuple[str, ...]:
    return (
        "" if prediction.number is None else str(prediction.number),
        short_name(prediction.candidate),
        *((str(prediction.figures.num_devices),) if has_sizes else ()),
        rate(prediction.score),
        speedup,
        milliseconds(prediction.step_s),
        num_bytes(prediction.peak_bytes) + ("" if prediction.fits else " (too much)"),
        _largest(prediction.step_terms_s, NUM_TIME_TERMS),
        _largest(prediction.peak_terms_bytes, NUM_MEMORY_TERMS),
    )


def _terms(prediction: Prediction) -> RenderableType:
    speed = f"{rate(prediction.score)} {prediction.unit}"
    head = Text(
        f"expected {speed}, within a factor of {math.exp(prediction.log_spread):.2f} two times out of three; "
        f"{num_bytes(prediction.peak_bytes)} of {num_bytes(prediction.limit_bytes)} on stage "
        f"{prediction.fullest_stage}, fits with {chance(prediction.probability_fits)}"
    )
    names = Column(title="term", min_width=20)
    table = FittedTable(columns=(names, Column(title="value", is_number=True), Column(title="share", is_number=True)))
    for name, value in prediction.step_terms_s.items():
        if value:
            table.add_row(name, milliseconds(value), f"{value / prediction.step_s:.1%}")
    table.add_row("step", milliseconds(prediction.step_s), "", style="bold")
    table.add_section()
    for name, value in prediction.peak_terms_bytes.items():
        if value:
            table.add_row(name, num_bytes(value), f"{value / prediction.peak_bytes:.1%}")
    table.add_row("peak memory", num_bytes(prediction.peak_bytes), "", style="bold")
    return Group(head, table)


def _largest(terms: Mapping[str, float], num: int) -> str:
    total = sum(terms.values())
    ranked = sorted(terms.items(), key=lambda item: -item[1])[:num]
    return ", ".join(f"{name.replace('_', ' ')} {value / total:.0%}" for name, value in ranked)


# Estimates of dry runs on the terminal: memory and work of each stage.


NEGLIGIBLE = 0.005
"""Shares of the peak below this are not shown."""


TENSORS_ALONE = (
    "CPU: tensors alone are counted. The peak of a trial is the growth of its resident set, which also holds buffers "
    "and memory that was freed: 1.5 to 2 times as much was measured for small models."
)


def render_dry_runs(verdicts: Sequence[DryRunVerdict], *, as_table: bool = False) -> RenderableType:
    """One block per trial: verdict, memory by stage, work by stage; or one line per trial."""
    if as_table:
        notes = [Text(TENSORS_ALONE, style="dim")] if any(verdict.on_cpu for verdict in verdicts) else []
        return Group(_overview(verdicts), *notes)
    blocks: list[RenderableType] = []
    for verdict in verdicts:
        blocks += [*_block(verdict), Text("")]
    return Group(*blocks[:-1])


def _overview(verdicts: Sequence[DryRunVerdict]) -> FittedTable:
    columns = (
        Column(title="configuration", min_width=24),
        Column(title="ranks", priority=1, is_number=True),
        Column(title="peak", priority=5, is_number=True),
        Column(title="with margin", is_number=True),
        Column(title="", name="verdict", priority=90, min_width=12),
    )
    table = FittedTable(columns=columns)
    for verdict in verdicts:
        name, ranks, result = short_name(verdict.candidate), str(verdict.candidate.layout.world_size), verdict.result
        if isinstance(result, RunFailure):
            table.add_row(name, ranks, "", "", Text(f"no estimate: {result.message}", style="red"))
            continue
        needed = result.needed_bytes(verdict.fragmentation, verdict.context_bytes)
        sizes = num_bytes(result.peak_bytes), num_bytes(needed)
        table.add_row(name, ranks, *sizes, _word(needed, verdict.limit_bytes))
    return table


def _block(verdict: DryRunVerdict) -> Iterator[RenderableType]:
    world_size = verdict.candidate.layout.world_size
    ranks = units.count(world_size, "rank")
    yield Text.assemble((verdict.name, "bold"), f"  {short_name(verdict.candidate)}  {ranks}")
    result = verdict.result
    if isinstance(result, RunFailure):
        yield Text.assemble((f"no estimate ({result.reason}): ", "red"), result.message)
        return
    yield _judgement(verdict, result)
    if verdict.on_cpu:
        yield Text(TENSORS_ALONE, style="dim")
    yield _memory_dry_run(verdict, result)
    if result.host_bytes:
        yield Text(f"offloaded: up to {num_bytes(result.host_bytes)} of host memory per rank")
    yield _work(result)
    how = "computed from smaller models" if result.extrapolated else "all layers simulated"
    yield Text(f"{how}; {result.cpu_s:.1f} CPU-seconds", style="dim")


def _judgement(verdict: DryRunVerdict, estimate: DryRunEstimate) -> Text:
    needed = num_bytes(estimate.needed_bytes(verdict.fragmentation, verdict.context_bytes))
    if verdict.limit_bytes is None:
        return Text(f"needs {needed} of device memory; name a limit with --max-device-memory")
    what = f"{'tensors need' if verdict.on_cpu else 'needs'} {needed} of {num_bytes(verdict.limit_bytes)}"
    if verdict.fits:
        return Text.assemble(("fits", "bold green"), f": {what}")
    return Text.assemble(("does not fit", "bold red"), f": {what}")


def _memory_dry_run(verdict: DryRunVerdict, estimate: DryRunEstimate) -> FittedTable:
    columns = (
        Column(title="stage", is_number=True),
        Column(title="rank", priority=5, is_number=True),
        Column(title="tensors" if verdict.on_cpu else "peak", is_number=True),
        Column(title="with margin", is_number=True),
        Column(title="in", priority=6),
        Column(title="", name="verdict", priority=90),
        Column(title="of which", priority=7, min_width=20),
    )
    table = FittedTable(title="memory at the peak", columns=columns)
    for stage in estimate.stages:
        needed = stage.needed_bytes(verdict.fragmentation, verdict.context_bytes)
        numbers = (str(stage.stage), str(stage.rank), num_bytes(stage.peak_bytes), num_bytes(needed))
        table.add_row(*numbers, stage.peak_phase, _word(needed, verdict.limit_bytes), _categories(stage))
    return table


def _categories(stage: StageEstimate) -> str:
    sizes = sorted(stage.peak_by_category.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {num_bytes(size)}" for name, size in sizes if size >= NEGLIGIBLE * stage.peak_bytes)


def _word(needed_bytes: int, limit_bytes: int | None) -> Text:
    if limit_bytes is None:
        return Text("")
    return Text("fits", style="green") if needed_bytes <= limit_bytes else Text("does not fit", style="red")


def _work(estimate: DryRunEstimate) -> FittedTable:
    columns = (
        Column(title="stage", is_number=True),
        Column(title="parameters", is_number=True),
        Column(title="FLOPs forward", is_number=True),
        Column(title="backward", priority=6, is_number=True),
        Column(title="recompute", priority=5, is_number=True),
        Column(title="collectives", priority=7, min_width=20),
    )
    table = FittedTable(title="work per step and rank", columns=columns)
    for stage in estimate.stages:
        work = [f"{stage.flops.get(name, 0):.3g}" for name in ("forward", "backward", "recompute")]
        table.add_row(str(stage.stage), f"{stage.num_parameters:,}", *work, _traffic(stage))
    return table


def _traffic(stage: StageEstimate) -> str:
    return ", ".join(
        f"{traffic.num_calls} {name} ({num_bytes(traffic.num_bytes)})" for name, traffic in stage.collectives.items()
    )

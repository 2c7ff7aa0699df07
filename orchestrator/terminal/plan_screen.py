"""Before a sweep, on the terminal: its plan, dry runs, a probe, the doctor's findings, a short run."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cluster.cost.stage_balance import Balance
from cluster.probing import SLOW_DEVIATIONS, SLOW_RATIO, Network, NodeRates, Profile, SlowFigure
from cluster.probing import Progress as Report
from orchestrator import units
from orchestrator.commands.forecast import DryRunVerdict, PlannedFile, Probed
from orchestrator.commands.short_run import Checked, CheckedInside, CheckedMemory, ExpectedDuration
from orchestrator.console import SafeConsole
from orchestrator.doctor import Diagnosed, Finding
from orchestrator.frameworks.shell import assignments
from orchestrator.objective import unit_legend
from orchestrator.planning.planner import Plan
from orchestrator.planning.predictions import CandidateExplanation, PlanPredictions, UsualGain, UsualRanking
from orchestrator.report.view import Column
from orchestrator.search.predictor import Prediction
from orchestrator.space.notation import legend, short_name
from orchestrator.terminal.fitted import FittedTable, indented, label_grid, render_legend
from orchestrator.text import plain
from orchestrator.units import chance, count, device_time, milliseconds, num_bytes, rate
from trials.dryrun.estimate import DryRunEstimate, RunFailure, StageEstimate
from trials.outcome import Measurement
from trials.spec import Candidate

# ---- Plans and dry runs of candidates on the terminal

# A plan with its predictions on the terminal.


MAX_CANDIDATES = 20
"""Maximum number of candidates of a plan to show."""
SURELY_FITS = 0.995
"""Probability of fitting into memory from which on it is not shown."""
MAX_PREDICTIONS = 10
"""Number of candidates shown that are expected to be fastest."""


def render_planned_file(planned: PlannedFile) -> RenderableType:
    """The ranking, then its derivation; for one candidate only, if requested."""
    if planned.explanation is not None:
        return render_explanation(planned.explanation)
    if planned.predictions is None and planned.usual is not None and planned.usual.top:
        ranking = render_usual(planned.usual, planned.unpredicted)
        return Group(ranking, Text(""), render_plan(planned.plan, is_ranked=True, has_baseline=True))
    if planned.predictions is None:
        return Group(render_plan(planned.plan), Text(""), Text(f"no prediction: {planned.unpredicted}"))
    return Group(render_predictions(planned.predictions), Text(""), render_plan(planned.plan, is_ranked=True))


def render_plan(plan: Plan, *, is_ranked: bool = False, has_baseline: bool = False) -> RenderableType:
    """The number of candidates, the first of them, and what was ruled out by which rule.

    ``is_ranked``: the candidates were listed before, including the baseline unless ``has_baseline``; only predictions
    of dry runs are shown here.
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
        parts.append(Text(f"not balanced: {plan.unbalanced}", style="yellow"))
    if plan.num_rejected:
        parts += [Text(""), _rejected(plan)]
    if plan.env or len(plan.defaults) > 1:  # on a single CPU host it is loopback for gloo: no choice to show
        parts += [Text(""), *_environment(plan)]
    if plan.notes:
        parts += [Text(""), *(Text(f"note: {note}", style="yellow") for note in plan.notes)]
    return Group(*parts)


def _environment(plan: Plan) -> list[Text]:
    """Environment variables of ranks from the file, and defaults."""
    given = assignments(plan.env) or "none"
    kept = [f"{one.name}={one.value}" for one in plan.defaults if one.name not in plan.env]
    return [
        Text(f"environment of every rank  {given}"),
        Text(f"defaults, unless set on the host  {' '.join(kept) or 'none'}", style="dim"),
    ]


def _baseline(plan: Plan) -> Text:
    memory = _memory(plan, plan.baseline)
    words = f"  predicted peak {memory[0]}, {memory[1]} with margin" if any(memory) else ""
    return Text.assemble("baseline  ", (short_name(plan.baseline), "bold"), words)


def _head(plan: Plan) -> Text:
    rejected = f"{sum(plan.num_rejected.values()):,} rejected"
    if plan.too_large:
        drawn = (f"{len(plan.candidates):,} legal candidates drawn", "bold green")
        return Text.assemble(drawn, f"; {rejected} while drawing")
    return Text.assemble(
        (f"{len(plan.candidates):,} legal candidates", "bold green"),
        f" of {plan.product_size:,} combinations; {rejected}, "
        f"{plan.num_duplicates:,} duplicates after removing knobs without effect",
    )


def _has_memory(plan: Plan) -> bool:
    """Whether a dry run predicted the memory of a shown candidate."""
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
    """Predicted peak, and with margin; empty if unknown."""
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
"""Number of largest terms shown per figure; the explanation of one candidate and JSON have all."""


def render_predictions(predictions: PlanPredictions) -> RenderableType:
    """The candidates expected to be fastest, with the terms of their time and memory."""
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
    """The best candidates by the knobs' typical effects, relative to the baseline."""
    head = Text(f"no prediction: {unpredicted}; these are typical effects of the knobs, not a model of your program")
    has_limit = any(one.probability_fits < SURELY_FITS for one in ranking.top)
    columns = [Column(title="#", is_number=True), Column(title="configuration", min_width=24)]
    columns += [Column(title="speed-up", is_number=True), Column(title="two of three", priority=9)]
    columns += [Column(title="fits", priority=8, is_number=True)] if has_limit else []
    table = FittedTable(title="typically the best", columns=columns)
    for one in ranking.top:
        fits = (f"{one.probability_fits:.0%}",) if has_limit else ()
        between = f"{one.low:.2f}x to {one.high:.2f}x"
        table.add_row(str(one.number), short_name(one.candidate), f"{one.gain:.2f}x", between, *fits)
    order = "; ordered by speed-up x probability of fitting" if has_limit else ""
    note = f"speed-up over the baseline: median over programs, and the range that covers two out of three{order}"
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


def render_explanation(explanation: CandidateExplanation) -> RenderableType:
    """Whether it is legal, and each term of the prediction."""
    parts: list[RenderableType] = [Text(short_name(explanation.candidate), style="bold")]
    changed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in explanation.changed.items())
    parts.append(Text(f"compared with the baseline: {changed or 'identical'}"))
    if explanation.violations:
        parts += [Text(f"not legal, rule {v.rule_id}: {v.reason}", style="red") for v in explanation.violations]
        return Group(*parts)
    where = (
        f"candidate {explanation.number} of the plan"
        if explanation.number
        else "legal, but not in the space of this file"
    )
    parts.append(Text(where, style="green" if explanation.number else "yellow"))
    if explanation.prediction is None:
        usual = () if explanation.usual is None else (_usual(explanation.usual),)
        return Group(*parts, Text(f"no prediction: {explanation.unpredicted}"), *usual)
    parts.append(_terms(explanation.prediction))
    if explanation.balance is not None:
        parts.append(_balance(explanation.balance))
    return Group(*parts)


def _usual(found: UsualGain) -> Text:
    fits = "" if found.probability_fits >= SURELY_FITS else f"; fits with {chance(found.probability_fits)}"
    return Text(
        f"typically {found.gain:.2f}x the speed of the baseline, "
        f"{found.low:.2f}x to {found.high:.2f}x in two out of three programs{fits}"
    )


def _balance(balance: Balance) -> RenderableType:
    """The step time breakdown of a balanced pipeline, and the content of every stage."""
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
        f"expected {speed}, within a factor of {math.exp(prediction.log_spread):.2f} in two out of three cases; "
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
    "CPU: tensors are counted, as in `peak_memory_gib` of a trial. Its resident set also includes buffers and freed "
    "memory: small models measured 1.5 to 2 times as much."
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
    if result.is_upper_bound:
        yield Text("upper bound: compiled layers were simulated as eager code, which usually keeps more", style="dim")
    yield _memory_dry_run(verdict, result)
    if verdict.crowded_bytes is not None:
        yield _worst_case(verdict.crowded_bytes, verdict.limit_bytes)
    if result.host_bytes:
        yield Text(f"offloaded: up to {num_bytes(result.host_bytes)} of host memory per rank")
    yield _work(result)
    how = "extrapolated from smaller models" if result.extrapolated else "all layers simulated"
    yield Text(f"{how}; {result.cpu_s:.1f} CPU-seconds", style="dim")


def _worst_case(needed_bytes: int, limit_bytes: int | None) -> Text:
    text = f"experts: tokens divided equally over ranks; a rank that gets them all needs {num_bytes(needed_bytes)} "
    return Text.assemble(text, _word(needed_bytes, limit_bytes))


def _judgement(verdict: DryRunVerdict, estimate: DryRunEstimate) -> Text:
    needed = num_bytes(estimate.needed_bytes(verdict.fragmentation, verdict.context_bytes))
    if verdict.limit_bytes is None:
        return Text(f"needs {needed} of device memory; set a limit with --max-device-memory")
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


# ---- The measurements of a probe, the doctor's findings, and the result of a short run on the terminal

FORMATS = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16", "float16": "fp16"}
COPIES = {"device": "copy", "to_device": "to device", "from_device": "from device"}
FINDING_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
MAX_NODES = 32
"""Maximum number of nodes shown; slow ones come first, and JSON has all."""
_NODE = Column(title="node", min_width=12)

VALUES = {
    "step_time_s": ("step time", "step_time_s"),
    "loss": ("loss", "losses"),
    "grad_norm": ("gradient norm", "grad_norms"),
    "data_s": ("waiting for data", "breakdown"),
    "allocated_bytes": ("memory allocated", "peak_allocated_bytes"),
    "reserved_bytes": ("memory reserved", "peak_reserved_bytes"),
}
"""The values shown of a trial, in table order: title and field of the measurement."""
OF_PROCESS = {"rss_bytes": ("process memory", "peak_allocated_bytes")}
"""Title that replaces the allocator's figure on CPUs."""
SOURCES = {"report": "its own report", "hook": "the hook", "file": "a file it writes", "log": "its output"}


@contextlib.contextmanager
def progress() -> Iterator[Report]:
    """A bar on stderr."""
    columns = (TextColumn("measuring {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=SafeConsole(stderr=True), transient=True) as bar:
        task = bar.add_task("nodes", total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield report


def render_probe(probed: Probed) -> RenderableType:
    """One line per node, the network's rates, and the slow nodes with their slowest figure."""
    profile = probed.profile
    count = units.count(len(profile.nodes), "node")
    head = Text.assemble((count, "bold"), f" with {profile.hardware} each; each node is rated by its slowest device")
    parts: list[RenderableType] = [head, _devices(probed)]
    if any(node.all_reduce or node.transfer for node in profile.nodes):
        parts.append(_links(profile))
    parts += [Text(_network(network)) for network in profile.networks]
    parts += [Text(_sentence(slow, _flops_unit(profile.nodes)), style="yellow") for slow in _worst(profile)]
    parts += [Text(f"{node.node} could not be measured: {node.failure}", style="red") for node in profile.failed]
    if profile.unfit:
        parts.append(Text(_advice(probed)))
    return Group(*parts, Text(f"saved for `plan` and `submit` in {probed.file}", style="dim", overflow="fold"))


def _ranked(profile: Profile) -> list[NodeRates]:
    """Nodes in display order: slow ones first."""
    unfit = set(profile.unfit)
    return sorted(profile.nodes, key=lambda node: (node.node not in unfit, node.node))


def _devices(probed: Probed) -> RenderableType:
    profile = probed.profile
    nodes = _ranked(profile)
    formats = [name for name in FORMATS if any(name in node.matmul_flops_per_s for node in nodes)]
    copies = [name for name in COPIES if any(name in node.copy_bytes_per_s for node in nodes)]
    scale, unit = _flops_unit(profile.nodes)
    columns = [_NODE]
    columns += [Column(title=FORMATS[f], priority=20 - i, is_number=True) for i, f in enumerate(formats)]
    columns += [Column(title=COPIES[c], priority=10 - i, is_number=True) for i, c in enumerate(copies)]
    columns.append(Column(title="verdict"))
    table = FittedTable(title=f"matmul {unit} by number format, copies GB/s", columns=columns)
    for node in nodes[:MAX_NODES]:
        cells = [
            _scaled(node.matmul_flops_per_s[f].per_s, scale) if f in node.matmul_flops_per_s else "" for f in formats
        ]
        cells += [_scaled(node.copy_bytes_per_s[c].per_s, 1e9) if c in node.copy_bytes_per_s else "" for c in copies]
        table.add_row(node.node, *cells, _verdict(node, probed))
    if (hidden := len(nodes) - MAX_NODES) > 0:
        table.add_row(f"... and {hidden} more (--json lists all)")
    return table


def _links(profile: Profile) -> RenderableType:
    columns = [_NODE, Column(title="all-reduce in the node, GB/s", is_number=True)]
    columns.append(Column(title="latency, us", priority=5, is_number=True))
    if has_others := any(node.transfer for node in profile.nodes):
        columns.append(Column(title="to other nodes, GB/s", priority=6, is_number=True))
    table = FittedTable(title="links, per device, used concurrently", columns=columns)
    for node in _ranked(profile)[:MAX_NODES]:
        inside, outside = node.all_reduce, node.transfer
        cells = [_scaled(inside.bus_bytes_per_s, 1e9), _scaled(inside.latency_s, 1e-6)] if inside else ["", ""]
        if has_others:
            cells.append(_scaled(outside.bytes_per_s, 1e9) if outside else "")
        table.add_row(node.node, *cells)
    return table


def _network(network: Network) -> str:
    link = network.all_reduce
    return (
        f"network: all-reduce over {link.world_size} nodes {_scaled(link.bus_bytes_per_s, 1e9)} GB/s per device, "
        f"latency {_scaled(link.latency_s, 1e-6)} us"
    )


def _verdict(node: NodeRates, probed: Probed) -> Text:
    word = "failed" if node.failure else "slow" if node.node in probed.profile.unfit else "good"
    style = {"failed": "bold red", "slow": "bold yellow", "good": "green"}[word]
    return Text(f"{word}, excluded" if node.node in probed.excluded else word, style=style)


def _worst(profile: Profile) -> list[SlowFigure]:
    """For each slow node, its slowest figure."""
    worst: dict[str, SlowFigure] = {}
    for slow in profile.slow_figures:
        worst.setdefault(slow.node, slow)
    return list(worst.values())


def _flops_unit(nodes: Sequence[NodeRates]) -> tuple[float, str]:
    """TFLOP/s, unless every node stays below one."""
    fastest = max((rate.per_s for node in nodes for rate in node.matmul_flops_per_s.values()), default=0.0)
    return (1e12, "TFLOP/s") if fastest >= 1e12 else (1e9, "GFLOP/s")


def _sentence(slow: SlowFigure, flops_unit: tuple[float, str]) -> str:
    scale, unit = flops_unit if slow.figure.startswith("matmul") else (1e9, "GB/s")
    return (
        f"{slow.node} is slow: {slow.figure} {_scaled(slow.per_s, scale)} {unit}, {slow.ratio:.0%} of the median "
        f"{_scaled(slow.usual_per_s, scale)}"
    )


def _advice(probed: Probed) -> str:
    rule = f"Slow: below {SLOW_RATIO:.0%} of the median and more than {SLOW_DEVIATIONS:g} robust deviations from it."
    if set(probed.profile.unfit) <= probed.excluded:
        return f"{rule} The sweep file excludes these nodes."
    names = ", ".join(probed.profile.unfit)
    return f"{rule} To exclude them: cluster.exclude_slow_nodes: true, or exclude_nodes: [{names}]."


def _scaled(value: float, scale: float) -> str:
    """A value with three significant digits, or all digits before the decimal point."""
    scaled = value / scale
    return f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.3g}"


def render_doctor(diagnosed: Diagnosed) -> RenderableType:
    """All findings and the verdict."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in diagnosed.findings:
        table.add_row(
            Text(finding.level, style=FINDING_STYLES[finding.level]), Text(finding.subject), _finding_text(finding)
        )
    style = "bold red" if diagnosed.num_failed else "bold green"
    return Group(table, Padding(Text(diagnosed.verdict, style=style), (1, 0, 0, 0)))


def _finding_text(finding: Finding) -> Text:
    words = Text(finding.words)
    if finding.remedy:
        words.append("\n")
        words.append(finding.remedy, style="italic")
    return words


def render_checked(checked: Checked) -> RenderableType:
    """The verdict, then what supports it."""
    parts: list[RenderableType] = [_check_verdict(checked)]
    grid = label_grid()
    for label, words in _checked_lines(checked):
        grid.add_row(label, words)
    parts.append(indented(grid))
    if checked.measurement is not None and checked.seen.sources:
        parts += [Text(""), _sources(checked, checked.measurement)]
    if checked.log_tail:
        parts += [Text(""), Text("last lines of its output", style="bold")]
        parts += [Text(f"  | {plain(line)}", overflow="fold") for line in checked.log_tail]
    return Group(*parts)


def check_line(checked: Checked) -> str:
    """A successful run in one line."""
    seen = [title for name, (title, _) in VALUES.items() if checked.seen.source_of(name) is not None]
    found = f"; observed: {', '.join(seen)}" if seen else ""
    late = checked.needed_starting_s
    hint = f"; deadlines.starting_s is tight: use {late}" if late is not None else ""
    return f"{checked.candidate} runs; first step after {checked.starting_s or 0:.0f} s{found}{hint}"


def expected_line(expected: ExpectedDuration) -> str:
    """The expected duration of the sweep, in words."""
    least, most = round(expected.least_s / 60), round(expected.most_s / 60)
    if most < 2:
        took = "at most 2 min"
    elif most < 180:
        took = f"about {least} to {most} min" if least < most else f"about {most} min"
    else:
        took = f"about {expected.least_s / 3600:.1f} to {expected.most_s / 3600:.1f} h"
    return f"{units.count(expected.num_trials, 'trial')} and their confirmation: {took}"


def _check_verdict(checked: Checked) -> Text:
    if checked.is_good:
        return Text(f"{checked.sweep}: its trials can be measured", style="bold green")
    what = "a knob has no effect" if checked.is_not_applied else "its trials cannot be measured"
    return Text(f"{checked.sweep}: {what}", style="bold red")


def _checked_lines(checked: Checked) -> Iterator[tuple[str, str]]:
    yield "ran", checked.candidate
    if checked.command:
        yield "command", shlex.join(checked.command)
    if checked.evidence is not None:
        code = checked.evidence.exit_code
        ended = f" (exit code {code})" if code is not None else ""
        yield "problem", f"{units.status_label(checked.outcome.kind)}{ended}: {plain(checked.evidence.message)}"
    if checked.contradiction:
        yield "problem", checked.contradiction
    if checked.remedy is not None:
        yield "remedy", checked.remedy
    if checked.starting_s is not None:
        yield "start", _start(checked)
    if checked.measurement is not None:
        found = checked.measurement
        yield "step", f"{units.milliseconds(found.step_time_s)}, median of {len(found.counted_step_times_s)} steps"
    if checked.memory is not None:
        yield "memory", _memory_line(checked.memory)
    if checked.expected is not None:
        yield "sweep", f"{expected_line(checked.expected)}; submit --max-trials N shortens it"
    if checked.facts:
        yield (
            "seen",
            ", ".join(f"{name.replace('_', ' ')} {_plain_number(value)}" for name, value in checked.facts.items()),
        )
    if checked.inside is not None:
        yield "inside", _inside(checked.inside)
    for note in checked.seen.notes:
        yield "note", plain(note)


def _memory_line(found: CheckedMemory) -> str:
    parts = {
        "weights": found.weights_bytes,
        "gradients": found.gradient_bytes,
        "optimiser states": found.optimizer_bytes,
        "activations per sample": found.sample_bytes,
    }
    of_peak = ", ".join(f"{name} {num_bytes(size)}" for name, size in parts.items())
    fitting = f"{found.num_fitting:,} of {units.count(found.num_candidates, 'candidate')} expected to fit"
    return f"peak {num_bytes(found.peak_bytes)} of {num_bytes(found.limit_bytes)}: {of_peak}; {fitting}"


def _inside(found: CheckedInside) -> str:
    if found.problem is None:
        return ", ".join(f"{name} applied ({detail})" for name, detail in found.applied)
    return f"set {', '.join(found.knobs)}: {plain(found.problem).removeprefix('not applied: ')}"


def _start(checked: Checked) -> str:
    took = f"first step {checked.starting_s:.0f} s after the launch"
    if checked.needed_starting_s is None:
        return f"{took}; deadlines.starting_s allows {checked.deadline_s:.0f}"
    allowed = f"deadlines.starting_s allows {checked.deadline_s:.0f}"
    return f"{took}, and {allowed}: set deadlines: {{starting_s: {checked.needed_starting_s}}}"


def _sources(checked: Checked, found: Measurement) -> RenderableType:
    """One line per value: the median of step times, else the last value; its source, and its precision."""
    columns = [Column(title="value"), Column(title="seen", is_number=True), Column(title="from", min_width=12)]
    columns.append(Column(title="precision", is_number=True))
    table = FittedTable(columns=columns)
    sources = {source.name: source for source in checked.seen.sources}
    shown = VALUES if "allocated_bytes" in sources else {**VALUES, **OF_PROCESS}
    for name, (title, key) in shown.items():
        source = sources.pop(name, None)
        if source is not None:
            table.add_row(title, _last(found, key), _source(source.source), _resolution(name, source.resolution))
        elif name in ("step_time_s", "loss"):
            table.add_row(title, units.DASH, "not found", "")
    for source in sources.values():
        title = source.name.replace("_", " ")
        table.add_row(title, "seen", _source(source.source), _resolution(source.name, source.resolution))
    return table


def _source(source: str) -> str:
    """``hook:torch`` in words."""
    kind, _, name = source.partition(":")
    return f"{SOURCES.get(kind, kind)} ({name})" if name else SOURCES.get(kind, kind)


def _plain_number(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _last(found: Measurement, name: str) -> str:
    value = found.breakdown.data_s if name == "breakdown" else getattr(found, name, None)
    if isinstance(value, tuple):
        value = value[-1] if value else None
    if value is None:
        return ""
    if name.endswith("_bytes"):
        return units.num_bytes(value)
    return units.milliseconds(value) if name in ("step_time_s", "breakdown") else f"{value:,.5g}"


def _resolution(name: str, resolution: float) -> str:
    if not resolution:
        return "exact"
    if name.endswith("_bytes"):
        return units.num_bytes(int(resolution))
    return f"{resolution * 1000:.3g} ms" if name.endswith("_s") else f"{resolution:.3g}"

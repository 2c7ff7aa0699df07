"""A plan, for people."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.commands.plan import Planning
from orchestrator.planning.plan import Plan
from orchestrator.space.space import short_name
from orchestrator.terminal.report_forecast import render_forecast, render_why
from orchestrator.units import num_bytes
from trials.spec import Candidate

MAX_CANDIDATES = 20


def render_planning(planning: Planning) -> RenderableType:
    """The plan with its forecast; of one candidate only, where one was asked for."""
    if planning.why is not None:
        return render_why(planning.why)
    parts: list[RenderableType] = [render_plan(planning.plan), Text("")]
    if planning.forecast is not None:
        return Group(*parts, render_forecast(planning.forecast))
    return Group(*parts, Text(f"no prediction: {planning.unpredicted}"))


def render_plan(plan: Plan) -> RenderableType:
    """How many candidates there are, the first of them, and what was ruled out by which rule."""
    memory = _memory(plan, plan.baseline)
    words = f"  predicted peak {memory[0]}, {memory[1]} with margin" if any(memory) else ""
    baseline = Text.assemble("baseline  ", (short_name(plan.baseline), "bold"), words)
    parts: list[RenderableType] = [_head(plan)]
    if plan.too_large:
        parts.append(Text(plan.too_large, style="yellow"))
    parts += [baseline, Text(""), _candidates(plan)]
    if plan.balances:
        parts.append(Text(f"{len(plan.balances)} of them balanced by the cost model: layers and recompute per stage"))
    if plan.unbalanced:
        parts.append(Text(f"nothing was balanced: {plan.unbalanced}", style="yellow"))
    if plan.num_rejected:
        parts += [Text(""), _rejected(plan)]
    return Group(*parts)


def _head(plan: Plan) -> Text:
    rejected = f"{sum(plan.num_rejected.values()):,} rejected"
    if plan.too_large:
        drawn = (f"{len(plan.candidates):,} legal candidates drawn at random", "bold green")
        return Text.assemble(drawn, f"; {rejected} on the way")
    return Text.assemble(
        (f"{len(plan.candidates):,} legal candidates", "bold green"),
        f" of {plan.product_size:,} combinations; {rejected}, "
        f"{plan.num_duplicates:,} alike after removing knobs without effect",
    )


def _candidates(plan: Plan) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, title="candidates", title_justify="left", pad_edge=False)
    table.add_column("#", justify="right")
    table.add_column("configuration", no_wrap=True)
    shown = plan.candidates[:MAX_CANDIDATES]
    has_memory = any(map(plan.known.to_json, shown))
    for title in ("predicted peak", "with margin") if has_memory else ():
        table.add_column(title, justify="right", no_wrap=True)
    for i, candidate in enumerate(shown, start=1):
        table.add_row(str(i), short_name(candidate), *(_memory(plan, candidate) if has_memory else ()))
    if (hidden := len(plan.candidates) - MAX_CANDIDATES) > 0:
        table.add_row("", f"... and {hidden} more (--json lists all)")
    return table


def _memory(plan: Plan, candidate: Candidate) -> tuple[str, str]:
    """Predicted peak, and with margin; empty where they are unknown."""
    estimate = plan.known.by_candidate.get(candidate)
    if estimate is None:
        return "", ""
    return num_bytes(estimate.peak_bytes), num_bytes(plan.known.needed_bytes(estimate))


def _rejected(plan: Plan) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, title="rejected", title_justify="left", pad_edge=False)
    table.add_column("rule")
    table.add_column("count", justify="right")
    table.add_column("for example")
    for rule_id, count in plan.num_rejected.items():
        example = next(example for example in plan.examples if example.rule_id == rule_id)
        table.add_row(rule_id, str(count), f"{short_name(example.candidate)}: {example.reason}")
    return table

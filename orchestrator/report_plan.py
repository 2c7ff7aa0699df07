"""A plan, for people."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.plan import Plan
from orchestrator.space import short_name

MAX_CANDIDATES = 20


def render_plan(plan: Plan) -> RenderableType:
    """How many candidates there are, the first of them, and what was ruled out by which rule."""
    head = Text.assemble(
        (f"{len(plan.candidates)} legal candidates", "bold green"),
        f" of {plan.product_size} combinations; {sum(plan.num_rejected.values())} rejected, "
        f"{plan.num_duplicates} alike after removing knobs without effect",
    )
    baseline = Text.assemble("baseline  ", (short_name(plan.baseline), "bold"))
    parts: list[RenderableType] = [head, baseline, Text(""), _candidates(plan)]
    if plan.num_rejected:
        parts += [Text(""), _rejected(plan)]
    return Group(*parts)


def _candidates(plan: Plan) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, title="candidates", title_justify="left", pad_edge=False)
    table.add_column("#", justify="right")
    table.add_column("configuration", no_wrap=True)
    for i, candidate in enumerate(plan.candidates[:MAX_CANDIDATES], start=1):
        table.add_row(str(i), short_name(candidate))
    if (hidden := len(plan.candidates) - MAX_CANDIDATES) > 0:
        table.add_row("", f"... and {hidden} more (--json lists all)")
    return table


def _rejected(plan: Plan) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, title="rejected", title_justify="left", pad_edge=False)
    table.add_column("rule")
    table.add_column("count", justify="right")
    table.add_column("for example")
    for rule_id, count in plan.num_rejected.items():
        example = next(example for example in plan.examples if example.rule_id == rule_id)
        table.add_row(rule_id, str(count), f"{short_name(example.candidate)}: {example.reason}")
    return table
